"""What a handler may be and do, and what becomes of its job (spec: Worker loop, Typed failures)."""

import asyncio
import functools
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from background import until, working
from tinycortex import (
    Cortex,
    Done,
    DuplicateKindError,
    Job,
    JobContext,
    JobFailure,
    JobStatus,
    NewJob,
    PayloadError,
    RegistrationError,
    StorageBusyError,
    StorageError,
)
from tinycortex.errors import UnknownKindError
from tinycortex.handlers.registry import Handler
from tinycortex.testing import FakeDelegates, JobRowFactory, ManualClock, NewJobFactory, insert_rows


class Note(BaseModel):
    text: str = ""
    count: int = 0


def run(cortex: Cortex, handler: Handler, **options: Any) -> Job:
    """Run one job with ``handler`` and return its row."""
    cortex.handler("note", payload=Note, **options)(handler)
    job_id = cortex.enqueue(NewJob.of("note", Note(text="hello", count=3)))
    assert cortex.run_once()
    return cortex.get_job(str(job_id))


def raising(error: BaseException) -> Handler:
    def handler(_ctx: JobContext, _payload: Note) -> None:
        raise error

    return handler


def async_raising(error: BaseException) -> Handler:
    async def handler(_ctx: JobContext, _payload: Note) -> None:
        raise error

    return handler


# What a handler may be


def plain(_ctx: JobContext, payload: Note) -> Done | None:
    return Done() if (payload.text, payload.count) == ("hello", 3) else None


async def coroutine(_ctx: JobContext, payload: Note) -> Done:
    await asyncio.sleep(0)
    assert (payload.text, payload.count) == ("hello", 3)
    return Done()


class AsyncCallable:
    async def __call__(self, ctx: JobContext, payload: Note) -> Done:
        return await coroutine(ctx, payload)


class PlainCallable:
    def __call__(self, ctx: JobContext, payload: Note) -> Done | None:
        return plain(ctx, payload)

    async def method(self, ctx: JobContext, payload: Note) -> Done:
        return await coroutine(ctx, payload)


async def with_extra(_extra: int, ctx: JobContext, payload: Note) -> Done:
    return await coroutine(ctx, payload)


def returns_awaitable(ctx: JobContext, payload: Note) -> Awaitable[Done]:
    return coroutine(ctx, payload)


@pytest.mark.parametrize(
    "handler",
    [
        plain,
        coroutine,
        AsyncCallable(),
        PlainCallable(),
        PlainCallable().method,
        functools.partial(with_extra, 1),
        lambda ctx, payload: coroutine(ctx, payload),  # noqa: PLW0108 - a lambda is what is tested
        returns_awaitable,
    ],
)
def test_any_callable_can_be_a_handler(cortex: Cortex, handler: Handler) -> None:
    """Plain and asynchronous functions, partials, lambdas, methods and callable objects all run to their end."""
    assert run(cortex, handler).status is JobStatus.DONE


def test_a_plain_handler_runs_off_the_event_loop(cortex: Cortex) -> None:
    """A blocking ``def`` stalls no coroutine: it has a thread of its own."""

    def handler(_ctx: JobContext, _payload: Note) -> None:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()

    assert run(cortex, handler).status is JobStatus.DONE


def test_asynchronous_handlers_share_one_loop(cortex: Cortex) -> None:
    """A client that a handler keeps meets the same event loop again in the next job."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def handler(_ctx: JobContext, _payload: Note) -> None:
        loops.append(asyncio.get_running_loop())

    run(cortex, handler)
    cortex.enqueue(NewJob.of("note", Note()))
    assert cortex.run_once()
    assert loops[0] is loops[1]


def test_run_once_works_inside_a_running_loop(cortex: Cortex) -> None:
    """The plain call can be made from code that itself runs on an event loop."""

    async def main() -> JobStatus:
        return run(cortex, coroutine).status

    assert asyncio.run(main()) is JobStatus.DONE


def test_run_once_async_runs_on_the_callers_loop(cortex: Cortex) -> None:
    """The asynchronous form awaits the handler where it was called."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def handler(_ctx: JobContext, _payload: Note) -> None:
        loops.append(asyncio.get_running_loop())

    async def main() -> bool:
        cortex.enqueue(NewJob.of("note", Note()))
        return await cortex.run_once_async() and loops == [asyncio.get_running_loop()]

    cortex.handler("note", payload=Note)(handler)
    assert asyncio.run(main())
    assert asyncio.run(cortex.run_once_async()) is False


