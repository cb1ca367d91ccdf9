"""Threads of the package's own, for calls that would block an event loop.

A loop's default executor would do worse: it is shared with the whole program, so that a call waits for a
thread; it refuses work once the main thread has ended; and its calls are lost when their task is cancelled.
All threads here are daemons, start with their first call, and begin anew in a forked child.
"""

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context, copy_context
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_IDLE_S = 10.0
"""How long a spare thread waits for its next call before it ends."""


class Waiting:
    """Something to be done in its caller's context.

    Attributes:
        future: of what comes of it.
        context: its caller's.
    """

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self.context: Context = copy_context()


class Call(Waiting):
    """The call of a function."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self._function = function
        self._arguments = arguments

    def make(self) -> None:
        """Make the call, and hand what it returned or raised to whoever waits."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.context.run(self._function, *self._arguments)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class Caller(ABC):
    """Makes calls in threads of its own."""

    @abstractmethod
    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Have ``function`` called; return the future of its result."""

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Await the call. A cancellation ends the waiting only."""
        return await result_of(self.submit(function, *arguments))


async def result_of(call: "Future[T]") -> T:
    """Await what a thread returns or raises. A cancellation ends the waiting only, and never the call."""
    # A shield around asyncio's own wrapper would do, for one turn of the loop more.
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def note(_call: object) -> None:
        with suppress(RuntimeError):  # the loop was closed, and nobody waits any more
            loop.call_soon_threadsafe(_set, ended)

    call.add_done_callback(note)
    await ended
    try:
        return call.result()
    finally:
        del call  # else what it raised would hold this frame, and this frame it


def _set(ended: "asyncio.Future[None]") -> None:
    if not ended.done():  # it may have been cancelled
        ended.set_result(None)


class SerialThread(Caller):
    """One thread that makes calls in the order in which they come.

    A call that was handed over is made, whatever becomes of the task that waits for it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._calls: SimpleQueue[Waiting | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Have ``function`` called; return the future of its result."""
        call = Call(function, arguments)
        self._put(call)
        return call.future

    def _put(self, call: Waiting) -> None:
        if self._process != os.getpid():
            self._start_afresh()  # the thread is the parent's, and perhaps a held lock
        with self._lock:
            if self._thread is None:
                self._thread = _start(self._name, self._serve, self._calls)
            self._calls.put(call)

    def _serve(self, calls: SimpleQueue[Waiting | None]) -> None:
        while isinstance(call := calls.get(), Call):
            call.make()
            del call  # what it returned may be large

    def is_current(self) -> bool:
        """Tell whether the running code is a call of this thread, which would wait for itself."""
        return self._thread is threading.current_thread()

    def close(self) -> None:
        """Make the calls that wait, and end the thread; a later call starts another one."""
        if self._process != os.getpid():
            return
        with self._lock:
            thread, self._thread = self._thread, None
            calls, self._calls = self._calls, SimpleQueue()
        if thread is not None:
            calls.put(None)
            thread.join()


class Threads(Caller):
    """As many threads as there are calls at a time; a spare one is used again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._spare: list[SimpleQueue[Call]] = []

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Have ``function`` called at once; return the future of its result."""
        if self._process != os.getpid():
            self._start_afresh()
        call = Call(function, arguments)
        with self._lock:
            calls = self._spare.pop() if self._spare else None
        if calls is not None:
            calls.put(call)
        else:
            calls = SimpleQueue()
            calls.put(call)
            _start(self._name, self._serve, calls)
        return call.future

    def _serve(self, calls: SimpleQueue[Call]) -> None:
        while True:
            try:
                call = calls.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if calls in self._spare:
                        self._spare.remove(calls)
                        return
                continue  # taken just now: its call is coming
            call.make()
            del call  # what it returned may be large
            with self._lock:
                self._spare.append(calls)


def _start(name: str, serve: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=serve, args=arguments, name=name, daemon=True)
    thread.start()
    return thread
