"""The LLM gate: a fair counting semaphore that threads and coroutines share (spec: LLM concurrency)."""

import asyncio
import math
import os
import threading
import time
from collections import deque
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from tinycortex.domain import policy


class Permit:
    """One slot of a gate, given back by :meth:`release`, at the end of ``with`` or ``async with``, or when dropped."""

    def __init__(self, gate: "LlmGate") -> None:
        self._gate: LlmGate | None = gate
        self._process = os.getpid()

    def release(self) -> None:
        """Give the slot back; a second call does nothing."""
        gate, self._gate = self._gate, None
        if gate is not None and self._process == os.getpid():  # a forked child has a gate of its own
            gate._give_back()  # noqa: SLF001 - a permit is the gate's other half

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


class LlmGate:
    """Lets at most ``permits`` LLM-bound handlers run at a time in one process.

    Waiters are served in the order of their arrival, threads and coroutines alike. One that gives up,
    or is cancelled at the very moment it is served, loses no permit.

    Args:
        permits: how many; zero is read as one, so that the gate can never stop the only worker.
    """

    def __init__(self, permits: int = policy.DEFAULT_LLM_PERMITS) -> None:
        self.permits = max(permits, 1)
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._process = os.getpid()
        self._free = self.permits
        self._closed_until = 0.0  # monotonic seconds: a wall clock that is set neither opens nor shuts the gate
        self._waiters: deque[Future[None]] = deque()
        # Reentrant: a dropped permit may be collected, and so given back, while this thread holds the lock.
        self._lock = threading.RLock()

    @property
    def available(self) -> int:
        """Return how many permits are free now; none while the gate is closed."""
        self._leave_parent()
        return 0 if self.closed_for_s > 0 else self._free

    @property
    def closed_for_s(self) -> float:
        """Return how long the gate stays closed (s); 0 when it is open."""
        self._leave_parent()
        return max(self._closed_until - time.monotonic(), 0.0)

    def close_for(self, seconds: float) -> None:
        """Hand out no permit for so long, as a provider asks that limits its callers; permits that are out stay so.

        A gate that is closed for longer already stays closed for that long.
        """
        self._leave_parent()
        with self._lock:
            self._closed_until = max(self._closed_until, time.monotonic() + seconds)

    def _leave_parent(self) -> None:
        if self._process != os.getpid():
            self._start_afresh()  # its permits, its waiters, and perhaps a held lock stay with the parent

    def try_acquire(self) -> Permit | None:
        """Take a permit, or return None at once when none is free, or the gate is closed."""
        self._leave_parent()
        with self._lock:
            if self.available == 0:
                return None
            self._free -= 1
        return Permit(self)

    def acquire(self, timeout_s: float | None = None) -> Permit:
        """Take a permit, blocking this thread until one is free and the gate is open.

        Raises:
            TimeoutError: none was to be had within ``timeout_s`` seconds.
        """
        give_up = math.inf if timeout_s is None else time.monotonic() + timeout_s
        waiter = self._join()
        try:
            waiter.result(timeout_s)
            while (left_s := self._wait_until(give_up)) > 0:
                time.sleep(left_s)
        except BaseException:
            self._leave(waiter)
            raise
        return Permit(self)

    async def acquire_async(self) -> Permit:
        """Take a permit, waiting without blocking the event loop."""
        waiter = self._join()
        try:
            await asyncio.wrap_future(waiter)
            while (left_s := self.closed_for_s) > 0:  # noqa: ASYNC110 - nothing but time opens it
                await asyncio.sleep(left_s)
        except BaseException:
            self._leave(waiter)
            raise
        return Permit(self)

    def _wait_until(self, give_up: float) -> float:
        left_s = self.closed_for_s
        if left_s > 0 and time.monotonic() + left_s > give_up:
            raise TimeoutError(f"the gate is closed for {left_s:.1f} s more")
        return left_s

    def _join(self) -> Future[None]:
        self._leave_parent()
        waiter: Future[None] = Future()
        with self._lock:
            if self._free > 0:
                self._free -= 1
                waiter.set_result(None)
            else:
                self._waiters.append(waiter)
        return waiter

    def _leave(self, waiter: Future[None]) -> None:
        if not waiter.cancel():  # served already, so the permit is this waiter's to pass on
            self._give_back()

    def _give_back(self) -> None:
        with self._lock:
            while self._waiters:
                waiter = self._waiters.popleft()
                if waiter.set_running_or_notify_cancel():
                    waiter.set_result(None)
                    return
            self._free += 1
