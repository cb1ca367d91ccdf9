"""The LLM gate (spec: LLM concurrency; contract §3)."""

import asyncio
import gc
import random
import threading
import time
from collections.abc import Callable

import pytest
from pydantic import BaseModel

from tinycortex import Cortex, JobStatus, LlmGate, Permit, Settings
from tinycortex.config import QueueSettings
from tinycortex.testing import JobRowFactory, NewJobFactory, insert_rows

OpenCortex = Callable[..., Cortex]


class Note(BaseModel):
    text: str = ""


class HolderError(Exception):
    """What a holder raises."""


@pytest.mark.parametrize(("asked", "permits"), [(-1, 1), (0, 1), (1, 1), (3, 3)])
def test_a_gate_has_at_least_one_permit(asked: int, permits: int) -> None:
    """Zero is read as one, so the gate can never stop the only worker."""
    gate = LlmGate(asked)
    taken = [gate.try_acquire() for _ in range(permits + 1)]
    assert [permit is None for permit in taken] == [False] * permits + [True]


def test_the_default_gate_has_one_permit() -> None:
    """Contract §3: LLM permits 1."""
    assert LlmGate().permits == 1


def test_a_dropped_permit_is_given_back() -> None:
    """A permit that nobody holds any more is free again."""
    gate = LlmGate()
    permit = gate.try_acquire()
    assert gate.available == 0
    del permit
    gc.collect()
    assert gate.available == 1


def test_a_permit_is_given_back_once() -> None:
    """A second release, or one at the end of ``with``, makes no second slot."""
    gate = LlmGate()
    with gate.acquire() as permit:
        permit.release()
        permit.release()
    assert gate.available == 1


def test_a_holder_that_raises_gives_its_permit_back() -> None:
    """An exception loses no permit."""
    gate = LlmGate()
    with pytest.raises(HolderError), gate.acquire():
        raise HolderError
    assert gate.available == 1


def test_an_asynchronous_holder_that_raises_gives_its_permit_back() -> None:
    """A permit is given back on an event loop, too."""

    async def hold(gate: LlmGate) -> None:
        async with await gate.acquire_async():
            raise HolderError

    gate = LlmGate()
    with pytest.raises(HolderError):
        asyncio.run(hold(gate))
    assert gate.available == 1


def test_a_thread_gives_up_after_its_timeout() -> None:
    """A wait with a timeout ends, and leaves the queue of waiters."""
    gate = LlmGate()
    with gate.acquire(), pytest.raises(TimeoutError):
        gate.acquire(timeout_s=0.01)
    assert gate.available == 1


def test_a_wait_that_is_served_in_time_gets_its_permit() -> None:
    """A thread that waits goes on as soon as the holder is done."""
    gate = LlmGate()
    permit = gate.acquire()
    threading.Timer(0.02, permit.release).start()
    with gate.acquire(timeout_s=5):
        assert gate.available == 0
    assert gate.available == 1


def test_waiters_are_served_in_the_order_of_their_arrival() -> None:
    """FIFO: a late waiter never overtakes an early one."""

    async def wait(gate: LlmGate, number: int, served: list[int]) -> None:
        async with await gate.acquire_async():
            served.append(number)

    async def main() -> list[int]:
        gate, served = LlmGate(), list[int]()
        permit = gate.acquire()
        tasks = []
        for number in range(20):
            tasks.append(asyncio.create_task(wait(gate, number, served)))
            await asyncio.sleep(0)
        permit.release()
        await asyncio.gather(*tasks)
        return served

    assert asyncio.run(main()) == list(range(20))


def test_a_newcomer_does_not_overtake_a_waiter() -> None:
    """A freed permit goes to who waits, so ``try_acquire`` cannot starve the queue."""

    async def main() -> tuple[Permit | None, bool]:
        gate = LlmGate()
        permit = gate.acquire()
        waiter = asyncio.create_task(gate.acquire_async())
        await asyncio.sleep(0)
        permit.release()
        newcomer = gate.try_acquire()
        (await waiter).release()
        return newcomer, gate.available == 1

    assert asyncio.run(main()) == (None, True)


def test_no_more_holders_than_permits_among_threads_and_coroutines() -> None:
    """Threads and coroutines share one limit."""
    gate, lock = LlmGate(2), threading.Lock()
    inside, most = 0, 0

    def enter(change: int) -> None:
        nonlocal inside, most
        with lock:
            inside += change
            most = max(most, inside)

    def in_thread() -> None:
        with gate.acquire():
            enter(1)
            time.sleep(0.001)
            enter(-1)

    async def in_task() -> None:
        async with await gate.acquire_async():
            enter(1)
            await asyncio.sleep(0.001)
            enter(-1)

    async def main() -> None:
        await asyncio.gather(*(asyncio.to_thread(in_thread) for _ in range(6)), *(in_task() for _ in range(30)))

    asyncio.run(main())
    assert (most, gate.available) == (2, 2)


