"""Ending a claim, row by row (contract §4.4, 4.5, 4.7, 4.9)."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from sqlalchemy import text

from tinycortex import (
    Cortex,
    InvalidInputError,
    Job,
    JobFailure,
    JobNotFoundError,
    JobRepository,
    JobStatus,
    backoff_ms,
)
from tinycortex.errors import FailureClass
from tinycortex.testing import JobRowFactory, ManualClock, NewJobFactory, insert_rows

FAR_MS = 1_800_000_000_000

Settle = Callable[[JobRepository, Job], bool]

SETTLEMENTS: dict[str, Settle] = {
    "done": lambda jobs, job: jobs.mark_done(job),
    "failed": lambda jobs, job: jobs.mark_failed(job, "broke"),
    "transient": lambda jobs, job: jobs.mark_failed_typed(job, "broke", JobFailure.transient("net")),
    "unrecoverable": lambda jobs, job: jobs.mark_failed_typed(job, "broke", JobFailure.unrecoverable("bad")),
    "deferred": lambda jobs, job: jobs.mark_deferred(job, FAR_MS, "later"),
    "released": lambda jobs, job: jobs.release(job),
    "renewed": lambda jobs, job: jobs.renew(job),
    "noted": lambda jobs, job: jobs.note_error(job, "note"),
}


def claim(cortex: Cortex) -> Job:
    job = cortex.jobs.claim_next(worker_id="me")
    assert job is not None
    return job


@pytest.fixture
def held(cortex: Cortex) -> Job:
    """A claim of a row that has already been through a defer and a failure."""
    insert_rows(
        cortex.database,
        JobRowFactory.build(
            id="j", attempts=2, claim_token=4, deferred_since_ms=1, last_error="old", dedupe_key="k", heals=1
        ),
    )
    return claim(cortex)


# Each way to settle


def test_done_completes_the_row_and_clears_every_trace_of_trouble(
    cortex: Cortex, clock: ManualClock, held: Job
) -> None:
    """Contract §4.4: done, completed now, no lease, no error, no failure, no age of deferring."""
    clock.advance(7)
    assert cortex.jobs.mark_done(held)
    assert cortex.get_job("j") == replace(
        held,
        status=JobStatus.DONE,
        completed_at_ms=clock.now_ms(),
        locked_until_ms=None,
        locked_by=None,
        deferred_since_ms=None,
    )


@pytest.mark.parametrize("failure", [None, JobFailure.transient("net")])
def test_a_retryable_failure_waits_its_turn(cortex: Cortex, held: Job, failure: JobFailure | None) -> None:
    """Contract §4.5: ready, due in the future, last_error set, reason and class empty, the attempt burnt."""
    assert cortex.jobs.mark_failed_typed(held, "broke", failure)
    after = cortex.get_job("j")
    assert after == replace(
        held,
        status=JobStatus.READY,
        available_at_ms=after.available_at_ms,
        last_error="broke",
        locked_until_ms=None,
        locked_by=None,
    )
    assert held.started_at_ms is not None
    assert after.available_at_ms >= held.started_at_ms + backoff_ms(3)


@pytest.mark.parametrize(
    ("failure", "reason", "failure_class"),
    [
        (None, None, None),
        (JobFailure.transient("net"), "net", FailureClass.TRANSIENT),
    ],
)
def test_a_failure_without_budget_is_final(
    cortex: Cortex, clock: ManualClock, failure: JobFailure | None, reason: str | None, failure_class: str | None
) -> None:
    """Contract §4.5: the last attempt fails the row, with the reason and class there are."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", attempts=4))
    job = claim(cortex)
    assert cortex.jobs.mark_failed_typed(job, "broke", failure)
    after = cortex.get_job("j")
    assert (after.status, after.completed_at_ms, after.attempts) == (JobStatus.FAILED, clock.now_ms(), 5)
    assert (after.failure_reason, after.failure_class, after.last_error) == (reason, failure_class, "broke")
    assert (after.locked_until_ms, after.locked_by) == (None, None)


