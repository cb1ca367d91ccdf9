"""Handlers that run longer than their kind may."""

import asyncio
import threading

import pytest
from pydantic import BaseModel
from sqlalchemy.orm import Session

from background import BOUND_S, until
from tinycortex import Cortex, Defer, Done, FailureClass, Job, JobContext, JobFailure, JobStatus, NewJob
from tinycortex.errors import StorageBusyError
from tinycortex.handlers.registry import Handler
from tinycortex.testing import ChunkRowFactory, ManualClock, NewJobFactory

TIMEOUT_S = 0.01


class Note(BaseModel):
    text: str = ""


def run(cortex: Cortex, handler: Handler, *, max_attempts: int = 5, timeout_s: float = TIMEOUT_S) -> Job:
    """Run one LLM-bound job with ``handler`` and return its row."""
    cortex.handler("note", payload=Note, timeout_s=timeout_s, max_attempts=max_attempts, llm_bound=True)(handler)
    job_id = cortex.enqueue(NewJob.of("note", Note()))
    assert cortex.run_once()
    assert cortex.llm_gate.available == 1
    return cortex.get_job(str(job_id))


def plan() -> Done:
    """Return a plan that would leave a chunk and a follow-up behind."""

    def writes(session: Session) -> None:
        session.add(ChunkRowFactory.build())

    return Done(follow_ups=[NewJobFactory.build()], writes=writes)


def assert_failed_attempt(cortex: Cortex, clock: ManualClock, job: Job) -> None:
    """The attempt is burnt, the job waits for its next one, and nothing of the run's plan is written."""
    assert (job.status, job.attempts, job.locked_by) == (JobStatus.READY, 1, None)
    assert job.available_at_ms >= clock.now_ms() + 60_000
    assert "timed out after 0.01 s" in str(job.last_error)
    assert cortex.jobs.list_jobs() == [job]
    with cortex.transaction() as session:
        assert session.connection().exec_driver_sql("SELECT COUNT(*) FROM mem_tree_chunks").scalar_one() == 0


# Asynchronous handlers


async def wait(_ctx: JobContext, _payload: Note) -> None:
    await asyncio.wait_for(asyncio.Event().wait(), BOUND_S)


async def suppress_and_plan(ctx: JobContext, payload: Note) -> Done:
    try:
        await wait(ctx, payload)
    except asyncio.CancelledError:
        assert ctx.timed_out
    return plan()


async def suppress_and_defer(ctx: JobContext, payload: Note) -> Defer:
    await suppress_and_plan(ctx, payload)
    return Defer(until_ms=ctx.clock.now_ms(), reason="later", follow_ups=[NewJobFactory.build()])


async def fail_for_good(ctx: JobContext, payload: Note) -> None:
    try:
        await wait(ctx, payload)
    except asyncio.CancelledError:
        raise JobFailure.unrecoverable("given_up") from None


async def go_on_in_another_await(ctx: JobContext, payload: Note) -> None:
    await suppress_and_plan(ctx, payload)
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    "handler",
    [
        wait,
        suppress_and_plan,
        suppress_and_defer,
        fail_for_good,
        go_on_in_another_await,
        lambda ctx, payload: wait(ctx, payload),  # noqa: PLW0108 - a lambda is what is tested
    ],
)
def test_an_asynchronous_handler_past_its_time_is_a_failed_attempt(
    cortex: Cortex, clock: ManualClock, handler: Handler
) -> None:
    """It is cancelled; whatever it does about that, the attempt has failed and its plan is not carried out."""
    assert_failed_attempt(cortex, clock, run(cortex, handler))


def test_a_handler_past_its_time_may_clean_up(cortex: Cortex) -> None:
    """The cancellation reaches the handler where it waits, and ``timed_out`` says why."""
    seen: list[bool] = []

    async def handler(ctx: JobContext, payload: Note) -> None:
        try:
            await wait(ctx, payload)
        finally:
            await asyncio.sleep(0)
            seen.append(ctx.timed_out)

    run(cortex, handler)
    assert seen == [True]


