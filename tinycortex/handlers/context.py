"""What a handler is given beside its payload."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from tinycortex.delegates import QueueDelegates
from tinycortex.domain.clock import Clock
from tinycortex.domain.jobs import Job
from tinycortex.errors import LeaseLostError


class _Thread(Enum):
    NONE = auto()
    RUNS = auto()
    ENDED = auto()


class RunSignals:
    """What the outside tells a running handler, and whether it still runs; written by one thread, read by any.

    Attributes:
        lease_lost: another worker may hold the job.
        cancel_requested: somebody asked the job to stop.
        timed_out: the handler has run longer than its kind may.
    """

    def __init__(self) -> None:
        self.lease_lost = False
        self.cancel_requested = False
        self.timed_out = False
        self._lock = threading.Lock()
        self._stop: Callable[[], object] | None = None
        self._thread = _Thread.NONE
        self._returned: object = None
        self._after_thread: Callable[[object], object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._let_go: Callable[[], object] | None = None

    def request_cancel(self) -> None:
        """Tell the handler to stop; an asynchronous one is cancelled at its next await."""
        with self._lock:
            first, self.cancel_requested = not self.cancel_requested, True
            if first and self._stop is not None:
                self._stop()

    def stop_with(self, stop: Callable[[], object]) -> None:
        """Set what stops the handler when a cancel is requested, or has been already."""
        with self._lock:
            self._stop = stop
            if self.cancel_requested:
                stop()

    def note_end(self) -> None:
        """Note that the handler has ended: there is nothing to stop."""
        with self._lock:
            self._stop = None

    # The end of a thread, which no cancellation can bring about

    def enter_thread(self) -> None:
        """Note that the handler runs in a thread."""
        self._thread = _Thread.RUNS

    def leave_thread(self, returned: object) -> None:
        """Note that the thread has ended, and do what waited for that."""
        with self._lock:
            self._thread, self._returned = _Thread.ENDED, returned
            waiting, self._after_thread = self._after_thread, None
        if waiting is not None:
            waiting(returned)

    def return_to_loop(self) -> None:
        """Note that the loop has taken what the thread returned."""
        with self._lock:
            self._thread, self._returned = _Thread.NONE, None

    def after_thread(self, callback: Callable[[object], object]) -> bool:
        """Have ``callback`` called with what the handler's thread returns; False when there is no thread."""
        with self._lock:
            state, returned = self._thread, self._returned
            if state is _Thread.RUNS:
                self._after_thread = callback
        if state is _Thread.ENDED:
            callback(returned)
        return state is not _Thread.NONE

    # The end of its loop

    def live_on(self, loop: asyncio.AbstractEventLoop, let_go: Callable[[], object]) -> None:
        """Note on which loop the claim is carried out, and what to call when that loop leaves it."""
        self._loop, self._let_go = loop, let_go

    def look_at_loop(self) -> None:
        """Let go of the claim when its loop was closed over it: no task of that loop will."""
        if self._loop is not None and self._loop.is_closed():
            self.let_go()

    def let_go(self) -> None:
        """Have the claim ended without its task; once, however often it is called."""
        with self._lock:
            let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()

    def note_written(self) -> None:
        """Note that the end of the claim is written: there is nothing to let go of."""
        with self._lock:
            self._let_go = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """One run of one job.

    Attributes:
        job: the claimed row.
        delegates: the heavy work of the built-in kinds.
        clock: the queue's clock.
        signals: what the outside tells this run; the properties below read it.
    """

    job: Job
    delegates: QueueDelegates
    clock: Clock
    signals: RunSignals = field(default_factory=RunSignals)

    @property
    def lease_lost(self) -> bool:
        """Tell whether another worker may hold the job; what this run plans will then not be written."""
        return self.signals.lease_lost

    @property
    def cancel_requested(self) -> bool:
        """Tell whether somebody asked the job to stop; it settles ``cancelled`` however this run ends."""
        return self.signals.cancel_requested

    @property
    def timed_out(self) -> bool:
        """Tell whether this run has taken longer than its kind may; it is a failed attempt already."""
        return self.signals.timed_out

    def raise_if_lease_lost(self) -> None:
        """Raise :class:`LeaseLostError` when the lease is lost; call it before each costly outside effect."""
        if self.signals.lease_lost:
            raise LeaseLostError(f"the lease of job {self.job.id} is lost; stop, another worker may be running it")