def test_the_context_is_the_claim(cortex: Cortex, delegates: FakeDelegates) -> None:
    """A handler sees its own row as claimed, the delegates and the clock."""
    seen: list[JobContext] = []
    run(cortex, lambda ctx, _payload: seen.append(ctx))
    (ctx,) = seen
    assert (ctx.job.status, ctx.job.attempts, ctx.job.claim_token) == (JobStatus.RUNNING, 1, 1)
    assert ctx.delegates is delegates
    assert ctx.clock is cortex.clock


# What a handler may raise


class StrRaisesError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def stop_iteration(_ctx: JobContext, _payload: Note) -> None:
    next(iter(()))


def generator(_ctx: JobContext, _payload: Note) -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("wrap", [raising, async_raising])
@pytest.mark.parametrize(
    ("error", "name"),
    [
        (ValueError("no"), "ValueError: no"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (asyncio.CancelledError(), "CancelledError"),
        (GeneratorExit(), "GeneratorExit"),
        (TimeoutError("slow"), "TimeoutError: slow"),
        (StopAsyncIteration(), "StopAsyncIteration"),
        (ExceptionGroup("several", [ValueError("a"), TypeError("b")]), "several"),
        (StrRaisesError(), "StrRaisesError"),
        (MemoryError(), "MemoryError"),
        (RecursionError("deep"), "RecursionError: deep"),
    ],
)
def test_whatever_a_handler_raises_is_a_failed_attempt(
    cortex: Cortex, wrap: Callable[[BaseException], Handler], error: BaseException, name: str
) -> None:
    """The attempt is burnt, the reason is on the row, and the worker runs the next job."""
    job = run(cortex, wrap(error))
    assert (job.status, job.attempts, job.completed_at_ms) == (JobStatus.READY, 1, None)
    assert name in str(job.last_error)
    cortex.enqueue(NewJobFactory.build())
    assert cortex.run_once()


def test_stop_iteration_does_not_hang_the_worker(cortex: Cortex) -> None:
    """A future cannot be given StopIteration; the attempt fails all the same."""
    assert "StopIteration" in str(run(cortex, stop_iteration).last_error)


@pytest.mark.parametrize(
    ("handler", "word"),
    [
        (lambda _ctx, _payload: True, "bool"),
        (lambda _ctx, _payload: "done", "str"),
        (lambda _ctx, _payload: {"status": "done"}, "dict"),
        (lambda _ctx, _payload: JobStatus.DONE, "JobStatus"),
        (lambda _ctx, _payload: Done, "type"),
        (generator, "generator"),
    ],
)
def test_a_handler_that_returns_nonsense_fails_with_a_clear_reason(cortex: Cortex, handler: Handler, word: str) -> None:
    """The error names what was returned and what is wanted."""
    job = run(cortex, handler)
    assert (job.status, job.attempts) == (JobStatus.READY, 1)
    assert word in str(job.last_error)
    assert "Done, Defer or None" in str(job.last_error)


def test_an_error_of_twenty_megabytes_is_stored_cut(cortex: Cortex) -> None:
    """Bad bytes and megabytes in the error's text neither kill the worker nor fill the file."""
    job = run(cortex, raising(Exception("a\x00b\ud800" + "x" * 20_000_000)))
    assert (job.status, job.attempts) == (JobStatus.READY, 1)
    assert str(job.last_error).startswith("Exception: a\ufffdb\ufffdxxx")
    assert len(str(job.last_error).encode()) == 65_536


def test_an_error_that_cannot_be_printed_is_recorded(cortex: Cortex) -> None:
    """An error whose ``__str__`` raises still settles its job."""
    assert run(cortex, raising(StrRaisesError())).last_error == "StrRaisesError: <its __str__ raised ValueError>"


@pytest.mark.parametrize(
    "phrase", ["database disk image is malformed", "database is locked", "disk is full", "unable to open database file"]
)
def test_a_message_that_quotes_a_storage_fault_is_only_a_failed_job(cortex: Cortex, phrase: str) -> None:
    """Control flow is never decided by text that user data can reach."""
    job = run(cortex, raising(RuntimeError(phrase)))
    assert (job.status, job.attempts) == (JobStatus.READY, 1)
    cortex.enqueue(NewJobFactory.build())
    assert cortex.run_once()


# Typed failures, however wrapped


def _raised_from(failure: JobFailure) -> None:
    raise RuntimeError("outer") from failure


def _raised_while_handling(failure: JobFailure) -> None:
    try:
        raise failure
    except JobFailure:
        raise RuntimeError("outer")  # noqa: B904 - the chain that an unthinking handler makes


def _raised_deeply(failure: JobFailure) -> None:
    try:
        _raised_from(failure)
    except RuntimeError as error:
        try:
            raise KeyError("middle") from error  # noqa: TRY301 - the chain is the point
        except KeyError:
            raise ValueError("top")  # noqa: B904 - as above


def _raised_in_a_group(failure: JobFailure) -> None:
    raise ExceptionGroup("several", [ValueError("other"), ExceptionGroup("inner", [failure])])


def _raised_bare(failure: JobFailure) -> None:
    raise failure


def _raised_from_none_with_it_inside(failure: JobFailure) -> None:
    try:
        raise ValueError("hidden")  # noqa: TRY301 - as above
    except ValueError:
        raise failure from None


CHAINS: list[Callable[[JobFailure], None]] = [
    _raised_bare,
    _raised_from,
    _raised_while_handling,
    _raised_deeply,
    _raised_in_a_group,
    _raised_from_none_with_it_inside,
]


@pytest.mark.parametrize("chain", CHAINS)
def test_an_unrecoverable_failure_is_found_however_it_is_wrapped(
    cortex: Cortex, chain: Callable[[JobFailure], None]
) -> None:
    """Contract §4.6: one attempt, failed, with reason and class; the error is the full chain of causes."""
    job = run(cortex, lambda _ctx, _payload: chain(JobFailure.unrecoverable("no_such_model", "the model is gone")))
    assert (job.status, job.attempts) == (JobStatus.FAILED, 1)
    assert (job.failure_reason, job.failure_class) == ("no_such_model", "unrecoverable")
    assert "the model is gone" in str(job.last_error)


@pytest.mark.parametrize("chain", CHAINS)
def test_a_transient_failure_is_tried_again_however_it_is_wrapped(
    cortex: Cortex, chain: Callable[[JobFailure], None]
) -> None:
    """Contract §4.5: ready, reason and class empty until the budget is used up."""
    job = run(cortex, lambda _ctx, _payload: chain(JobFailure.transient("net")))
    assert (job.status, job.failure_reason, job.failure_class) == (JobStatus.READY, None, None)


def test_from_none_hides_a_failure(cortex: Cortex) -> None:
    """``raise X from None`` says that what was handled is not the cause."""

    def handler(_ctx: JobContext, _payload: Note) -> None:
        try:
            raise JobFailure.unrecoverable("hidden")
        except JobFailure:
            raise ValueError("outer") from None

    job = run(cortex, handler)
    assert (job.status, job.last_error) == (JobStatus.READY, "ValueError: outer")


def test_the_nearest_failure_decides(cortex: Cortex) -> None:
    """Of two failures in one chain the outer one is the handler's last word."""

    def handler(_ctx: JobContext, _payload: Note) -> None:
        raise JobFailure.transient("net") from JobFailure.unrecoverable("bad")

    assert run(cortex, handler, max_attempts=1).failure_reason == "net"


def test_a_chain_that_bites_its_own_tail_ends(cortex: Cortex) -> None:
    """A cycle of causes does not spin the worker."""
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert "first" in str(run(cortex, raising(first)).last_error)


@pytest.mark.parametrize(
    ("failure", "reason", "failure_class"),
    [(JobFailure.transient("net"), "net", "transient"), (ValueError("x"), None, None)],
)
def test_a_used_up_budget_fails_the_job(
    cortex: Cortex, failure: Exception, reason: str | None, failure_class: str | None
) -> None:
    """Contract §4.5: with the last attempt the row is failed, with the reason and class there are."""
    job = run(cortex, raising(failure), max_attempts=1)
    assert (job.status, job.failure_reason, job.failure_class) == (JobStatus.FAILED, reason, failure_class)


# Payloads


@pytest.mark.parametrize("payload", ["", "not json", "[]", "null", '{"count":"many"}', '{"count":NaN}'])
def test_a_malformed_payload_fails_at_once(cortex: Cortex, payload: str) -> None:
    """It will never read differently, so no attempt is wasted on it, and the handler is not called."""
    called: list[object] = []
    cortex.handler("note", payload=Note)(lambda _ctx, parsed: called.append(parsed))
    insert_rows(cortex.database, JobRowFactory.build(id="j", kind="note", payload_json=payload))
    assert cortex.run_once()
    job = cortex.get_job("j")
    assert (job.status, job.attempts) == (JobStatus.FAILED, 1)
    assert (job.failure_reason, job.failure_class) == ("malformed_payload", "unrecoverable")
    assert called == []


def test_a_payload_error_of_the_handlers_own_is_retried(cortex: Cortex) -> None:
    """Only the job's own payload is malformed for good; a handler may meet such an error elsewhere."""
    assert run(cortex, raising(PayloadError("a reply was no JSON"))).status is JobStatus.READY


# Storage faults are not the job's fault


@pytest.mark.parametrize("wrap", [raising, async_raising])
def test_a_storage_fault_puts_the_job_off(
    cortex: Cortex, clock: ManualClock, wrap: Callable[[BaseException], Handler]
) -> None:
    """The attempt is given back, and the job waits for as long as the fault calls for."""
    cortex.handler("note", payload=Note)(wrap(StorageBusyError("busy", url=cortex.database.masked_url)))
    job_id = cortex.enqueue(NewJob.of("note", Note()))
    assert cortex.run_once()
    job = cortex.get_job(str(job_id))
    assert (job.status, job.attempts, job.locked_by) == (JobStatus.READY, 0, None)
    assert (job.available_at_ms, job.last_error) == (clock.now_ms() + 100, "StorageBusyError: busy")


def test_a_storage_fault_of_a_delegate_puts_the_job_off(cortex: Cortex, delegates: FakeDelegates) -> None:
    """The same for the built-in kinds, and the LLM permit is free again."""
    delegates.error = StorageError("host I/O", url=cortex.database.masked_url)
    job_id = cortex.enqueue(NewJobFactory.build())
    assert cortex.run_once()
    assert cortex.get_job(str(job_id)).attempts == 0
    assert cortex.llm_gate.available == 1


# Registration


# What it leaves behind


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Keep the garbage collector from hiding what refers to itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_a_job_took_is_free_when_it_has_ended(cortex: Cortex, *, asynchronous: bool) -> None:
    """No collector is needed: it would cost a busy worker a fifth of its time."""
    taken: list[weakref.ref[Any]] = []

    def handler(ctx: JobContext, payload: Note) -> Done:
        taken.extend([weakref.ref(ctx.signals), weakref.ref(payload)])
        return Done()

    async def handler_async(ctx: JobContext, payload: Note) -> Done:
        return handler(ctx, payload)

    cortex.handler("note", payload=Note)(handler_async if asynchronous else handler)
    for _ in range(3):
        cortex.enqueue(NewJob.of("note", Note()))
    with working(cortex):
        until(lambda: len(taken) == 6 and all(ref() is None for ref in taken))


@pytest.mark.parametrize("kind", ["seal", "extract_chunk", "note"])
def test_a_kind_has_one_handler(cortex: Cortex, kind: str) -> None:
    """Registering twice, or for a built-in kind, is a clear error."""
    cortex.handler("note", payload=Note)(plain)
    with pytest.raises(DuplicateKindError, match=kind):
        cortex.handler(kind, payload=Note)(plain)


@pytest.mark.parametrize("kind", ["topic_route", "digest_daily"])
def test_a_retired_kind_cannot_come_back(cortex: Cortex, kind: str) -> None:
    """Its rows are purged at every start, so it could never run."""
    with pytest.raises(UnknownKindError, match="retired"):
        cortex.handler(kind, payload=Note)


def test_a_handler_can_be_called(cortex: Cortex) -> None:
    """What cannot be called is refused when it is registered, not when its first job runs."""
    with pytest.raises(RegistrationError, match="callable"):
        cortex.handler("note", payload=Note)("handler")  # type: ignore[type-var]


def test_the_decorator_returns_the_handler(cortex: Cortex) -> None:
    """A decorated function is still itself."""
    assert cortex.handler("note", payload=Note)(plain) is plain


def test_handlers_run_from_several_threads(cortex: Cortex) -> None:
    """Eight threads may drive one queue; each job runs once."""
    ran: list[int] = []
    cortex.handler("note", payload=Note)(lambda _ctx, payload: ran.append(payload.count))
    cortex.enqueue_many(NewJob.of("note", Note(count=number)) for number in range(40))

    def work() -> None:
        while cortex.run_once():
            pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ran) == list(range(40))
