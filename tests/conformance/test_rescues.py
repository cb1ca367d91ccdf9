"""Several workers at once: rescues that meet, permits that are short, threads that cannot be stopped."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import BaseModel

from background import BOUND_S, until
from tinycortex import Cortex, Done, JobContext, JobStatus, NewJob
from tinycortex.testing import JobRowFactory, insert_rows

OpenCortex = Callable[..., Cortex]


class Note(BaseModel):
    text: str = ""


# Rescues that meet


@pytest.mark.parametrize("_again", range(5))
def test_rescues_at_once_hand_a_row_out_once(open_cortex: OpenCortex, _again: int) -> None:
    """Two recover while a third claims: the row is freed once, run once, and not freed again under its new holder."""
    workers = [open_cortex() for _ in range(3)]
    ran: list[int] = []
    for worker in workers:
        worker.handler("note", payload=Note)(lambda ctx, _payload: ran.append(ctx.job.claim_token))
    insert_rows(workers[0].database, JobRowFactory.build(kind="note", payload_json="{}", expired=True))
    barrier = threading.Barrier(3)

    def recover(worker: Cortex) -> int:
        barrier.wait(BOUND_S)
        return worker.recover_stale_locks()

    def work() -> int:
        barrier.wait(BOUND_S)
        until(workers[2].run_once)
        return 1 + workers[2].drain_until_idle()

    with ThreadPoolExecutor(3) as pool:
        freed = [pool.submit(recover, worker) for worker in workers[:2]]
        runs = pool.submit(work)
        assert sorted(result.result(BOUND_S) for result in freed) == [0, 1]
        assert runs.result(BOUND_S) == 1
    assert ran == [2]


# Permits that are short


def test_jobs_that_wait_for_a_permit_hold_no_lease(open_cortex: OpenCortex) -> None:
    """With one permit and four workers each LLM job runs once, one at a time; others go on while the gate is full."""
    cortex = open_cortex()
    lock, plain_ran = threading.Lock(), threading.Event()
    inside, most = 0, 0
    ran: list[str] = []

    def think(ctx: JobContext, payload: Note) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
            ran.append(payload.text)
        assert plain_ran.wait(BOUND_S)  # the first to think waits for what needs no permit
        assert ctx.job.attempts == 1
        with lock:
            inside -= 1

    cortex.handler("think", payload=Note, llm_bound=True, rank=0)(think)
    cortex.handler("plain", payload=Note)(lambda _ctx, _payload: plain_ran.set())
    cortex.enqueue_many(NewJob.of("think", Note(text=str(number))) for number in range(4))
    cortex.enqueue(NewJob.of("plain", Note()))

    def work(_number: int) -> None:
        until(lambda: not cortex.run_once() and cortex.jobs.count_by_status()[JobStatus.READY] == 0)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert (sorted(ran), most) == (["0", "1", "2", "3"], 1)
    assert cortex.jobs.count_by_status()[JobStatus.DONE] == 5
    assert cortex.llm_gate.available == 1


def test_a_stopped_worker_leaves_a_thread_its_row_and_permit(open_cortex: OpenCortex) -> None:
    """A thread that nothing can stop goes on holding both until it ends; what it achieved is written then."""
    cortex, other = open_cortex(), open_cortex()
    started, may_end = asyncio.Event(), threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()

        @cortex.handler("note", payload=Note, llm_bound=True)
        def handler(_ctx: JobContext, _payload: Note) -> Done:
            loop.call_soon_threadsafe(started.set)
            assert may_end.wait(BOUND_S)
            return Done(follow_ups=[NewJob.of("later", Note())])

        job_id = str(await asyncio.to_thread(cortex.enqueue, NewJob.of("note", Note())))
        step = asyncio.create_task(cortex.run_once_async())
        await started.wait()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        held = await asyncio.to_thread(cortex.get_job, job_id)
        assert (held.status, held.attempts, cortex.llm_gate.available) == (JobStatus.RUNNING, 1, 0)
        assert await asyncio.to_thread(other.recover_stale_locks) == 0
        may_end.set()
        await asyncio.to_thread(until, lambda: cortex.get_job(job_id).status is JobStatus.DONE)
        assert len(await asyncio.to_thread(cortex.jobs.list_jobs)) == 2
        assert cortex.llm_gate.available == 1

    asyncio.run(main())