def test_an_unrecoverable_failure_is_final_at_once(cortex: Cortex, clock: ManualClock) -> None:
    """Spec, Typed failures: retrying cannot help, so the first attempt ends it."""
    cortex.enqueue(NewJobFactory.build())
    job = claim(cortex)
    assert cortex.jobs.mark_failed_typed(job, "broke", JobFailure.budget_exhausted())
    after = cortex.get_job(job.id)
    assert (after.status, after.completed_at_ms, after.attempts) == (JobStatus.FAILED, clock.now_ms(), 1)
    assert (after.failure_reason, after.failure_class) == ("budget_exhausted", "unrecoverable")


@pytest.mark.parametrize("offset", [-1_000, 0, 1, 750])
def test_a_defer_is_stored_exactly_and_gives_the_attempt_back(
    cortex: Cortex, clock: ManualClock, held: Job, offset: int
) -> None:
    """Contract §4.7: due exactly when asked, attempts as before the claim, no lease, no start, the reason kept."""
    until_ms = clock.now_ms() + offset
    assert cortex.jobs.mark_deferred(held, until_ms, "rate limited")
    assert cortex.get_job("j") == replace(
        held,
        status=JobStatus.READY,
        attempts=2,
        available_at_ms=until_ms,
        started_at_ms=None,
        locked_until_ms=None,
        locked_by=None,
        last_error="rate limited",
    )


def test_deferring_is_counted_from_the_first_defer(cortex: Cortex, clock: ManualClock) -> None:
    """The age of a deferring job starts with its first defer and is not moved by later ones."""
    cortex.enqueue(NewJobFactory.build())
    first_ms = clock.now_ms()
    for _ in range(3):
        job = claim(cortex)
        cortex.jobs.mark_deferred(job, clock.now_ms() + 10, "later")
        assert cortex.get_job(job.id).deferred_since_ms == first_ms
        clock.advance(10)


def test_progress_ends_the_age_of_deferring(cortex: Cortex, clock: ManualClock) -> None:
    """A defer that got something done starts afresh."""
    cortex.enqueue(NewJobFactory.build())
    cortex.jobs.mark_deferred(claim(cortex), clock.now_ms(), "later")
    job = claim(cortex)
    cortex.jobs.mark_deferred(job, clock.now_ms(), "later", progress=True)
    assert cortex.get_job(job.id).deferred_since_ms is None


def test_a_release_gives_the_claim_back_unused(cortex: Cortex, held: Job) -> None:
    """Contract §4.8: ready, attempt given back, no lease, no start; it is due as before."""
    assert cortex.jobs.release(held)
    assert cortex.get_job("j") == replace(
        held, status=JobStatus.READY, attempts=2, started_at_ms=None, locked_until_ms=None, locked_by=None
    )


def test_a_renewal_pushes_only_the_lease_on(cortex: Cortex, clock: ManualClock, held: Job) -> None:
    """Renewing counts from now, and changes nothing else."""
    clock.advance(100_000)
    assert cortex.jobs.renew(held, 5_000)
    assert cortex.get_job("j") == replace(held, locked_until_ms=clock.now_ms() + 5_000)


def test_a_renewed_claim_can_still_settle(cortex: Cortex, clock: ManualClock, held: Job) -> None:
    """The snapshot from before the renewal is still the claim."""
    clock.advance(1)
    cortex.jobs.renew(held)
    assert cortex.jobs.mark_done(held)


def test_a_holder_may_settle_after_its_lease_if_nobody_took_the_row(
    cortex: Cortex, clock: ManualClock, held: Job
) -> None:
    """An expired lease that nobody recovered is still the holder's: its work is not thrown away."""
    clock.advance(300_001)
    assert cortex.jobs.mark_done(held)
    assert cortex.get_job("j").status is JobStatus.DONE


# A claim that is no longer held


def _expire_and_reclaim(cortex: Cortex, clock: ManualClock, _held: Job) -> None:
    clock.advance(300_001)
    assert cortex.recover_stale_locks() == 1
    claim(cortex)


def _expire(cortex: Cortex, clock: ManualClock, _held: Job) -> None:
    clock.advance(300_001)
    assert cortex.recover_stale_locks() == 1


def _settle_done(cortex: Cortex, _clock: ManualClock, held: Job) -> None:
    assert cortex.jobs.mark_done(held)


def _settle_failed(cortex: Cortex, _clock: ManualClock, held: Job) -> None:
    assert cortex.jobs.mark_failed_typed(held, "first", JobFailure.unrecoverable("first"))


