"""What a host's type checker sees; mypy reads this file with the rest, and nothing runs it.

An ``ignore`` here is a claim too: strict mode reports one that is not needed, so each proves that a wrong
call is refused.
"""

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractContextManager
from typing import assert_type

from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tinycortex import (
    AppendBufferPayload,
    Cortex,
    Defer,
    Done,
    Finding,
    FindingCode,
    Job,
    JobContext,
    JobFailure,
    JobKind,
    JobOutcome,
    JobStatus,
    LeafRef,
    LlmGate,
    NewJob,
    Permit,
    QueueDelegates,
    Requeued,
    Severity,
    SourceTarget,
    find_failure,
)
from tinycortex.models import ChunkRow, JobRow
from tinycortex.testing import ChunkRowFactory, FakeDelegates, JobRowFactory, ManualClock, NewJobFactory


class Note(BaseModel):
    text: str


def produce(cortex: Cortex, job: NewJob, session: Session) -> None:
    assert_type(cortex.enqueue(job), str | None)
    assert_type(cortex.enqueue(job, session=session), str | None)
    assert_type(cortex.enqueue_tx(session, job), str | None)
    assert_type(cortex.enqueue_many([job]), list[str | None])
    assert_type(cortex.transaction(), AbstractContextManager[Session])
    cortex.enqueue("seal")  # type: ignore[call-overload]


async def produce_async(cortex: Cortex, job: NewJob, session: AsyncSession) -> None:
    assert_type(cortex.enqueue(job, session=session), Awaitable[str | None])
    assert_type(await cortex.enqueue(job, session=session), str | None)


def register(cortex: Cortex) -> None:
    @cortex.handler("plain", payload=Note, max_attempts=3, timeout_s=30)
    def plain(_ctx: JobContext, payload: Note) -> Done:
        return Done(follow_ups=[NewJob.of("plain", payload)], writes=lambda session: session.flush())

    @cortex.handler("asynchronous", payload=Note, llm_bound=True, on_duplicate="rerun")
    async def asynchronous(ctx: JobContext, payload: Note) -> Done | Defer:
        return Defer(until_ms=ctx.clock.now_ms(), reason=payload.text)

    @cortex.handler("outcome", payload=Note)
    def outcome(_ctx: JobContext, _payload: Note) -> JobOutcome:
        return Done()

    @cortex.handler("nothing", payload=Note)
    def nothing(_ctx: JobContext, _payload: Note) -> None: ...

    assert_type(plain(make_context(), Note(text="")), Done)

    @cortex.handler("word", payload=Note)  # type: ignore[type-var]
    def word(_ctx: JobContext, payload: Note) -> str:
        return payload.text

    @cortex.handler("bare", payload=Note)  # type: ignore[type-var]
    def bare() -> None: ...

    @cortex.handler("option", payload=Note, max_attempt=3)  # type: ignore[call-arg]
    def option(_ctx: JobContext, _payload: Note) -> None: ...

    @cortex.handler("model", payload=dict)  # type: ignore[arg-type]
    def model(_ctx: JobContext, _payload: Note) -> None: ...


def make_context() -> JobContext:
    raise NotImplementedError


def work(cortex: Cortex) -> None:
    assert_type(cortex.run_once(), bool)
    assert_type(asyncio.run(cortex.run_once_async()), bool)
    assert_type(cortex.drain_until_idle(), int)
    assert_type(cortex.get_job("job:1"), Job)
    assert_type(cortex.get_job("job:1").status, JobStatus)
    assert_type(cortex.jobs.find_job("job:1"), Job | None)
    assert_type(cortex.jobs.claim_next(), Job | None)
    assert_type(cortex.requeue_failed(), Requeued)
    assert_type(cortex.self_heal(), int)
    assert_type(cortex.ensure_reembed_backfill(), str | None)


def diagnose(cortex: Cortex) -> None:
    (finding,) = cortex.diagnose()
    assert_type(finding, Finding)
    assert_type(finding.code, FindingCode)
    assert_type(finding.severity, Severity)
    finding.found = "nothing"  # type: ignore[misc]


def hold(gate: LlmGate) -> None:
    assert_type(gate.try_acquire(), Permit | None)
    with gate.acquire() as permit:
        assert_type(permit, Permit)


def values(job: Job) -> None:
    payload = AppendBufferPayload(node=LeafRef(chunk_id="c"), target=SourceTarget(source_id="s"))
    assert_type(NewJob.append_buffer(payload), NewJob)
    assert_type(JobKind.parse("seal"), JobKind)
    assert_type(JobFailure.transient("net"), JobFailure)
    assert_type(find_failure(ValueError()), JobFailure | None)
    job.attempts = 3  # type: ignore[misc]
    Defer(reason="no instant")  # type: ignore[call-arg]


def fakes() -> None:
    delegates: QueueDelegates = FakeDelegates()
    Cortex.open("sqlite:///chunks.db", delegates=delegates, clock=ManualClock())
    assert_type(JobRowFactory.build(running=True), JobRow)
    assert_type(JobRowFactory.build_batch(2), list[JobRow])
    assert_type(ChunkRowFactory.build(), ChunkRow)
    assert_type(NewJobFactory.build(), NewJob)
