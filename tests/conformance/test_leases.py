"""One holder at a time, whoever is slow: leases that end, and claims that are stale."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import BaseModel
from sqlalchemy.orm import Session

from background import BOUND_S, until
from tinycortex import Cortex, Done, Job, JobContext, JobFailure, JobStatus, LeaseLostError, NewJob, Settings
from tinycortex.config import QueueSettings, WorkerSettings
from tinycortex.testing import ChunkRowFactory, ManualClock, NewJobFactory

OpenCortex = Callable[..., Cortex]

QUICK = Settings(worker=WorkerSettings(heartbeat_ms=10))


class Note(BaseModel):
    text: str = ""


def claim(cortex: Cortex) -> Job:
    job = cortex.jobs.claim_next(kinds=cortex.list_kinds(), worker_id="me")
    assert job is not None
    return job


def plan(name: str) -> Done:
    """Return a plan that leaves a chunk and a follow-up of that name."""

    def writes(session: Session) -> None:
        session.add(ChunkRowFactory.build(id=name))

    return Done(writes=writes, follow_ups=[NewJobFactory.build(chunk_id=name)])


def left_behind(cortex: Cortex) -> tuple[list[str], list[str | None]]:
    """Return the ids of the chunks and the keys of the follow-ups there are."""
    with cortex.transaction() as session:
        chunks = list(session.connection().exec_driver_sql("SELECT id FROM mem_tree_chunks").scalars())
    return chunks, [job.dedupe_key for job in cortex.jobs.list_jobs(kind="extract_chunk")]


# A job that outlives its lease


@pytest.mark.parametrize("holder_first", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_only_the_holder_settles_a_job_that_outlived_its_lease(
    open_cortex: OpenCortex, clock: ManualClock, holder_first: bool, asynchronous: bool
) -> None:
    """Two loops have run it; whichever ends first, one plan is carried out, and both loops run the next jobs."""
    slow, fast = open_cortex(), open_cortex()
    begun, stale_may_end = threading.Event(), threading.Event()
    holder_has_it, holder_may_end = threading.Event(), threading.Event()

    def stale(ctx: JobContext, _payload: Note) -> Done:
        if ctx.job.attempts == 1:
            begun.set()
            assert stale_may_end.wait(BOUND_S)
        return plan("stale")

    async def stale_async(ctx: JobContext, payload: Note) -> Done:
        return await asyncio.to_thread(stale, ctx, payload)

    def current(ctx: JobContext, _payload: Note) -> Done:
        if ctx.job.attempts == 2:
            holder_has_it.set()
            assert holder_may_end.wait(BOUND_S)
        return plan("holder")

    slow.handler("note", payload=Note)(stale_async if asynchronous else stale)
    fast.handler("note", payload=Note)(current)
    job_id = str(slow.enqueue(NewJob.of("note", Note())))
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(slow.run_once)
        assert begun.wait(BOUND_S)
        clock.advance(300_001)
        assert fast.recover_stale_locks() == 1
        holding = pool.submit(fast.run_once)
        assert holder_has_it.wait(BOUND_S)
        ends = [(stale_may_end, late), (holder_may_end, holding)]
        for may_end, ending in reversed(ends) if holder_first else ends:
            may_end.set()
            assert ending.result(BOUND_S)
    job = fast.get_job(job_id)
    assert (job.status, job.attempts, job.last_error) == (JobStatus.DONE, 2, None)
    assert left_behind(fast) == (["holder"], ["extract:holder"])
    assert slow.run_once()  # the follow-up: this loop goes on, too


def test_a_process_that_claims_its_own_lost_row_anew_looks_after_the_new_claim(
    open_cortex: OpenCortex, clock: ManualClock
) -> None:
    """The end of the old run does not stop the renewal of the new one, and the old run is told that it is stale."""
    cortex = open_cortex(QUICK)
    events = {name: threading.Event() for name in ("first runs", "first may end", "second runs", "second may end")}
    told: list[bool] = []

    @cortex.handler("note", payload=Note, lease_ms=30)
    def handler(ctx: JobContext, _payload: Note) -> None:
        name = "first" if ctx.job.attempts == 1 else "second"
        events[f"{name} runs"].set()
        if name == "first":
            until(lambda: ctx.lease_lost)
            told.append(ctx.lease_lost)
        assert events[f"{name} may end"].wait(BOUND_S)

    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cortex.run_once)
        assert events["first runs"].wait(BOUND_S)
        with cortex.transaction() as session:  # a rescue that no renewal can come before
            session.connection().exec_driver_sql("UPDATE mem_tree_jobs SET locked_until_ms = 1")
            assert cortex.jobs.recover_stale_locks(session=session) == 1
        second = pool.submit(cortex.run_once)
        assert events["second runs"].wait(BOUND_S)
        events["first may end"].set()
        assert first.result(BOUND_S)
        assert told == [True]
        clock.advance(1_000)
        until(lambda: cortex.get_job(job_id).locked_until_ms == clock.now_ms() + 30)
        events["second may end"].set()
        assert second.result(BOUND_S)
    assert cortex.get_job(job_id).status is JobStatus.DONE


def test_a_handler_may_stop_at_a_lost_lease(open_cortex: OpenCortex, clock: ManualClock) -> None:
    """``raise_if_lease_lost`` is silent while the lease holds, and raises before the next costly effect once lost."""
    cortex, other = open_cortex(QUICK), open_cortex()
    raised: list[str] = []

    @cortex.handler("note", payload=Note)
    def handler(ctx: JobContext, _payload: Note) -> None:
        ctx.raise_if_lease_lost()
        clock.advance(300_001)
        assert other.recover_stale_locks() == 1
        until(lambda: ctx.lease_lost)
        try:
            ctx.raise_if_lease_lost()
        except LeaseLostError as error:
            raised.append(str(error))
            raise

    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    assert cortex.run_once()
    assert len(raised) == 1
    assert job_id in raised[0]
    job = cortex.get_job(job_id)  # as recovery left it: the stale run books no failure
    assert (job.status, job.attempts, job.last_error) == (JobStatus.READY, 1, "recovered_from_stale_lock")


def test_a_kind_with_a_lease_of_its_own_is_renewed_by_it(open_cortex: OpenCortex, clock: ManualClock) -> None:
    """Claim and renewals use the kind's length; the worker's own is for the other kinds."""
    cortex = open_cortex(QUICK.model_copy(update={"queue": QueueSettings(lease_ms=99)}))
    seen: dict[str, list[int]] = {}

    def handler(ctx: JobContext, _payload: Note) -> None:
        claimed_ms = clock.now_ms()
        clock.advance(5_000)
        until(lambda: cortex.get_job(ctx.job.id).locked_until_ms != ctx.job.locked_until_ms)
        renewed = cortex.get_job(ctx.job.id).locked_until_ms
        assert ctx.job.locked_until_ms is not None
        assert renewed is not None
        seen[ctx.job.kind] = [ctx.job.locked_until_ms - claimed_ms, renewed - clock.now_ms()]

    cortex.handler("short", payload=Note, lease_ms=30)(handler)
    cortex.handler("usual", payload=Note)(handler)
    for kind in ("short", "usual"):
        cortex.enqueue(NewJob.of(kind, Note()))
    assert cortex.drain_until_idle() == 2
    assert seen == {"short": [30, 30], "usual": [99, 99]}


# A token is never used twice


def settle_all_ways(cortex: Cortex, job: Job) -> list[bool]:
    jobs = cortex.jobs
    return [
        jobs.mark_done(job),
        jobs.mark_failed(job, "no"),
        jobs.mark_failed_typed(job, "no", JobFailure.unrecoverable("bad")),
        jobs.mark_deferred(job, 1, "later"),
        jobs.release(job),
        jobs.renew(job),
        jobs.note_error(job, "note"),
    ]


def test_no_stale_claim_settles_though_all_else_about_it_repeats(cortex: Cortex) -> None:
    """Rescue, defer and two claims in one frozen millisecond: attempts and start come back, the token does not."""
    cortex.enqueue(NewJobFactory.build())
    first = claim(cortex)
    with cortex.transaction() as session:
        session.connection().exec_driver_sql("UPDATE mem_tree_jobs SET locked_until_ms = started_at_ms - 1")
    assert cortex.recover_stale_locks() == 1
    second = claim(cortex)
    assert second.started_at_ms is not None
    assert cortex.jobs.mark_deferred(second, second.started_at_ms, "later")
    third = claim(cortex)
    assert (third.attempts, third.started_at_ms) == (second.attempts, second.started_at_ms)
    assert settle_all_ways(cortex, second) == [False] * 7
    assert settle_all_ways(cortex, first) == [False] * 7
    assert cortex.get_job(third.id) == third
    assert cortex.jobs.mark_done(third)


def test_no_stale_claim_settles_after_a_requeue(cortex: Cortex) -> None:
    """An operator's requeue makes the attempts begin at 0 again, not the tokens."""
    cortex.enqueue(NewJobFactory.build())
    stale = claim(cortex)
    assert cortex.jobs.mark_failed_typed(stale, "no", JobFailure.unrecoverable("bad"))
    assert cortex.requeue_failed(stale.id).revived == 1
    holder = claim(cortex)
    assert (holder.attempts, holder.started_at_ms) == (stale.attempts, stale.started_at_ms)
    assert settle_all_ways(cortex, stale) == [False] * 7
    assert cortex.get_job(holder.id) == holder
