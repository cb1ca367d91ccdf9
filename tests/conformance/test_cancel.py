"""Stopping a job: a ready one at once, a running one by asking its holder."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from pydantic import BaseModel
from sqlalchemy.orm import Session

from tinycortex import (
    Cortex,
    Defer,
    Done,
    InvalidInputError,
    Job,
    JobContext,
    JobFailure,
    JobNotFoundError,
    JobStatus,
    NewJob,
    Settings,
)
from tinycortex.config import WorkerSettings
from tinycortex.testing import ChunkRowFactory, JobRowFactory, ManualClock, NewJobFactory, insert_rows

OpenCortex = Callable[..., Cortex]
BOUND_S = 20
"""Longer than anything here takes; only a hang reaches it."""


class Note(BaseModel):
    text: str = ""


@pytest.fixture
def cortex(open_cortex: OpenCortex) -> Cortex:
    """A queue whose running handlers hear of a request at once."""
    return open_cortex(Settings(worker=WorkerSettings(heartbeat_ms=10)))


def note(text: str = "") -> NewJob:
    return NewJob.of("note", Note(text=text), dedupe_key="k")


def claim(cortex: Cortex) -> Job:
    job = cortex.jobs.claim_next(worker_id="me", kinds=cortex.list_kinds())
    assert job is not None
    return job


# The row


@pytest.mark.parametrize("state", [{}, {"delayed": True}, {"deferred": True}])
def test_a_ready_job_is_cancelled_at_once(cortex: Cortex, clock: ManualClock, state: dict[str, bool]) -> None:
    """It has settled, its key is free, and no worker takes it."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", dedupe_key="extract:c", **state))
    clock.advance(5)
    assert cortex.cancel("j") is JobStatus.CANCELLED
    job = cortex.get_job("j")
    assert (job.status, job.completed_at_ms, job.last_error) == (
        JobStatus.CANCELLED,
        clock.now_ms(),
        "cancelled on request",
    )
    clock.advance(100_000)
    assert cortex.jobs.claim_next() is None
    assert cortex.enqueue(NewJobFactory.build(chunk_id="c")) is not None


def test_a_running_job_is_asked_to_stop(cortex: Cortex, clock: ManualClock) -> None:
    """Its holder keeps lease and key until it ends; only the request is noted."""
    cortex.enqueue(NewJobFactory.build(chunk_id="c"))
    job = claim(cortex)
    clock.advance(5)
    assert cortex.cancel(job.id) is JobStatus.RUNNING
    after = cortex.get_job(job.id)
    assert (after.status, after.locked_until_ms, after.cancel_requested_at_ms) == (
        JobStatus.RUNNING,
        job.locked_until_ms,
        clock.now_ms(),
    )
    assert cortex.enqueue(NewJobFactory.build(chunk_id="c")) is None
    assert cortex.jobs.renew(job)


def test_a_second_request_is_harmless(cortex: Cortex, clock: ManualClock) -> None:
    """Asking again changes nothing, the time of the first request included."""
    cortex.enqueue(NewJobFactory.build())
    job = claim(cortex)
    cortex.cancel(job.id)
    before = cortex.get_job(job.id)
    clock.advance(5)
    assert cortex.cancel(job.id) is JobStatus.RUNNING
    assert cortex.get_job(job.id) == before