@pytest.mark.parametrize("handler", [wait, lambda ctx, _payload: until(lambda: ctx.timed_out)])
def test_the_last_attempt_past_its_time_fails_the_job(cortex: Cortex, handler: Handler) -> None:
    """A timeout is transient, so the job can be healed."""
    job = run(cortex, handler, max_attempts=1)
    assert job.status is JobStatus.FAILED
    assert (job.failure_reason, job.failure_class) == ("timeout", FailureClass.TRANSIENT)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_handler_within_its_time_is_done(cortex: Cortex, wrapped: bool) -> None:
    """A limit that is not reached changes nothing."""
    seen: list[bool] = []

    def plain(ctx: JobContext, _payload: Note) -> None:
        seen.append(ctx.timed_out)

    async def asynchronous(ctx: JobContext, payload: Note) -> None:
        await asyncio.sleep(0)
        plain(ctx, payload)

    assert run(cortex, asynchronous if wrapped else plain, timeout_s=BOUND_S).status is JobStatus.DONE
    assert seen == [False]


# Plain handlers: nothing can stop a thread


def test_a_thread_past_its_time_keeps_its_row_until_it_ends(cortex: Cortex, clock: ManualClock) -> None:
    """Its job is neither run a second time beside it, nor its permit given to another; the row says what is wrong."""
    other = NewJobFactory.build()

    def handler(ctx: JobContext, _payload: Note) -> Done:
        before = cortex.get_job(ctx.job.id)
        until(lambda: ctx.timed_out)
        until(lambda: cortex.get_job(ctx.job.id).last_error)
        during = cortex.get_job(ctx.job.id)
        assert "timed out after 0.01 s" in str(during.last_error)
        assert (during.status, during.attempts, during.claim_token, during.locked_until_ms) == (
            JobStatus.RUNNING,
            before.attempts,
            before.claim_token,
            before.locked_until_ms,
        )
        assert cortex.llm_gate.available == 0
        assert not cortex.run_once()
        clock.advance(1_000)
        assert cortex.jobs.renew(ctx.job)
        held.append(cortex.get_job(ctx.job.id).locked_until_ms)
        return plan()

    held: list[int | None] = []
    cortex.enqueue(other)
    cortex.handler("note", payload=Note, timeout_s=TIMEOUT_S, llm_bound=True, rank=0)(handler)
    job_id = cortex.enqueue(NewJob.of("note", Note()))
    assert cortex.run_once()
    assert held == [clock.now_ms() + 300_000]
    job = cortex.get_job(str(job_id))
    assert (job.status, job.attempts, job.locked_by) == (JobStatus.READY, 1, None)
    assert job.last_error == "JobFailure: timed out after 0.01 s"
    assert len(cortex.jobs.list_jobs()) == 2  # no follow-up
    assert cortex.llm_gate.available == 1


@pytest.mark.parametrize("error", [None, ValueError("late"), JobFailure.unrecoverable("given_up"), SystemExit(1)])
def test_however_a_late_thread_ends_the_attempt_has_failed(
    cortex: Cortex, clock: ManualClock, error: BaseException | None
) -> None:
    """What it returns or raises comes too late to count."""

    def handler(ctx: JobContext, _payload: Note) -> Done:
        until(lambda: ctx.timed_out)
        if error is not None:
            raise error
        return plan()

    assert_failed_attempt(cortex, clock, run(cortex, handler))


def test_a_timeout_that_cannot_be_noted_is_a_timeout_all_the_same(
    cortex: Cortex, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy database at that moment costs the note, not the job."""
    asked = threading.Event()

    def busy(*_arguments: object) -> bool:
        asked.set()
        raise StorageBusyError("busy")

    monkeypatch.setattr(cortex.jobs, "note_error", busy)
    assert_failed_attempt(cortex, clock, run(cortex, lambda _ctx, _payload: until(asked.is_set)))


def test_a_late_job_that_was_asked_to_stop_ends_cancelled(cortex: Cortex) -> None:
    """The request outranks the timeout: the job does not come back."""

    def handler(ctx: JobContext, _payload: Note) -> None:
        until(lambda: ctx.timed_out)
        cortex.cancel(ctx.job.id)

    assert run(cortex, handler).status is JobStatus.CANCELLED
