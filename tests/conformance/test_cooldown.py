"""A provider that asks to be left alone is left alone by every LLM-bound kind of the process."""

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy.orm import Session

from background import BOUND_S
from tinycortex import Cortex, Defer, Done, InvalidInputError, JobFailure, JobStatus, LlmGate, NewJob
from tinycortex.testing import ManualClock

LONG_S = 3_600


class Note(BaseModel):
    text: str = ""


def limited_by(clock: ManualClock, how: str) -> Callable[..., Any]:
    def defer(*_arguments: object) -> Defer:
        return Defer(until_ms=clock.now_ms() + LONG_S * 1000, reason="429", cooldown=True)

    def fail(*_arguments: object) -> None:
        raise RuntimeError("the client's own") from JobFailure.transient("rate_limited", retry_after_s=LONG_S)

    return defer if how == "defer" else fail


@pytest.mark.parametrize("how", ["defer", "failure"])
def test_a_limited_provider_closes_the_gate_for_llm_bound_kinds(cortex: Cortex, clock: ManualClock, how: str) -> None:
    """None of them is claimed until then, whatever permits are free; others go on, and the status says so."""
    ran: list[str] = []
    cortex.handler("limited", payload=Note, llm_bound=True, rank=0)(limited_by(clock, how))
    cortex.handler("llm", payload=Note, llm_bound=True)(lambda _ctx, _payload: ran.append("llm"))
    cortex.handler("plain", payload=Note)(lambda _ctx, _payload: ran.append("plain"))
    assert cortex.status().llm_closed_for_ms == 0
    job_id, llm, _plain = (str(cortex.enqueue(NewJob.of(kind, Note()))) for kind in ("limited", "llm", "plain"))
    assert cortex.drain_until_idle() == 2
    assert ran == ["plain"]
    assert cortex.get_job(llm).status is JobStatus.READY
    job = cortex.get_job(job_id)
    assert (job.status, job.attempts) == (JobStatus.READY, 0 if how == "defer" else 1)
    assert job.available_at_ms == clock.now_ms() + LONG_S * 1000 or how == "failure"
    assert job.available_at_ms >= clock.now_ms() + LONG_S * 1000
    assert cortex.llm_gate.available == 0
    assert LONG_S * 900 < cortex.status().llm_closed_for_ms <= LONG_S * 1000


@pytest.mark.parametrize("how", ["defer", "failure"])
def test_a_kind_that_is_not_llm_bound_closes_no_gate(cortex: Cortex, clock: ManualClock, how: str) -> None:
    """It only puts itself off."""
    cortex.handler("limited", payload=Note)(limited_by(clock, how))
    cortex.enqueue(NewJob.of("limited", Note()))
    assert cortex.run_once()
    assert cortex.llm_gate.available == 1


def test_a_gate_that_closes_while_a_result_is_written_stays_closed(cortex: Cortex) -> None:
    """The writes come before the claim of the same turn, which asks for its permit only then."""
    stop = threading.Event()

    def close(_session: Session) -> None:
        cortex.llm_gate.close_for(LONG_S)

    cortex.handler("closes", payload=Note, rank=0)(lambda _ctx, _payload: Done(writes=close))
    cortex.handler("llm", payload=Note, llm_bound=True, rank=1)(lambda _ctx, _payload: None)
    cortex.handler("last", payload=Note)(lambda _ctx, _payload: stop.set())
    _closes, llm, last = (str(cortex.enqueue(NewJob.of(kind, Note()))) for kind in ("closes", "llm", "last"))
    cortex.run_sync(stop, concurrency=1, kinds=["closes", "llm", "last"], scheduler=False)
    assert (cortex.get_job(llm).status, cortex.get_job(llm).claim_token) == (JobStatus.READY, 0)
    assert cortex.get_job(last).status is JobStatus.DONE


def test_a_closed_gate_opens_and_no_permit_is_lost() -> None:
    """Threads and coroutines that wait get theirs once it is open; a shorter closing does not open it earlier."""
    gate = LlmGate(1)
    gate.close_for(0.05)
    gate.close_for(0.01)
    assert gate.try_acquire() is None
    with gate.acquire():
        assert gate.closed_for_s == 0
    gate.close_for(0.05)

    async def main() -> None:
        async with await gate.acquire_async():
            assert gate.closed_for_s == 0

    asyncio.run(main())
    assert gate.available == 1


def test_whoever_gives_up_at_a_closed_gate_loses_no_permit() -> None:
    """By a timeout, at once when it could not be met, or by a cancellation."""
    gate = LlmGate(1)
    gate.close_for(LONG_S)
    with pytest.raises(TimeoutError, match="closed"):
        gate.acquire(timeout_s=0.01)

    async def main() -> None:
        waiting = asyncio.create_task(gate.acquire_async())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    assert gate._free == 1


def test_a_permit_that_is_out_stays_out_while_the_gate_closes() -> None:
    """Closing takes nothing from who is at work, and what is given back meanwhile is not handed on."""
    gate = LlmGate(1)
    permit = gate.try_acquire()
    assert permit is not None
    served = threading.Event()

    def wait() -> None:
        with gate.acquire():
            served.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    gate.close_for(0.05)
    permit.release()
    assert served.wait(BOUND_S)
    assert gate.closed_for_s == 0
    waiter.join()


@pytest.mark.parametrize("wait", [-1, float("nan"), float("inf"), True, "30", 8 * 24 * 3_600])
def test_a_wait_that_is_none_is_refused(wait: Any) -> None:
    """No provider asks for that."""
    with pytest.raises(InvalidInputError, match="retry_after_s"):
        JobFailure.transient("rate_limited", retry_after_s=wait)


def test_a_failure_keeps_its_wait_when_it_is_copied() -> None:
    """It may come from another process."""
    failure = JobFailure.transient("rate_limited", "slow down", retry_after_s=30)
    for twin in (copy.copy(failure), pickle.loads(pickle.dumps(failure))):  # noqa: S301 - our own bytes
        assert (twin.code, str(twin), twin.retry_after_s) == ("rate_limited", "slow down", 30.0)