@pytest.mark.parametrize("state", ["done", "failed", "cancelled"])
def test_a_settled_job_cannot_be_cancelled(cortex: Cortex, state: str) -> None:
    """The caller learns that it comes too late, and the row keeps its end."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", **{state: True}))
    before = cortex.get_job("j")
    with pytest.raises(InvalidInputError, match=state):
        cortex.cancel("j")
    assert cortex.get_job("j") == before


def test_an_unknown_job_cannot_be_cancelled(cortex: Cortex) -> None:
    """A mistyped id is an error, not silently nothing."""
    with pytest.raises(JobNotFoundError):
        cortex.cancel("job:none")


def _expire(cortex: Cortex, clock: ManualClock, job: Job) -> None:
    assert job.locked_until_ms is not None
    clock.set(job.locked_until_ms + 1)
    assert cortex.recover_stale_locks() == 1


END: dict[str, Callable[[Cortex, ManualClock, Job], object]] = {
    "done": lambda cortex, _clock, job: cortex.jobs.mark_done(job),
    "retry": lambda cortex, _clock, job: cortex.jobs.mark_failed(job, "no"),
    "unrecoverable": lambda cortex, _clock, job: cortex.jobs.mark_failed_typed(
        job, "no", JobFailure.unrecoverable("bad")
    ),
    "defer": lambda cortex, clock, job: cortex.jobs.mark_deferred(job, clock.now_ms(), "later"),
    "release": lambda cortex, _clock, job: cortex.jobs.release(job),
    "shutdown": lambda cortex, _clock, _job: cortex.jobs.release_running_locks("me"),
    "recovery": _expire,
    "proof of death": lambda cortex, _clock, _job: cortex.jobs.recover_owned(["me"]),
}


@pytest.mark.parametrize("end", END)
def test_a_job_that_was_asked_to_stop_ends_cancelled(cortex: Cortex, clock: ManualClock, end: str) -> None:
    """However its run ends, it never runs again, and its key is free."""
    cortex.enqueue(NewJobFactory.build(chunk_id="c"))
    job = claim(cortex)
    cortex.cancel(job.id)
    END[end](cortex, clock, job)
    after = cortex.get_job(job.id)
    assert (after.status, after.completed_at_ms) == (JobStatus.CANCELLED, clock.now_ms())
    assert (after.failure_reason, after.locked_by, after.cancel_requested_at_ms) == (None, None, None)
    assert cortex.enqueue(NewJobFactory.build(chunk_id="c")) is not None


def test_a_last_attempt_that_was_asked_to_stop_ends_cancelled(cortex: Cortex, clock: ManualClock) -> None:
    """A used-up budget does not turn a cancelled job into a failed one that self-heal would revive."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", attempts=4))
    job = claim(cortex)
    cortex.cancel("j")
    _expire(cortex, clock, job)
    after = cortex.get_job("j")
    assert (after.status, after.failure_reason, after.failure_class) == (JobStatus.CANCELLED, None, None)


@pytest.mark.parametrize("end", END)
def test_what_was_asked_before_the_cancel_is_taken_back(cortex: Cortex, clock: ManualClock, end: str) -> None:
    """The cancel of a running job also drops the rerun that it kept, as that of a ready one would."""
    cortex.handler("note", payload=Note, on_duplicate="rerun")(lambda _ctx, _payload: None)
    cortex.enqueue(note("own"))
    job = claim(cortex)
    cortex.enqueue(note("before"))
    cortex.cancel(job.id)
    END[end](cortex, clock, job)
    assert [job.status for job in cortex.jobs.list_jobs()] == [JobStatus.CANCELLED]


@pytest.mark.parametrize("end", END)
def test_what_is_asked_after_the_cancel_still_runs(cortex: Cortex, clock: ManualClock, end: str) -> None:
    """A duplicate that meets a job on its way out is not lost with it; a second cancel does not take it either."""
    cortex.handler("note", payload=Note, on_duplicate="rerun")(lambda _ctx, _payload: None)
    cortex.enqueue(note("own"))
    job = claim(cortex)
    cortex.cancel(job.id)
    assert cortex.enqueue(note("after")) is None
    cortex.cancel(job.id)
    END[end](cortex, clock, job)
    assert cortex.get_job(job.id).status is JobStatus.CANCELLED
    (rerun,) = cortex.jobs.list_jobs(status=JobStatus.READY)
    assert (rerun.payload_json, rerun.dedupe_key) == ('{"text":"after"}', "k")


# The handler


