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


class _Run(Enum):
    NONE = auto()
    ON_LOOP = auto()
    IN_THREAD = auto()
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
        self._run = _Run.NONE
        self._returned: object = None
        self._after_end: Callable[[object], object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._let_go: Callable[[], object] | None = None

    def request_cancel(self) -> None:
        """Tell the handler to stop; an asynchronous one is cancelled at its next await."""
        with self._lock:
            first, self.cancel_requested = not self.cancel_requested, True
            if first and self._stop is not None:
                self._stop()

    def stop_with(self, stop: Callable[[], object] | None) -> None:
        """Set what stops the handler when a cancel is requested, or has been already."""
        with self._lock:
            self._stop = stop
            if stop is not None and self.cancel_requested:
                stop()

    # The handler's end, for a worker that can no longer await it

    def begin(self, *, in_thread: bool) -> None:
        """Note that the handler runs: in a thread, which nothing can stop, or on the loop."""
        self._run = _Run.IN_THREAD if in_thread else _Run.ON_LOOP

    def end(self, returned: object) -> None:
        """Note that it has ended, and do what waited for that."""
        with self._lock:
            self._run, self._returned = _Run.ENDED, returned
            waiting, self._after_end = self._after_end, None
        if waiting is not None:
            waiting(returned)

    def take(self) -> None:
        """Note that what it returned has been taken."""
        with self._lock:
            self._run, self._returned = _Run.NONE, None

    def after_end(self, callback: Callable[[object], object]) -> bool:
        """Have ``callback`` called with what the handler returned, at its end; False when none runs."""
        with self._lock:
            run, returned = self._run, self._returned
            if run is _Run.ON_LOOP and self._loop is not None and self._loop.is_closed():
                return False  # it never goes on
            if run in (_Run.ON_LOOP, _Run.IN_THREAD):
                self._after_end = callback
        if run is _Run.ENDED:
            callback(returned)
        return run is not _Run.NONE

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
