"""Dispatcher: from a claimed row to its handler's plan."""

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

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


_DONE = Done()

_LAST_WORD_S = 5.0
"""How long a program that is interrupted waits until its claim is given back."""


class Dispatcher:
    """Finds the handler of a job, hands it the parsed payload, and returns what it plans."""

    def __init__(
        self,
        registry: HandlerRegistry,
        jobs: JobRepository,
        delegates: QueueDelegates,
        clock: Clock,
        *,
        storage: SerialThread,
    ) -> None:
        self._threads = Threads("tinycortex-handler")
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
        if registration.is_async:
            returned = await self._await(cast("Awaitable[Any]", handler(context, payload)), signals, spec.timeout_s)
        else:
            returned = await self._call(lambda: handler(context, payload), job, signals, spec.timeout_s)
            if inspect.isawaitable(returned) and not signals.timed_out:  # a partial or an object around an async def
                returned = await self._await(returned, signals, spec.timeout_s)
        return self._result(job, signals, returned)

    def conclude(self, job: Job, signals: RunSignals, returned: object) -> Result | None:
        """Return how a run ended whose handler's thread has ended after its task; None when it had only begun."""
        if inspect.isawaitable(returned) and not signals.timed_out:
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
            return _DONE
        if not isinstance(returned, JobPlan):
            what = type(returned).__name__
            return TypeError(f"the handler of {job.kind!r} returned {what}; return Done, Defer or None")
        return returned

    async def _await(self, awaitable: Awaitable[Any], signals: RunSignals, timeout_s: float | None) -> object:
        """Await a handler in this very task, which therefore cannot end before it."""
        stopper = _Stopper(signals, timeout_s)
        try:
            returned = await awaitable
        except asyncio.CancelledError as error:
            if stopper.is_cancelled_by_others():
                raise
            returned = _Raised(error)
        except KeyboardInterrupt as error:
            if threading.current_thread() is threading.main_thread():
                self._give_way(signals)
                raise
            returned = _Raised(error)
        except BaseException as error:
            if isinstance(error, GeneratorExit) and stopper.loop.is_closed():
                raise  # this very task is being collected
            returned = _Raised(error)
        finally:
            stopper.end()
        if stopper.is_cancelled_by_others():  # and the handler has kept it to itself
            raise asyncio.CancelledError
        return returned

    def _give_way(self, signals: RunSignals) -> None:
        """End a run where Ctrl-C has struck the handler's own code: its loop may never turn again."""
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
        return thread.result()

    def _note_timeout(self, job: Job, timeout_s: float | None) -> None:
        message = f"timed out after {timeout_s:g} s, and its thread is still running"
        logger.warning("job %s (%s) %s", job.id, job.kind, message)
        try:
            self._jobs.note_error(job, message)
        except StorageError as error:
            logger.warning("job %s: the timeout could not be noted: %s", job.id, type(error).__name__)


class _Stopper:
    """Cancels the running task for its handler's sake: past the kind's time, or on request."""

    def __init__(self, signals: RunSignals, timeout_s: float | None) -> None:
        self.loop = asyncio.get_running_loop()
        self._task = cast("asyncio.Task[object]", asyncio.current_task())
        self._signals = signals
        self._stops = 0
        self._has_ended = False
        self._timer = None if timeout_s is None else self.loop.call_later(timeout_s, self._time_out)
        signals.stop_with(self._stop_soon)

    def is_cancelled_by_others(self) -> bool:
        """Tell whether the task itself is to end."""
        return self._task.cancelling() > self._stops

    def end(self) -> None:
        """Stop no more, and take back what was asked of the task."""
        self._has_ended = True
        self._signals.note_end()
        if self._timer is not None:
            self._timer.cancel()
        while self._stops:
            self._stops -= 1
            self._task.uncancel()

    def _time_out(self) -> None:
        self._signals.timed_out = True
        self._stop()

    def _stop_soon(self) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if not self._has_ended:
            self._stops += 1
            self._task.cancel()


def _close(awaitable: object) -> None:
    if inspect.iscoroutine(awaitable):
        awaitable.close()
