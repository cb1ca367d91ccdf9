"""Requeue by hand and self-heal (contract §4.10)."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tinycortex import Cortex, InvalidInputError, Job, JobFailure, JobNotFoundError, JobStatus, Requeued
from tinycortex.domain.policy import heal_spacing_ms
from tinycortex.testing import JobRowFactory, ManualClock, NewJobFactory, insert_rows

MINUTE_MS = 60_000
DAY_MS = 86_400_000

BULK: dict[str, Callable[[Cortex], Requeued]] = {
    "requeue_failed": lambda cortex: cortex.requeue_failed(),
    "retry_all_failed": lambda cortex: cortex.retry_all_failed(),
    "requeue_transient_failed": lambda cortex: cortex.requeue_transient_failed(),
    "self_heal": lambda cortex: cortex.jobs.self_heal(),
}


def statuses(cortex: Cortex) -> dict[str, JobStatus]:
    return {job.id: job.status for job in cortex.jobs.list_jobs()}


def test_a_requeued_row_is_like_new(cortex: Cortex, clock: ManualClock) -> None:
    """Contract §4.10: attempts 0, due now, and no trace of the failure; the token is not reused."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", failed_transient=True, deferred_since_ms=1, heals=3))
    before = cortex.get_job("j")
    clock.advance(10)
    assert cortex.requeue_failed() == Requeued(revived=1, superseded=0, blocked=0)
    assert cortex.get_job("j") == replace(
        before,
        status=JobStatus.READY,
        attempts=0,
        available_at_ms=clock.now_ms(),
        last_error=None,
        failure_reason=None,
        failure_class=None,
        completed_at_ms=None,
        deferred_since_ms=None,
        heals=0,
    )


@pytest.mark.parametrize("way", sorted(BULK))
def test_one_conflicting_row_does_not_hold_up_the_others(cortex: Cortex, clock: ManualClock, way: str) -> None:
    """Newest K1, K2 and the key-less row come back; the blocked K3 stays; older K1 is superseded."""
    now_ms = clock.now_ms()
    rows: dict[str, dict[str, object]] = {
        "k1-old": {"dedupe_key": "K1", "created_at_ms": now_ms - 2},
        "k1-new": {"dedupe_key": "K1", "created_at_ms": now_ms - 1},
        "k2": {"dedupe_key": "K2"},
        "keyless": {"dedupe_key": None},
        "k3": {"dedupe_key": "K3"},
    }
    insert_rows(
        cortex.database,
        *(JobRowFactory.build(id=job_id, failed_transient=True, **row) for job_id, row in rows.items()),
        JobRowFactory.build(id="k3-active", dedupe_key="K3"),
    )
    blocked = cortex.get_job("k3")
    assert BULK[way](cortex) == Requeued(revived=3, superseded=1, blocked=1)
    assert statuses(cortex) == {
        "k1-old": JobStatus.CANCELLED,
        "k1-new": JobStatus.READY,
        "k2": JobStatus.READY,
        "keyless": JobStatus.READY,
        "k3": JobStatus.FAILED,
        "k3-active": JobStatus.READY,
    }
    assert cortex.get_job("k3") == blocked
    assert cortex.get_job("k1-old").failure_reason == "superseded"
    assert cortex.status().failed_by_reason == {"timeout": 1}


def test_self_heal_counts_what_it_revived(cortex: Cortex) -> None:
    """The returned count is of rows that are ready again."""
    insert_rows(
        cortex.database,
        JobRowFactory.build(failed_transient=True, dedupe_key="K", created_at_ms=1),
        JobRowFactory.build(failed_transient=True, dedupe_key="K"),
    )
    assert cortex.self_heal() == 1


def test_of_rows_made_in_one_instant_the_last_is_revived(cortex: Cortex) -> None:
    """Ties between failed rows of one key are broken by id."""
    insert_rows(
        cortex.database,
        *(JobRowFactory.build(id=job_id, failed_transient=True, dedupe_key="K") for job_id in ("b", "c", "a")),
    )
    assert cortex.requeue_failed() == Requeued(revived=1, superseded=2, blocked=0)
    assert cortex.get_job("c").status is JobStatus.READY


@pytest.mark.parametrize("twin", ["ready", "running"])
def test_a_row_is_blocked_by_a_ready_or_a_running_twin(cortex: Cortex, twin: str) -> None:
    """Both hold the key; nothing is superseded behind them either."""
    insert_rows(
        cortex.database,
        *JobRowFactory.build_batch(2, failed_transient=True, dedupe_key="K"),
        JobRowFactory.build(dedupe_key="K", **({} if twin == "ready" else {twin: True})),
    )
    assert cortex.requeue_failed() == Requeued(revived=0, superseded=0, blocked=2)


