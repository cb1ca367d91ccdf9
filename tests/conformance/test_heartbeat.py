"""The heartbeat: leases go on while handlers run, and nothing waits for it for ever."""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest

from tinycortex import Cortex, Database, ExtractChunkPayload, Job, JobRepository, NewJob
from tinycortex.errors import StorageBusyError
from tinycortex.handlers.context import JobContext, RunSignals
from tinycortex.testing import FakeDelegates, ManualClock
from tinycortex.worker.heartbeat import Heartbeat

BOUND_S = 20
"""Longer than anything here takes; only a hang reaches it."""


@pytest.fixture
def jobs(database: Database, clock: ManualClock) -> JobRepository:
    return JobRepository(database, clock)


@pytest.fixture
def claimed(jobs: JobRepository) -> Job:
    """Return a claim with a lease of five minutes."""
    jobs.enqueue(NewJob.extract_chunk(ExtractChunkPayload(chunk_id="c")))
    job = jobs.claim_next()
    assert job is not None
    return job


@pytest.fixture
def heartbeat(jobs: JobRepository) -> Iterator[Heartbeat]:
    """Return a heartbeat whose own thread is too slow to interfere: tests beat by hand."""
    beating = Heartbeat(jobs, beat_ms=60_000)
    yield beating
    beating.close()


def hurried(job: Job) -> Job:
    """Return the claim with a lease of 1 ms by its own account, so that every beat renews it."""
    assert job.started_at_ms is not None
    return replace(job, locked_until_ms=job.started_at_ms + 1)


class Interrupting(JobRepository):
    """A repository that calls ``before`` each time its claims are looked after."""

    before: Callable[[], object] = staticmethod(lambda: None)

    def watch(self, jobs: Iterable[Job], **options: object) -> dict[str, bool]:
        self.before()
        return super().watch(jobs, **options)  # type: ignore[arg-type]  # passed on as it came


def test_a_close_during_a_beat_ends_the_thread(database: Database, claimed: Job) -> None:
    """A stop that comes while the thread is busy is not lost, or the process would never end."""
    beating, released = threading.Event(), threading.Event()
    jobs = Interrupting(database)

    def hold() -> None:
        beating.set()
        assert released.wait(BOUND_S)

    jobs.before = hold
    heartbeat = Heartbeat(jobs, beat_ms=10)
    heartbeat.watch(claimed, RunSignals())
    assert beating.wait(BOUND_S)
    thread = heartbeat._thread
    assert thread is not None
    closing = threading.Thread(target=heartbeat.close, daemon=True)
    closing.start()
    while heartbeat._thread is not None:  # until close has given its notice
        closing.join(0.001)
    released.set()
    closing.join(BOUND_S)
    assert not closing.is_alive()
    assert not thread.is_alive()


def test_a_close_right_after_the_start_ends_the_thread(jobs: JobRepository, claimed: Job) -> None:
    """A stop that comes before the thread's first wait is not lost."""
    for _ in range(200):
        heartbeat = Heartbeat(jobs, beat_ms=60_000)
        heartbeat.watch(claimed, RunSignals())
        heartbeat.drop(claimed)
        closing = threading.Thread(target=heartbeat.close, daemon=True)
        closing.start()
        closing.join(BOUND_S)
        assert not closing.is_alive()


def test_a_closed_heartbeat_starts_again(database: Database, claimed: Job) -> None:
    """A Cortex may be used after its close, and its leases are renewed then, too."""
    beaten = threading.Event()
    jobs = Interrupting(database)
    jobs.before = beaten.set
    heartbeat = Heartbeat(jobs, beat_ms=10)
    heartbeat.close()
    for _ in range(2):
        heartbeat.watch(claimed, RunSignals())
        assert beaten.wait(BOUND_S)
        heartbeat.close()
        beaten.clear()