def _release(cortex: Cortex, _clock: ManualClock, held: Job) -> None:
    assert cortex.jobs.release(held)


def _defer_and_reclaim_at_once(cortex: Cortex, clock: ManualClock, held: Job) -> None:
    assert cortex.jobs.mark_deferred(held, clock.now_ms(), "later")
    again = claim(cortex)
    assert (again.attempts, again.started_at_ms) == (held.attempts, held.started_at_ms)


def _release_and_reclaim_at_once(cortex: Cortex, _clock: ManualClock, held: Job) -> None:
    assert cortex.jobs.release(held)
    again = claim(cortex)
    assert (again.attempts, again.started_at_ms) == (held.attempts, held.started_at_ms)


def _requeue_and_reclaim_at_once(cortex: Cortex, clock: ManualClock, held: Job) -> None:
    _settle_failed(cortex, clock, held)
    assert cortex.requeue_failed("j").revived == 1
    for _ in range(held.attempts - 1):
        cortex.jobs.mark_failed(claim(cortex), "again")
        with cortex.transaction() as session:
            session.execute(text("UPDATE mem_tree_jobs SET available_at_ms = 0"))
    again = claim(cortex)
    assert (again.attempts, again.started_at_ms) == (held.attempts, held.started_at_ms)


def _claimed_by_another_program(cortex: Cortex, clock: ManualClock, _held: Job) -> None:
    with cortex.transaction() as session:
        session.execute(
            text("UPDATE mem_tree_jobs SET attempts = attempts + 1, started_at_ms = :now"), {"now": clock.now_ms() + 1}
        )


@pytest.mark.parametrize("settlement", sorted(SETTLEMENTS))
@pytest.mark.parametrize(
    "lose",
    [
        _expire_and_reclaim,
        _expire,
        _settle_done,
        _settle_failed,
        _release,
        _defer_and_reclaim_at_once,
        _release_and_reclaim_at_once,
        _requeue_and_reclaim_at_once,
        _claimed_by_another_program,
    ],
)
def test_a_stale_holder_changes_nothing(
    cortex: Cortex,
    clock: ManualClock,
    held: Job,
    lose: Callable[[Cortex, ManualClock, Job], None],
    settlement: str,
) -> None:
    """Contract §4.9: however the claim was lost, settling it any way is False and leaves the row as it is."""
    lose(cortex, clock, held)
    before = cortex.get_job("j")
    assert SETTLEMENTS[settlement](cortex.jobs, held) is False
    assert cortex.get_job("j") == before


@pytest.mark.parametrize("settlement", sorted(SETTLEMENTS))
def test_a_deleted_row_cannot_be_settled(cortex: Cortex, held: Job, settlement: str) -> None:
    """A row that is gone is no error: the holder is told that nothing happened."""
    with cortex.transaction() as session:
        session.execute(text("DELETE FROM mem_tree_jobs"))
    assert SETTLEMENTS[settlement](cortex.jobs, held) is False
    with pytest.raises(JobNotFoundError):
        cortex.get_job("j")


@pytest.mark.parametrize("settlement", sorted(SETTLEMENTS))
def test_a_settlement_touches_its_own_row_only(cortex: Cortex, held: Job, settlement: str) -> None:
    """Other running rows, even with the same token, attempts and start, are not the claim's."""
    other = JobRowFactory.build(
        id="other",
        running=True,
        attempts=held.attempts,
        claim_token=held.claim_token,
        started_at_ms=held.started_at_ms,
        locked_by=held.locked_by,
    )
    insert_rows(cortex.database, other)
    before = cortex.get_job("other")
    assert SETTLEMENTS[settlement](cortex.jobs, held) is True
    assert cortex.get_job("other") == before


# Retry delays