@pytest.mark.parametrize("state", ["ready", "running", "done", "cancelled", "deferred"])
@pytest.mark.parametrize("way", sorted(BULK))
def test_only_failed_rows_are_requeued(cortex: Cortex, way: str, state: str) -> None:
    """A requeue leaves every other status alone."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", **({} if state == "ready" else {state: True})))
    before = cortex.get_job("j")
    assert BULK[way](cortex) == Requeued(revived=0, superseded=0, blocked=0)
    assert cortex.get_job("j") == before


@pytest.mark.parametrize(
    ("way", "revived"),
    [
        ("requeue_failed", {"bad", "net", "untyped"}),
        ("retry_all_failed", {"bad", "net", "untyped"}),
        ("requeue_transient_failed", {"net", "untyped"}),
        ("self_heal", {"net", "untyped"}),
    ],
)
def test_unrecoverable_rows_come_back_only_by_hand(cortex: Cortex, way: str, revived: set[str]) -> None:
    """Spec, Scheduler helpers: what retrying cannot help stays parked unless somebody asks for all."""
    insert_rows(
        cortex.database,
        JobRowFactory.build(id="bad", failed=True),
        JobRowFactory.build(id="net", failed_transient=True),
        JobRowFactory.build(id="untyped", failed_transient=True, failure_class=None, failure_reason=None),
    )
    BULK[way](cortex)
    assert {job_id for job_id, status in statuses(cortex).items() if status is JobStatus.READY} == revived


def test_one_row_can_be_requeued(cortex: Cortex) -> None:
    """By its id, whatever its class, and no other row with it."""
    insert_rows(cortex.database, *(JobRowFactory.build(id=job_id, failed=True) for job_id in "ab"))
    assert cortex.requeue_failed("a") == Requeued(revived=1, superseded=0, blocked=0)
    assert statuses(cortex) == {"a": JobStatus.READY, "b": JobStatus.FAILED}


def test_one_row_behind_an_active_twin_stays_failed(cortex: Cortex) -> None:
    """The caller learns why nothing happened: blocked is 1."""
    insert_rows(
        cortex.database, JobRowFactory.build(id="a", failed=True, dedupe_key="K"), JobRowFactory.build(dedupe_key="K")
    )
    assert cortex.requeue_failed("a") == Requeued(revived=0, superseded=0, blocked=1)
    assert cortex.get_job("a").status is JobStatus.FAILED


def test_requeue_of_an_unknown_id(cortex: Cortex) -> None:
    """A typing error is not silently nothing."""
    with pytest.raises(JobNotFoundError, match="nope"):
        cortex.requeue_failed("nope")


@pytest.mark.parametrize("state", ["ready", "running", "done", "cancelled"])
def test_requeue_of_a_row_that_is_not_failed(cortex: Cortex, state: str) -> None:
    """The message says in which status the row is."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", **({} if state == "ready" else {state: True})))
    with pytest.raises(InvalidInputError, match=state):
        cortex.requeue_failed("j")


def fail_for_good(cortex: Cortex) -> Job:
    """Claim the one row that is due and fail it, its budget being one attempt."""
    job = cortex.jobs.claim_next()
    assert job is not None
    assert cortex.jobs.mark_failed_typed(job, "net", JobFailure.transient("net"))
    assert cortex.get_job(job.id).status is JobStatus.FAILED
    return job


def test_self_heal_spaces_its_budgets_out(cortex: Cortex, clock: ManualClock) -> None:
    """At once the first time, then 10 min · 2^(heals-1) after each failure, at most a day."""
    cortex.enqueue(NewJobFactory.build(max_attempts=1))
    fail_for_good(cortex)
    for heals in range(10):
        spacing_ms = heal_spacing_ms(heals)
        if spacing_ms:
            clock.advance(spacing_ms - 1)
            assert cortex.self_heal() == 0
            clock.advance(1)
        assert cortex.self_heal() == 1
        job = fail_for_good(cortex)
        assert cortex.get_job(job.id).heals == heals + 1
    assert heal_spacing_ms(1) == 10 * MINUTE_MS
    assert heal_spacing_ms(9) == DAY_MS


def test_a_permanent_failure_does_not_run_all_day(cortex: Cortex, clock: ManualClock) -> None:
    """A handler that always fails runs a handful of times in a day of ticks, and shows as failed."""
    cortex.enqueue(NewJobFactory.build(max_attempts=1))
    runs = 0
    for _ in range(24 * 12):
        cortex.self_heal()
        while cortex.jobs.claim_next() is not None:
            runs += 1
            job = next(job for job in cortex.jobs.list_jobs() if job.status is JobStatus.RUNNING)
            cortex.jobs.mark_failed(job, "ValueError")
        assert cortex.jobs.count_by_status()[JobStatus.FAILED] == 1
        clock.advance(5 * MINUTE_MS)
    assert runs <= 9


@pytest.mark.parametrize("way", ["requeue_failed", "retry_all_failed", "requeue_transient_failed"])
def test_a_requeue_by_hand_takes_no_notice_of_the_spacing(cortex: Cortex, way: str) -> None:
    """Who asks by hand gets the row now, and self-heal starts from the beginning for it."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", failed_transient=True, heals=8))
    assert cortex.self_heal() == 0
    assert BULK[way](cortex).revived == 1
    assert cortex.get_job("j").heals == 0


def test_an_older_row_is_not_superseded_by_one_that_has_to_wait(cortex: Cortex) -> None:
    """While the newest of a key waits for its spacing, nothing happens to its elders."""
    insert_rows(
        cortex.database,
        JobRowFactory.build(id="old", failed_transient=True, dedupe_key="K", created_at_ms=1),
        JobRowFactory.build(id="new", failed_transient=True, dedupe_key="K", heals=8),
    )
    healed = cortex.jobs.self_heal()
    assert (healed.revived, healed.superseded) == (0, 0)
    assert set(statuses(cortex).values()) == {JobStatus.FAILED}


def test_a_row_that_another_program_failed_without_a_time_is_healed(cortex: Cortex) -> None:
    """A failed row with no completed_at_ms counts as long failed."""
    insert_rows(cortex.database, JobRowFactory.build(failed_transient=True, completed_at_ms=None, heals=2))
    assert cortex.self_heal() == 1


def test_a_revived_row_runs(cortex: Cortex) -> None:
    """A requeued job is claimed again and has its whole budget."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", failed_transient=True))
    cortex.requeue_failed()
    job = cortex.jobs.claim_next()
    assert job is not None
    assert (job.id, job.attempts) == ("j", 1)