def test_claims_that_come_and_go_do_not_put_a_beat_off(database: Database, claimed: Job) -> None:
    """A long handler's lease is renewed however many short jobs run beside it."""
    beaten = threading.Event()
    jobs = Interrupting(database)
    jobs.before = beaten.set
    heartbeat = Heartbeat(jobs, beat_ms=50)
    heartbeat.watch(claimed, RunSignals())
    passing = replace(hurried(claimed), id="job:passing")
    for _ in range(100_000):
        heartbeat.watch(passing, RunSignals())
        heartbeat.drop(passing)
        if beaten.is_set():
            break
    heartbeat.close()
    assert beaten.is_set()


def test_a_due_lease_is_renewed(heartbeat: Heartbeat, jobs: JobRepository, claimed: Job, clock: ManualClock) -> None:
    """Past a third of its length a lease is pushed on by its whole length."""
    signals = RunSignals()
    heartbeat.watch(hurried(claimed), signals)
    clock.advance(400_000)
    assert threading.Event().wait(0.002) is False  # the lease of 1 ms is due by the monotonic clock
    heartbeat.beat()
    assert jobs.get_job(claimed.id).locked_until_ms == clock.now_ms() + 1
    assert not signals.lease_lost


def test_a_fresh_lease_is_left_alone(
    heartbeat: Heartbeat, jobs: JobRepository, claimed: Job, clock: ManualClock
) -> None:
    """Looking after a claim writes nothing before a third of the lease is over."""
    heartbeat.watch(claimed, RunSignals())
    clock.advance(1)
    heartbeat.beat()
    assert jobs.get_job(claimed.id).locked_until_ms == claimed.locked_until_ms


def test_a_lost_lease_is_told(heartbeat: Heartbeat, jobs: JobRepository, claimed: Job, clock: ManualClock) -> None:
    """A handler whose row has been claimed anew learns it, and the new claim is not touched."""
    signals = RunSignals()
    heartbeat.watch(claimed, signals)
    clock.advance(300_001)
    assert jobs.recover_stale_locks() == 1
    second = jobs.claim_next()
    heartbeat.beat()
    assert signals.lease_lost
    assert second is not None
    assert jobs.get_job(claimed.id) == second


def test_a_request_to_stop_is_told(heartbeat: Heartbeat, jobs: JobRepository, claimed: Job) -> None:
    """A cancel reaches the handler that runs."""
    signals = RunSignals()
    heartbeat.watch(claimed, signals)
    jobs.cancel(claimed.id)
    heartbeat.beat()
    assert (signals.cancel_requested, signals.lease_lost) == (True, False)


@pytest.mark.parametrize(("lease_over", "lost"), [(False, False), (True, True)])
def test_an_unreachable_database_means_a_lost_lease_only_past_its_end(
    database: Database, claimed: Job, lease_over: bool, lost: bool
) -> None:
    """While nobody else can have the row the handler goes on; after that nobody can tell."""
    jobs = Interrupting(database)

    def fail() -> None:
        raise StorageBusyError("locked")

    jobs.before = fail
    heartbeat = Heartbeat(jobs, beat_ms=60_000)
    signals = RunSignals()
    heartbeat.watch(hurried(claimed) if lease_over else claimed, signals)
    assert threading.Event().wait(0.002) is False
    heartbeat.beat()
    heartbeat.close()
    assert signals.lease_lost is lost


def test_a_blocking_handler_does_not_stop_the_renewal(
    open_cortex: Callable[..., Cortex], delegates: FakeDelegates
) -> None:
    """A plain handler that blocks its thread keeps its lease, because another thread renews it."""
    cortex = open_cortex(delegates=delegates)
    renewed = threading.Event()
    renew = cortex.jobs.renew

    def renewing(job: Job, lease_ms: int) -> bool:
        held = renew(job, lease_ms)
        renewed.set()
        return held

    cortex.jobs.renew = renewing  # type: ignore[method-assign,assignment]  # a test's own seam

    @cortex.handler("blocking", payload=ExtractChunkPayload, lease_ms=100)
    def blocking(ctx: JobContext, _payload: ExtractChunkPayload) -> None:
        assert renewed.wait(BOUND_S)
        ctx.raise_if_lease_lost()

    job_id = cortex.enqueue(NewJob.of("blocking", ExtractChunkPayload(chunk_id="c")))
    assert cortex.run_once()
    assert job_id is not None
    assert cortex.get_job(job_id).status == "done"