@pytest.mark.parametrize("attempt", [1, 2, 3, 7, 30])
def test_a_retry_is_never_earlier_than_its_base_delay(cortex: Cortex, clock: ManualClock, attempt: int) -> None:
    """Jitter is added on top of the delay, at most a tenth of it."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", attempts=attempt - 1, max_attempts=100))
    cortex.jobs.mark_failed(claim(cortex), "broke")
    delay = cortex.get_job("j").available_at_ms - clock.now_ms()
    assert backoff_ms(attempt) <= delay <= backoff_ms(attempt) * 1.1


def test_jobs_that_fail_together_come_back_apart(cortex: Cortex, clock: ManualClock) -> None:
    """Two hundred jobs that fail in one instant are spread over the jitter."""
    cortex.enqueue_many(NewJobFactory.build() for _ in range(200))
    claims = [claim(cortex) for _ in range(200)]
    with cortex.transaction() as session:
        for job in claims:
            cortex.jobs.mark_failed(job, "429", session=session)
    due = [job.available_at_ms - clock.now_ms() for job in cortex.jobs.list_jobs(limit=200)]
    assert len(set(due)) > 100
    assert min(due) >= 60_000
    assert max(due) <= 66_000


def test_without_jitter_the_delay_is_exact(cortex: Cortex, clock: ManualClock) -> None:
    """``retry_jitter=0`` gives the figures of the contract to the millisecond."""
    jobs = JobRepository(cortex.database, clock, retry_jitter=0)
    cortex.enqueue(NewJobFactory.build())
    job = claim(cortex)
    jobs.mark_failed(job, "broke")
    assert cortex.get_job(job.id).available_at_ms == clock.now_ms() + 60_000


# Texts


@pytest.mark.parametrize("settlement", ["failed", "deferred", "noted"])
@pytest.mark.parametrize(
    ("message", "stored"),
    [
        ("a\x00b", "a\ufffdb"),
        ("a\ud800b", "a\ufffdb"),
        ("", ""),
        ("naïve ✓ 👩‍👩‍👧", "naïve ✓ 👩‍👩‍👧"),
        ("x" * 70_000, "x" * 65_536),
        ("é" * 40_000, "é" * 32_768),
        ("x" + "é" * 40_000, "x" + "é" * 32_767),
    ],
)
def test_any_text_can_be_stored_as_an_error(
    cortex: Cortex, held: Job, settlement: str, message: str, stored: str
) -> None:
    """NUL and lone surrogates are replaced, and 64 KiB is cut on a character boundary."""
    ways: dict[str, Callable[[], bool]] = {
        "failed": lambda: cortex.jobs.mark_failed(held, message),
        "deferred": lambda: cortex.jobs.mark_deferred(held, FAR_MS, message),
        "noted": lambda: cortex.jobs.note_error(held, message),
    }
    assert ways[settlement]()
    assert cortex.get_job("j").last_error == stored


def test_any_code_can_be_stored_as_a_reason(cortex: Cortex, held: Job) -> None:
    """A failure's code is text of the handler's own, so it is mended as well."""
    assert cortex.jobs.mark_failed_typed(held, "broke", JobFailure.unrecoverable("bad\x00\ud800"))
    assert cortex.get_job("j").failure_reason == "bad\ufffd\ufffd"


@pytest.mark.parametrize("until_ms", [2**63, -(2**63) - 1, 1.5, True, None])
def test_a_defer_to_no_instant_is_refused(cortex: Cortex, held: Job, until_ms: int) -> None:
    """What no column can hold is refused before the row is touched."""
    with pytest.raises(InvalidInputError):
        cortex.jobs.mark_deferred(held, until_ms, "later")
    assert cortex.get_job("j") == held


# Transactions


@pytest.mark.parametrize("settlement", ["done", "failed", "unrecoverable", "deferred"])
def test_a_settlement_in_a_rolled_back_transaction_never_happened(cortex: Cortex, held: Job, settlement: str) -> None:
    """A settlement can be part of the caller's transaction, and goes with it."""
    ways: dict[str, Callable[..., bool]] = {
        "done": cortex.jobs.mark_done,
        "failed": lambda job, session: cortex.jobs.mark_failed(job, "broke", session=session),
        "unrecoverable": lambda job, session: cortex.jobs.mark_failed_typed(
            job, "broke", JobFailure.unrecoverable("bad"), session=session
        ),
        "deferred": lambda job, session: cortex.jobs.mark_deferred(job, FAR_MS, "later", session=session),
    }
    with cortex.transaction() as session:
        assert ways[settlement](held, session=session)
        session.rollback()
    assert cortex.get_job("j") == held