def settled(cortex: Cortex) -> Job:
    """Run the job ``k`` and return its row."""
    job_id = cortex.enqueue(note())
    assert cortex.run_once()
    return cortex.get_job(str(job_id))


def test_a_plain_handler_sees_the_request(cortex: Cortex) -> None:
    """It cannot be interrupted, so it looks and ends by itself; the row settles cancelled."""
    seen: list[tuple[bool, bool]] = []

    @cortex.handler("note", payload=Note)
    def handler(ctx: JobContext, _payload: Note) -> Done:
        before = ctx.cancel_requested
        cortex.cancel(ctx.job.id)
        for _ in range(BOUND_S * 1_000):
            if ctx.cancel_requested:
                break
            threading.Event().wait(0.001)
        seen.append((before, ctx.cancel_requested))
        return Done()

    assert settled(cortex).status is JobStatus.CANCELLED
    assert seen == [(False, True)]


def test_an_asynchronous_handler_is_cancelled_at_its_next_await(cortex: Cortex) -> None:
    """A handler that would wait for ever ends, and its clean-up runs."""
    cleaned: list[bool] = []

    @cortex.handler("note", payload=Note, llm_bound=True)
    async def handler(ctx: JobContext, _payload: Note) -> None:
        try:
            await asyncio.to_thread(cortex.cancel, ctx.job.id)  # the request may reach this await already
            await asyncio.wait_for(asyncio.Event().wait(), BOUND_S)
        finally:
            cleaned.append(ctx.cancel_requested)

    job = settled(cortex)
    assert (job.status, job.last_error, job.locked_by) == (JobStatus.CANCELLED, "cancelled on request", None)
    assert cleaned == [True]
    assert cortex.llm_gate.available == 1


def plan(kind: str, clock: ManualClock) -> Done | Defer:
    """Return a plan that would leave a chunk and a follow-up behind."""

    def writes(session: Session) -> None:
        session.add(ChunkRowFactory.build(id="written"))

    follow_ups = [NewJobFactory.build()]
    if kind == "defer":
        return Defer(until_ms=clock.now_ms(), reason="later", follow_ups=follow_ups, writes=writes)
    return Done(follow_ups=follow_ups, writes=writes)


@pytest.mark.parametrize("kind", ["done", "defer"])
def test_a_cancelled_run_writes_nothing(cortex: Cortex, clock: ManualClock, kind: str) -> None:
    """Whoever suppresses the cancellation and returns a plan is cancelled all the same; the plan is not carried out."""

    @cortex.handler("note", payload=Note)
    async def handler(ctx: JobContext, _payload: Note) -> Done | Defer:
        try:
            await asyncio.to_thread(cortex.cancel, ctx.job.id)  # the request may reach this await already
            await asyncio.wait_for(asyncio.Event().wait(), BOUND_S)
        except asyncio.CancelledError:
            return plan(kind, clock)
        raise AssertionError

    assert settled(cortex).status is JobStatus.CANCELLED
    assert len(cortex.jobs.list_jobs()) == 1
    with cortex.transaction() as session:
        assert session.connection().exec_driver_sql("SELECT COUNT(*) FROM mem_tree_chunks").scalar_one() == 0


def test_a_request_that_comes_after_the_handler_ended_is_honoured(
    cortex: Cortex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the handler's return and its settlement a cancel still wins, so that its caller was told the truth."""
    mark_done = cortex.jobs.mark_done

    def cancelling(job: Job, **options: object) -> bool:
        assert cortex.jobs.cancel(job.id, **options) is JobStatus.RUNNING  # type: ignore[arg-type]
        return mark_done(job, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(cortex.jobs, "mark_done", cancelling)
    cortex.handler("note", payload=Note)(lambda _ctx, _payload: plan("done", ManualClock()))
    assert settled(cortex).status is JobStatus.CANCELLED
    assert len(cortex.jobs.list_jobs()) == 1
