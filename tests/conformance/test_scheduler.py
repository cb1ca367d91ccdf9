"""Flush, backfill, tick, counts and status (spec: Scheduler helpers, Typed failures; contract §3)."""

import pytest

from tinycortex import Cortex, InvalidInputError, JobStatus, NewJob, ReembedBackfillPayload, StorageBusyError
from tinycortex.testing import FakeDelegates, JobRowFactory, ManualClock, insert_rows

BLOCK_MS = 3 * 3_600_000

MIDNIGHT_MS = 1_699_920_000_000
"""2023-11-14T00:00:00Z"""


# flush_stale


@pytest.mark.parametrize(
    ("offset_ms", "key"),
    [
        (-1, "flush_stale:2023-11-13-h7"),
        (0, "flush_stale:2023-11-14-h0"),
        (BLOCK_MS - 1, "flush_stale:2023-11-14-h0"),
        (BLOCK_MS, "flush_stale:2023-11-14-h1"),
        (8 * BLOCK_MS - 1, "flush_stale:2023-11-14-h7"),
    ],
)
def test_a_flush_belongs_to_its_3_hour_utc_block(cortex: Cortex, clock: ManualClock, offset_ms: int, key: str) -> None:
    """Date and block come from one reading of the clock, so no boundary can split them."""
    clock.set(MIDNIGHT_MS + offset_ms)
    job = cortex.get_job(str(cortex.enqueue_flush_stale()))
    assert (job.kind, job.dedupe_key, job.payload_json) == ("flush_stale", key, '{"max_age_secs":3600}')


@pytest.mark.parametrize("state", ["ready", "running", "done", "failed", "cancelled"])
def test_a_block_is_flushed_once_whatever_became_of_it(cortex: Cortex, clock: ManualClock, state: str) -> None:
    """Even a settled flush keeps its block; the next block has its own."""
    clock.set(MIDNIGHT_MS)
    traits = {} if state == "ready" else {state: True}
    insert_rows(
        cortex.database, JobRowFactory.build(kind="flush_stale", dedupe_key="flush_stale:2023-11-14-h0", **traits)
    )
    assert cortex.enqueue_flush_stale() is None
    clock.advance(BLOCK_MS)
    assert cortex.enqueue_flush_stale() is not None


def test_a_day_has_eight_flushes(cortex: Cortex, clock: ManualClock) -> None:
    """A host may call it as often as it likes."""
    clock.set(MIDNIGHT_MS)
    enqueued = 0
    for _ in range(24 * 6):
        enqueued += cortex.enqueue_flush_stale() is not None
        cortex.drain_until_idle()
        clock.advance(600_000)
    assert enqueued == 8


def test_the_age_of_a_flush_can_be_given(cortex: Cortex) -> None:
    """Seconds, in the payload."""
    assert cortex.get_job(str(cortex.enqueue_flush_stale(0))).payload_json == '{"max_age_secs":0}'


@pytest.mark.parametrize("age", [-1, True, 1.5, "60"])
def test_an_age_is_whole_seconds(cortex: Cortex, age: int) -> None:
    """A wrong age is refused, and nothing is enqueued."""
    with pytest.raises(InvalidInputError):
        cortex.enqueue_flush_stale(age)
    assert cortex.jobs.list_jobs() == []


# reembed_backfill


def test_the_chain_is_started_when_something_is_uncovered(cortex: Cortex, delegates: FakeDelegates) -> None:
    """One job at the active signature, with three attempts."""
    delegates.signature, delegates.uncovered = "embed-v2", True
    job = cortex.get_job(str(cortex.ensure_reembed_backfill()))
    assert (job.kind, job.dedupe_key, job.max_attempts) == ("reembed_backfill", "reembed_backfill:embed-v2", 3)


@pytest.mark.parametrize(("signature", "uncovered"), [(None, True), (None, False), ("embed-v2", False)])
def test_no_chain_is_started_without_need(
    cortex: Cortex, delegates: FakeDelegates, signature: str | None, uncovered: bool
) -> None:
    """Embedding off, or all covered: nothing is enqueued."""
    delegates.signature, delegates.uncovered = signature, uncovered
    assert cortex.ensure_reembed_backfill() is None
    assert cortex.jobs.list_jobs() == []


def test_one_chain_at_a_time(cortex: Cortex, delegates: FakeDelegates) -> None:
    """A second call while the chain is active gives None."""
    delegates.signature, delegates.uncovered = "embed-v2", True
    assert cortex.ensure_reembed_backfill() is not None
    assert cortex.ensure_reembed_backfill() is None


@pytest.mark.parametrize(
    ("state", "active"),
    [("ready", True), ("deferred", True), ("running", True), ("done", False), ("failed", False), ("cancelled", False)],
)
def test_a_backfill_is_in_progress_while_its_row_is_active(cortex: Cortex, state: str, active: bool) -> None:
    """Read from the rows, so it is true of chains in other processes too."""
    assert not cortex.backfill_in_progress()
    insert_rows(
        cortex.database,
        JobRowFactory.build(kind="reembed_backfill", **({} if state == "ready" else {state: True})),
        JobRowFactory.build(),
    )
    assert cortex.backfill_in_progress() is active


# tick


