"""Dispatcher: from a claimed row to its handler's plan."""

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
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


Result = JobPlan | BaseException
"""What a handler planned, or what it raised."""


@dataclass(frozen=True, slots=True)
class _Raised:
    """What a handler raised, as a value.

    Some errors cannot cross a task or a thread as themselves: SystemExit and KeyboardInterrupt end the
    event loop they pass through, and a future that is given StopIteration never completes.
    """

    error: BaseException


_LAST_WORD_S = 5.0
"""How long a program that is interrupted waits until its claim is given back."""

_CUT_SHORT = _Raised(asyncio.CancelledError())
"""What became of an asynchronous handler whose worker could not wait for it."""


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

    async def dispatch(self, job: Job, signals: RunSignals) -> Result:
        """Run the handler of ``job``: an ``async def`` on this loop, a plain ``def`` in a thread.

        Past the kind's ``timeout_s`` an asynchronous handler is cancelled. A thread cannot be: the timeout
        is noted on the row, and the run ends, as a failed attempt all the same, when the thread does.

        Returns:
            What the handler planned or raised; a :class:`JobFailure` when its payload is malformed
            (unrecoverable: it will never read differently) or it timed out (transient); a TypeError when
            it returned something that is no plan.

        Raises:
            asyncio.CancelledError: this task itself was cancelled; see :meth:`conclude`.
        """
        registration = self._registry.get(job.kind)
        spec, handler = registration.spec, registration.handler
        try:
            payload = parse_payload(spec.payload, job.payload_json)
        except PayloadError as error:
            failure = JobFailure.unrecoverable(policy.REASON_MALFORMED_PAYLOAD, str(error))
            failure.__cause__ = error
            return failure
        context = JobContext(job=job, delegates=self._delegates, clock=self._clock, signals=signals)
        if inspect.iscoroutinefunction(handler):
            returned = await self._await(handler(context, payload), signals, spec.timeout_s)
        else:
            returned = await self._call(lambda: handler(context, payload), job, signals, spec.timeout_s)
            if inspect.isawaitable(returned) and not signals.timed_out:  # a partial or an object around an async def
                returned = await self._await(returned, signals, spec.timeout_s)
        return self._result(job, signals, returned)

    def conclude(self, job: Job, signals: RunSignals, returned: object) -> Result | None:
        """Return how a run ended that its own task could not await; None when it had only begun, or was cut short."""
        if not signals.timed_out and (returned is _CUT_SHORT or inspect.isawaitable(returned)):
            _close(returned)
            return None
        return self._result(job, signals, returned)

    def _result(self, job: Job, signals: RunSignals, returned: object) -> Result:
        if signals.timed_out:
            _close(returned)
            timeout_s = self._registry.get(job.kind).spec.timeout_s
            return JobFailure.transient(policy.REASON_TIMEOUT, f"timed out after {timeout_s:g} s")
        if isinstance(returned, _Raised):
            return returned.error
        if returned is None:
            return Done()
        if not isinstance(returned, JobPlan):
            what = type(returned).__name__
            return TypeError(f"the handler of {job.kind!r} returned {what}; return Done, Defer or None")
        return returned

    async def _await(self, awaitable: Awaitable[Any], signals: RunSignals, timeout_s: float | None) -> object:
        def note_end(_task: object) -> None:
            _close(awaitable)  # of a task that was cancelled before its first step
            signals.end(_CUT_SHORT)

        signals.begin(in_thread=False)
        task = asyncio.ensure_future(self._guarded(awaitable, signals))
        task.add_done_callback(note_end)
        loop = asyncio.get_running_loop()
        signals.stop_with(lambda: None if loop.is_closed() else loop.call_soon_threadsafe(task.cancel))
        try:
            done, _pending = await asyncio.wait({task}, timeout=timeout_s)
            if not done:
                signals.timed_out = True
        finally:
            signals.stop_with(None)
            if not task.done():  # timed out, or this worker is being stopped
                task.cancel()
                await asyncio.wait({task})
        signals.take()
        return _CUT_SHORT if task.cancelled() else task.result()

    async def _guarded(self, awaitable: Awaitable[Any], signals: RunSignals) -> object:
        try:
            return await awaitable
        except BaseException as error:  # see _Raised; and a timeout outranks whatever it led to
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                self._give_way(signals)
                raise
            return _Raised(error)

    def _give_way(self, signals: RunSignals) -> None:
        """End a run where Ctrl-C has struck the handler's own code: its loop may never turn again."""
        signals.end(_CUT_SHORT)
        signals.let_go()
        with suppress(TimeoutError):  # the program may end right after
            self._storage.submit(int).result(_LAST_WORD_S)

    async def _call(self, call: Callable[[], object], job: Job, signals: RunSignals, timeout_s: float | None) -> object:
        def run() -> object:
            returned: object = None
            try:
                returned = call()
            except BaseException as error:  # noqa: BLE001 - see _Raised
                returned = _Raised(error)
            finally:
                signals.end(returned)
            return returned

        signals.begin(in_thread=True)
        thread = asyncio.wrap_future(self._threads.submit(run))
        done, _pending = await asyncio.wait({thread}, timeout=timeout_s)
        if not done:
            signals.timed_out = True
            await self._storage.call(self._note_timeout, job, timeout_s)
            await asyncio.wait({thread})
        signals.take()
        return thread.result()

    def _note_timeout(self, job: Job, timeout_s: float | None) -> None:
        message = f"timed out after {timeout_s:g} s, and its thread is still running"
        logger.warning("job %s (%s) %s", job.id, job.kind, message)
        try:
            self._jobs.note_error(job, message)
        except StorageError as error:
            logger.warning("job %s: the timeout could not be noted: %s", job.id, type(error).__name__)


def _close(awaitable: object) -> None:
    if inspect.iscoroutine(awaitable):
        awaitable.close()