def test_a_cancelled_waiter_loses_no_permit() -> None:
    """Two hundred waiters cancelled at random points, some in the very moment they are served."""
    chance = random.Random(23)  # noqa: S311 - a test needs it the same every time

    async def main() -> int:
        gate = LlmGate()
        for _ in range(200):
            permit = await gate.acquire_async()
            waiter = asyncio.create_task(gate.acquire_async())
            for _ in range(chance.randint(0, 3)):
                await asyncio.sleep(0)
            if chance.random() < 0.5:
                permit.release()
            for _ in range(chance.randint(0, 3)):
                await asyncio.sleep(0)
            waiter.cancel()
            for served in await asyncio.gather(waiter, return_exceptions=True):
                if isinstance(served, Permit):
                    served.release()
            permit.release()
        return gate.available

    assert asyncio.run(main()) == 1


def test_a_full_gate_does_not_block_the_loop() -> None:
    """While a coroutine waits for a permit, the event loop goes on."""

    async def main() -> int:
        gate, ticks = LlmGate(), 0
        permit = gate.acquire()
        waiter = asyncio.create_task(gate.acquire_async())
        for _ in range(20):
            await asyncio.sleep(0.001)
            ticks += 1
        assert not waiter.done()
        permit.release()
        (await waiter).release()
        return ticks

    assert asyncio.run(main()) == 20


# The gate and the worker


def test_an_llm_bound_handler_holds_a_permit(cortex: Cortex) -> None:
    """Spec: a permit for the lifetime of the handler, given back before the row is settled."""
    free: list[int] = []
    cortex.handler("think", payload=Note, llm_bound=True)(lambda _ctx, _payload: free.append(cortex.llm_gate.available))
    insert_rows(cortex.database, JobRowFactory.build(kind="think", payload_json="{}"))
    assert cortex.run_once()
    assert (free, cortex.llm_gate.available) == ([0], 1)


def test_other_handlers_run_without_a_permit(cortex: Cortex) -> None:
    """``append_buffer``, ``flush_stale`` and plain custom kinds leave the gate free."""
    free: list[int] = []
    cortex.handler("note", payload=Note)(lambda _ctx, _payload: free.append(cortex.llm_gate.available))
    insert_rows(cortex.database, JobRowFactory.build(kind="note", payload_json="{}"))
    assert cortex.run_once()
    assert free == [1]


@pytest.mark.parametrize("fault", [HolderError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_a_handler_that_raises_gives_its_permit_back(cortex: Cortex, fault: type[BaseException]) -> None:
    """Whatever the holder raises, the next LLM job starts."""

    def think(_ctx: object, _payload: Note) -> None:
        raise fault

    cortex.handler("think", payload=Note, llm_bound=True)(think)
    insert_rows(cortex.database, *JobRowFactory.build_batch(2, kind="think", payload_json="{}"))
    assert cortex.run_once()
    assert cortex.llm_gate.available == 1
    assert cortex.run_once()


def test_a_full_gate_leaves_llm_bound_kinds_out(cortex: Cortex) -> None:
    """The permit comes before the claim; other kinds go on, and no attempt or lease is spent waiting."""
    waiting = cortex.enqueue(NewJobFactory.build())
    insert_rows(cortex.database, JobRowFactory.build(id="other", kind="flush_stale", payload_json='{"max_age_secs":1}'))
    before = cortex.get_job(str(waiting))
    with cortex.llm_gate.acquire():
        assert cortex.run_once()
        assert cortex.get_job("other").status is JobStatus.DONE
        assert not cortex.run_once()
        assert cortex.get_job(str(waiting)) == before
    assert cortex.run_once()
    assert cortex.get_job(str(waiting)).status is JobStatus.DONE


def test_an_idle_worker_holds_no_permit(cortex: Cortex) -> None:
    """A permit taken for a claim that found nothing is given back."""
    assert not cortex.run_once()
    assert cortex.llm_gate.available == 1


def test_the_gate_has_as_many_permits_as_the_settings_say(open_cortex: OpenCortex) -> None:
    """``queue.llm_permits`` sizes the gate of this queue, and of no other."""
    assert open_cortex(Settings(queue=QueueSettings(llm_permits=3))).llm_gate.available == 3
    assert open_cortex().llm_gate.available == 1


def test_a_handler_may_use_the_rest_of_a_gate(open_cortex: OpenCortex) -> None:
    """Nested use by a handler is no deadlock as long as a permit is free."""
    cortex = open_cortex(Settings(queue=QueueSettings(llm_permits=2)))

    async def think(_ctx: object, _payload: Note) -> None:
        async with await cortex.llm_gate.acquire_async():
            assert cortex.llm_gate.available == 0

    cortex.handler("think", payload=Note, llm_bound=True)(think)
    insert_rows(cortex.database, JobRowFactory.build(id="j", kind="think", payload_json="{}"))
    assert cortex.run_once()
    assert cortex.get_job("j").status is JobStatus.DONE
    assert cortex.llm_gate.available == 2