def test_a_tick_recovers_flushes_and_heals(cortex: Cortex) -> None:
    """One tick does all of the periodic work, and says what it did."""
    insert_rows(
        cortex.database,
        JobRowFactory.build(expired=True),
        JobRowFactory.build(failed_transient=True),
        JobRowFactory.build(failed=True),
    )
    report = cortex.tick()
    assert (report.recovered, report.healed.revived) == (1, 1)
    assert cortex.get_job(str(report.flush_job_id)).kind == "flush_stale"


def test_a_second_tick_finds_nothing_to_do(cortex: Cortex) -> None:
    """Ticks of several processes do not multiply the work."""
    insert_rows(cortex.database, JobRowFactory.build(expired=True), JobRowFactory.build(failed_transient=True))
    cortex.tick()
    report = cortex.tick()
    assert (report.recovered, report.flush_job_id, report.healed.revived) == (0, None, 0)


def test_a_step_that_fails_does_not_stop_the_others(cortex: Cortex, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy database during recovery is raised, after the flush and the healing were done."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", failed_transient=True))

    def busy() -> int:
        raise StorageBusyError("busy")

    monkeypatch.setattr(cortex._maintenance, "recover_stale_locks", busy)
    with pytest.raises(StorageBusyError):
        cortex.tick()
    assert cortex.get_job("j").status is JobStatus.READY
    assert [job.kind for job in cortex.jobs.list_jobs()].count("flush_stale") == 1


# counts and status

STATES: dict[str, dict[str, object]] = {
    "ready": {},
    "delayed": {"delayed": True},
    "running": {"running": True},
    "expired": {"expired": True},
    "done": {"done": True},
    "bad": {"failed": True},
    "net": {"failed_transient": True},
    "untyped": {"failed_transient": True, "failure_reason": None, "failure_class": None},
    "cancelled": {"cancelled": True},
    "retired": {"kind": "digest_daily"},
    "foreign": {"kind": "elsewhere"},
}


@pytest.fixture
def populated(cortex: Cortex) -> Cortex:
    insert_rows(cortex.database, *(JobRowFactory.build(id=job_id, **state) for job_id, state in STATES.items()))
    return cortex


def test_rows_are_counted_by_status(populated: Cortex) -> None:
    """Every status is there; terminal and waiting rows are told apart."""
    assert populated.jobs.count_by_status() == {
        JobStatus.READY: 4,
        JobStatus.RUNNING: 2,
        JobStatus.DONE: 1,
        JobStatus.FAILED: 3,
        JobStatus.CANCELLED: 1,
    }


def test_an_empty_queue_counts_zero_of_each(cortex: Cortex) -> None:
    """A status without rows is 0, not missing."""
    assert cortex.jobs.count_by_status() == dict.fromkeys(JobStatus, 0)


def test_parked_jobs_are_counted(populated: Cortex) -> None:
    """Spec: ``count_failed_unrecoverable`` counts what retrying cannot help."""
    assert populated.jobs.count_failed_unrecoverable() == 1


def test_status_is_the_whole_picture(populated: Cortex, clock: ManualClock) -> None:
    """One look at everything an operator asks first."""
    clock.advance(9)
    status = populated.status()
    assert status.by_status == {"ready": 4, "running": 2, "done": 1, "failed": 3, "cancelled": 1}
    assert status.by_kind["elsewhere"] == {"ready": 1}
    assert status.failed_by_reason == {"rejected": 1, "timeout": 1, "untyped": 1}
    assert status.failed_by_class == {"unrecoverable": 1, "transient": 1, "untyped": 1}
    assert status.unhandled == {"digest_daily": 1, "elsewhere": 1}
    assert (status.leases_held, status.leases_expired) == (2, 1)
    assert status.oldest_ready_age_ms == 9
    assert status.backfill_in_progress is False


def test_nothing_due_has_no_age(cortex: Cortex) -> None:
    """A row that is due later has not waited yet."""
    insert_rows(cortex.database, JobRowFactory.build(delayed=True))
    assert cortex.status().oldest_ready_age_ms is None


def test_lists_are_newest_first_and_filtered(populated: Cortex) -> None:
    """By status, by kind, and no more than asked for."""
    assert {job.id for job in populated.jobs.list_jobs(status=JobStatus.FAILED)} == {"bad", "net", "untyped"}
    assert [job.id for job in populated.jobs.list_jobs(kind="elsewhere")] == ["foreign"]
    assert len(populated.jobs.list_jobs(limit=3)) == 3
    insert_rows(populated.database, JobRowFactory.build(id="newest", now_ms=1_700_000_000_001))
    assert populated.jobs.list_jobs(limit=1)[0].id == "newest"


@pytest.mark.parametrize("limit", [0, -1, True, 1.5])
def test_a_limit_is_a_whole_number_above_zero(cortex: Cortex, limit: int) -> None:
    """A wrong limit is refused."""
    with pytest.raises(InvalidInputError):
        cortex.jobs.list_jobs(limit=limit)


def test_a_chain_at_another_signature_is_a_chain_of_its_own(cortex: Cortex, delegates: FakeDelegates) -> None:
    """One in-flight chain per embedding signature."""
    cortex.enqueue(NewJob.reembed_backfill(ReembedBackfillPayload(signature="embed-v1")))
    delegates.signature, delegates.uncovered = "embed-v2", True
    assert cortex.ensure_reembed_backfill() is not None
