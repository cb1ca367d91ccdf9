"""Leases that are over, workers that are gone, shutdowns, retired rows (contract §4.8)."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from pydantic import BaseModel

from tinycortex import RETIRED_JOB_KINDS, Cortex, Job, JobStatus
from tinycortex.testing import JobRowFactory, ManualClock, NewJobFactory, insert_rows

OpenCortex = Callable[..., Cortex]


class NoPayload(BaseModel):
    """What a job that needs nothing carries."""


def test_an_expired_lease_frees_its_row(cortex: Cortex) -> None:
    """Contract §4.8: ready, attempts kept, the lease gone, and a note when there is no error to keep."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", expired=True, attempts=2))
    before = cortex.get_job("j")
    assert cortex.recover_stale_locks() == 1
    assert cortex.get_job("j") == replace(
        before,
        status=JobStatus.READY,
        locked_until_ms=None,
        locked_by=None,
        last_error="recovered_from_stale_lock",
    )


@pytest.mark.parametrize(
    ("last_error", "kept"), [(None, "recovered_from_stale_lock"), ("", "recovered_from_stale_lock"), ("hint", "hint")]
)
def test_the_note_never_replaces_an_error(cortex: Cortex, last_error: str | None, kept: str) -> None:
    """Contract §4.8: ``recovered_from_stale_lock`` only if ``last_error`` is empty."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", expired=True, last_error=last_error))
    cortex.recover_stale_locks()
    assert cortex.get_job("j").last_error == kept


@pytest.mark.parametrize(("late_ms", "recovered"), [(0, 0), (1, 1)])
def test_a_lease_is_over_only_past_its_end(cortex: Cortex, clock: ManualClock, late_ms: int, recovered: int) -> None:
    """A lease that ends this very millisecond still holds."""
    insert_rows(cortex.database, JobRowFactory.build(running=True, locked_until_ms=clock.now_ms()))
    clock.advance(late_ms)
    assert cortex.recover_stale_locks() == recovered


@pytest.mark.parametrize("state", ["ready", "delayed", "done", "failed", "deferred", "cancelled"])
def test_recovery_touches_running_rows_only(cortex: Cortex, state: str) -> None:
    """A settled row that still carries an old lease is not brought back to life."""
    traits = {} if state == "ready" else {state: True}
    insert_rows(cortex.database, JobRowFactory.build(id="j", locked_until_ms=1, locked_by="x", **traits))
    before = cortex.get_job("j")
    assert cortex.recover_stale_locks() == 0
    assert cortex.get_job("j") == before


def test_a_running_row_without_a_lease_is_freed(cortex: Cortex) -> None:
    """A row that another program left running with no lease would otherwise run for ever."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", running=True, locked_until_ms=None, locked_by=None))
    assert cortex.recover_stale_locks() == 1
    assert cortex.get_job("j").status is JobStatus.READY


def test_a_second_recovery_finds_nothing(cortex: Cortex) -> None:
    """Recovery is idempotent."""
    insert_rows(cortex.database, *JobRowFactory.build_batch(3, expired=True))
    assert cortex.recover_stale_locks() == 3
    assert cortex.recover_stale_locks() == 0


def test_a_job_that_kills_its_process_ends(cortex: Cortex, clock: ManualClock) -> None:
    """With its attempts used up, an expired row fails instead of running once more."""
    cortex.enqueue(NewJobFactory.build(max_attempts=3))
    runs = 0
    while cortex.jobs.claim_next() is not None:
        runs += 1
        clock.advance(300_001)
        cortex.recover_stale_locks()
    job = cortex.jobs.list_jobs()[0]
    assert runs == 3
    assert (job.status, job.completed_at_ms) == (JobStatus.FAILED, clock.now_ms())
    assert (job.failure_reason, job.failure_class) == ("lease_expired", "unrecoverable")
    assert (job.locked_until_ms, job.locked_by) == (None, None)


def test_a_worker_of_another_program_is_given_its_lease(cortex: Cortex) -> None:
    """Without proof that a worker is dead, only the end of its lease frees its rows."""
    insert_rows(cortex.database, JobRowFactory.build(running=True, locked_by="unknown"))
    assert cortex.recover_stale_locks() == 0


def test_a_living_worker_keeps_its_rows(cortex: Cortex, open_cortex: OpenCortex) -> None:
    """A second queue on the same database does not take what the first is running."""
    seen: list[int] = []
    other = open_cortex()

    def note(_ctx: object, _payload: object) -> None:
        seen.append(other.recover_stale_locks())

    cortex.handler("note", payload=NoPayload)(note)
    insert_rows(cortex.database, JobRowFactory.build(kind="note", payload_json="{}"))
    assert cortex.run_once()
    assert seen == [0]


def test_release_gives_back_ones_own_rows_only(cortex: Cortex) -> None:
    """A shutdown frees what this worker holds, attempts too, and nothing of any other worker."""
    mine: list[Job] = []
    insert_rows(cortex.database, *JobRowFactory.build_batch(2, attempts=1, claim_token=1))
    insert_rows(cortex.database, JobRowFactory.build(id="theirs", running=True))
    theirs = cortex.get_job("theirs")
    worker_id = cortex._turns.worker_id
    while (job := cortex.jobs.claim_next(worker_id=worker_id)) is not None:
        mine.append(job)
    assert cortex.release_running_locks() == 2
    assert cortex.get_job("theirs") == theirs
    for job in mine:
        assert cortex.get_job(job.id) == replace(
            job,
            status=JobStatus.READY,
            attempts=1,
            started_at_ms=None,
            locked_until_ms=None,
            locked_by=None,
        )


def test_released_again_and_again_a_job_keeps_its_budget(cortex: Cortex) -> None:
    """Six deploys in a row burn no attempt."""
    cortex.enqueue(NewJobFactory.build())
    for _ in range(6):
        assert cortex.jobs.claim_next(worker_id="me") is not None
        assert cortex.jobs.release_running_locks("me") == 1
    job = cortex.jobs.list_jobs()[0]
    assert (job.status, job.attempts, job.last_error) == (JobStatus.READY, 0, None)


@pytest.mark.parametrize("state", ["ready", "running", "done", "failed"])
def test_retired_rows_are_purged_whatever_their_status(cortex: Cortex, state: str) -> None:
    """Spec, Retired kinds: start-up deletes them, and them only."""
    traits = {} if state == "ready" else {state: True}
    insert_rows(cortex.database, *(JobRowFactory.build(kind=kind, **traits) for kind in RETIRED_JOB_KINDS))
    insert_rows(cortex.database, JobRowFactory.build(id="kept"), JobRowFactory.build(id="unknown", kind="unknown"))
    assert cortex.purge_retired_jobs() == 2
    assert sorted(job.id for job in cortex.jobs.list_jobs()) == ["kept", "unknown"]


def test_bootstrap_purges_and_recovers(cortex: Cortex) -> None:
    """Spec, Worker loop: ``bootstrap`` says how many rows were purged and how many recovered."""
    insert_rows(
        cortex.database,
        JobRowFactory.build(kind="digest_daily"),
        *JobRowFactory.build_batch(2, expired=True),
        JobRowFactory.build(running=True),
    )
    assert tuple(cortex.bootstrap()) == (1, 2)
