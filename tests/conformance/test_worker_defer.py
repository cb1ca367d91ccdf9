"""Deferring: no attempt burnt, never a spin, never for ever (spec: Job outcomes; contract §4.7)."""

from collections.abc import Callable

import pytest
from pydantic import BaseModel

from tinycortex import Cortex, Defer, Done, Job, JobFailure, JobPlan, JobStatus, NewJob, Settings
from tinycortex.config import QueueSettings
from tinycortex.testing import JobRowFactory, ManualClock, insert_rows

OpenCortex = Callable[..., Cortex]

WEEK_MS = 604_800_000
MIN_DEFER_MS = 50


class Note(BaseModel):
    text: str = ""


def start(cortex: Cortex, handler: Callable[[], JobPlan]) -> Callable[[], Job]:
    """Enqueue one job that ``handler`` runs; each call of what is returned runs it once more."""
    cortex.handler("note", payload=Note)(lambda _ctx, _payload: handler())
    job_id = str(cortex.enqueue(NewJob.of("note", Note(), max_attempts=2)))

    def run() -> Job:
        assert cortex.run_once()
        return cortex.get_job(job_id)

    return run


def test_a_defer_burns_no_attempt(cortex: Cortex, clock: ManualClock) -> None:
    """A job may defer more often than it has attempts, and each time waits as long as it asked."""
    run = start(cortex, lambda: Defer(until_ms=clock.now_ms() + 90_000, reason="429"))
    for _ in range(5):
        job = run()
        assert (job.status, job.attempts, job.last_error) == (JobStatus.READY, 0, "429")
        assert job.available_at_ms == clock.now_ms() + 90_000
        assert not cortex.run_once()
        clock.advance(90_000)


@pytest.mark.parametrize("offset", [-(10**12), -1, 0, 1, MIN_DEFER_MS - 1, MIN_DEFER_MS])
def test_a_defer_waits_at_least_50_ms(cortex: Cortex, clock: ManualClock, offset: int) -> None:
    """A defer to now or to the past does not spin."""
    run = start(cortex, lambda: Defer(until_ms=clock.now_ms() + offset, reason="later"))
    assert run().available_at_ms == clock.now_ms() + MIN_DEFER_MS


def test_a_drain_ends_although_a_job_defers_to_now(cortex: Cortex, clock: ManualClock) -> None:
    """A drain runs such a job once, not for ever."""
    cortex.handler("note", payload=Note)(lambda _ctx, _payload: Defer(until_ms=clock.now_ms(), reason="again"))
    cortex.enqueue(NewJob.of("note", Note()))
    assert cortex.drain_until_idle() == 1


def test_the_shortest_wait_is_a_setting(open_cortex: OpenCortex, clock: ManualClock) -> None:
    """``queue.min_defer_ms`` says how short a wait may be."""
    cortex = open_cortex(Settings(queue=QueueSettings(min_defer_ms=7)))
    run = start(cortex, lambda: Defer(until_ms=0, reason="later"))
    assert run().available_at_ms == clock.now_ms() + 7


def test_a_week_of_deferring_without_progress_is_a_failure(cortex: Cortex, clock: ManualClock) -> None:
    """Past seven days since the first defer: failed, ``defer_age_exceeded``, unrecoverable, the last reason kept."""
    run = start(cortex, lambda: Defer(until_ms=0, reason="still no quota"))
    run()
    clock.advance(WEEK_MS)
    assert run().status is JobStatus.READY
    clock.advance(MIN_DEFER_MS)
    job = run()
    assert (job.status, job.completed_at_ms) == (JobStatus.FAILED, clock.now_ms())
    assert (job.failure_reason, job.failure_class) == ("defer_age_exceeded", "unrecoverable")
    assert "still no quota" in str(job.last_error)


def test_a_job_that_waited_long_to_be_claimed_may_defer(cortex: Cortex, clock: ManualClock) -> None:
    """The age counts from the first defer, not from the row's creation."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", kind="note", payload_json="{}", created_at_ms=0))
    run = start(cortex, lambda: Defer(until_ms=0, reason="later"))
    run()
    assert cortex.get_job("j").status is JobStatus.READY
    assert cortex.get_job("j").deferred_since_ms == clock.now_ms()


def test_progress_starts_the_week_afresh(cortex: Cortex, clock: ManualClock) -> None:
    """A chain that gets something done each time may go on for longer than a week."""
    run = start(cortex, lambda: Defer(until_ms=0, reason="more to come", progress=True))
    for _ in range(4):
        job = run()
        assert (job.status, job.deferred_since_ms) == (JobStatus.READY, None)
        clock.advance(WEEK_MS)


def test_a_failure_in_between_does_not_start_the_week_afresh(cortex: Cortex, clock: ManualClock) -> None:
    """Only progress, done and requeue end the age of deferring."""
    plans: list[JobPlan | None] = [Defer(until_ms=0, reason="later"), None, Defer(until_ms=0, reason="later")]

    def handler() -> JobPlan:
        plan = plans.pop(0)
        if plan is None:
            raise JobFailure.transient("net")
        return plan

    run = start(cortex, handler)
    run()
    clock.advance(WEEK_MS)
    run()
    clock.advance(100_000)
    assert run().failure_reason == "defer_age_exceeded"


def test_a_deferred_job_can_still_be_done(cortex: Cortex, clock: ManualClock) -> None:
    """Done after defers clears the reason and the age."""
    plans: list[JobPlan] = [Defer(until_ms=0, reason="later"), Done()]
    run = start(cortex, lambda: plans.pop(0))
    run()
    clock.advance(MIN_DEFER_MS)
    job = run()
    assert (job.status, job.last_error, job.deferred_since_ms, job.attempts) == (JobStatus.DONE, None, None, 1)


def test_a_requeue_starts_the_week_afresh(cortex: Cortex, clock: ManualClock) -> None:
    """Who requeues a job that deferred too long gives it another week."""
    run = start(cortex, lambda: Defer(until_ms=0, reason="later"))
    run()
    clock.advance(WEEK_MS + 1)
    job = run()
    assert job.status is JobStatus.FAILED
    cortex.requeue_failed(job.id)
    assert run().status is JobStatus.READY
