"""Dispatcher: from a claimed row to its handler's plan."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tinycortex.delegates import QueueDelegates
from tinycortex.domain import policy
from tinycortex.domain.clock import Clock
from tinycortex.domain.jobs import Job
from tinycortex.domain.outcomes import Done, JobPlan
from tinycortex.domain.payloads import parse_payload
from tinycortex.errors import JobFailure, PayloadError, StorageError
from tinycortex.handlers.context import JobContext, RunSignals
from tinycortex.handlers.registry import HandlerRegistry
from tinycortex.repositories.jobs import JobRepository
from tinycortex.threads import SerialThread, Threads

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Raised:
    """What a handler raised, as a value.

    Some errors cannot cross a task or a thread as themselves: SystemExit and KeyboardInterrupt end the
    event loop they pass through, and a future that is given StopIteration never completes.
    """

    error: BaseException


class Dispatcher:
    """Finds the handler of a job, hands it the parsed payload, and returns what it plans."""

    def __init__(
        self,
        registry: HandlerRegistry,
        jobs: JobRepository,
        delegates: QueueDelegates,
        clock: Clock,
        *,
        threads: Threads,
        storage: SerialThread,
    ) -> None:
        self._threads = threads
        self._storage = storage
        self._registry = registry
        self._jobs = jobs
        self._delegates = delegates
        self._clock = clock

    async def dispatch(self, job: Job, signals: RunSignals) -> JobPlan:
        """Run the handler of ``job``: an ``async def`` on this loop, a plain ``def`` in a thread.

        Past the kind's ``timeout_s`` an asynchronous handler is cancelled. A thread cannot be: the timeout
        is noted on the row, and the run ends, as a failed attempt all the same, when the thread does.

        Raises:
            JobFailure: the payload is malformed (unrecoverable: it will never read differently), or the
                handler timed out (transient).
            TypeError: the handler returned something that is no plan.
            BaseException: whatever the handler raised.
        """
        registration = self._registry.get(job.kind)
        spec, handler = registration.spec, registration.handler
        try:
            payload = parse_payload(spec.payload, job.payload_json)
        except PayloadError as error:
            raise JobFailure.unrecoverable(policy.REASON_MALFORMED_PAYLOAD, str(error)) from error
        context = JobContext(job=job, delegates=self._delegates, clock=self._clock, signals=signals)
        if inspect.iscoroutinefunction(handler):
            result = await self._await(handler(context, payload), signals, spec.timeout_s)
        else:
            result = await self._call(lambda: handler(context, payload), job, signals, spec.timeout_s)
            if inspect.isawaitable(result):  # a partial, a lambda or an object around an async def
                result = await self._await(result, signals, spec.timeout_s)
        return _plan(job, result)

    def conclude(self, job: Job, signals: RunSignals, returned: object) -> JobPlan | BaseException | None:
        """Return how a run ended whose handler's thread has ended after its task; None when it had only begun."""
        if inspect.isawaitable(returned):
            if inspect.iscoroutine(returned):
                returned.close()
            return None
        try:
            return _plan(job, _result(returned, signals, self._registry.get(job.kind).spec.timeout_s))
        except BaseException as error:  # noqa: BLE001 - the handler's own, SystemExit too
            return error

    async def _await(self, awaitable: Awaitable[Any], signals: RunSignals, timeout_s: float | None) -> object:
        task = asyncio.ensure_future(_guarded(awaitable))
        loop = asyncio.get_running_loop()
        signals.stop_with(lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            done, _pending = await asyncio.wait({task}, timeout=timeout_s)
            if not done:
                signals.timed_out = True
        finally:
            signals.stop_with(None)
            if not task.done():  # timed out, or this worker is being stopped
                task.cancel()
                await asyncio.wait({task})
            if inspect.iscoroutine(awaitable):
                awaitable.close()  # of a task that was cancelled before its first step
        return _result(task.result(), signals, timeout_s)

    async def _call(self, call: Callable[[], object], job: Job, signals: RunSignals, timeout_s: float | None) -> object:
        def run() -> object:
            returned: object = None
            try:
                returned = call()
            except BaseException as error:  # noqa: BLE001 - see _Raised
                returned = _Raised(error)
            finally:
                signals.leave_thread(returned)
            return returned

        signals.enter_thread()
        thread = asyncio.wrap_future(self._threads.submit(run))
        done, _pending = await asyncio.wait({thread}, timeout=timeout_s)
        if not done:
            signals.timed_out = True
            await self._storage.call(self._note_timeout, job, timeout_s)
            await asyncio.wait({thread})
        signals.return_to_loop()
        return _result(thread.result(), signals, timeout_s)

    def _note_timeout(self, job: Job, timeout_s: float | None) -> None:
        message = f"timed out after {timeout_s:g} s, and its thread is still running"
        logger.warning("job %s (%s) %s", job.id, job.kind, message)
        try:
            self._jobs.note_error(job, message)
        except StorageError as error:
            logger.warning("job %s: the timeout could not be noted: %s", job.id, type(error).__name__)


async def _guarded(awaitable: Awaitable[Any]) -> object:
    try:
        return await awaitable
    except BaseException as error:  # noqa: BLE001 - see _Raised; and a timeout outranks whatever it led to
        return _Raised(error)


def _result(result: object, signals: RunSignals, timeout_s: float | None) -> object:
    if signals.timed_out:
        raise JobFailure.transient(policy.REASON_TIMEOUT, f"timed out after {timeout_s:g} s")
    if isinstance(result, _Raised):
        raise result.error
    return result


def _plan(job: Job, result: object) -> JobPlan:
    if result is None:
        return Done()
    if not isinstance(result, JobPlan):
        raise TypeError(f"the handler of {job.kind!r} returned {type(result).__name__}; return Done, Defer or None")
    return result
