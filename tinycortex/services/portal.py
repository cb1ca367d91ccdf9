"""LoopThread: lets plain code run coroutines, whatever thread it is in and whatever loops run there."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, wait
from typing import Any, TypeVar

from tinycortex.errors import ConfigurationError, InvalidInputError

T = TypeVar("T")

_CLEAN_UP_S = 5.0

_LOOK_UP_S = 0.5
"""How long a waiting caller may miss a Ctrl-C."""


class LoopThread:
    """One event loop in a thread of its own, started by its first use and shared by all callers.

    Asynchronous handlers called from plain code thus all see one loop, as clients that they keep need.
    A Ctrl-C reaches the waiting caller, never the handler.
    """

    def __init__(self) -> None:
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` to its end and return its result; interrupted, cancel it and let it clean up.

        Raises:
            InvalidInputError: called on the loop itself, which would wait for itself for ever.
            ConfigurationError: the loop was closed meanwhile.
        """
        if self._process != os.getpid():
            self._start_afresh()  # a thread does not cross a fork; its loop would wait for ever
        if self._thread is threading.current_thread():
            coroutine.close()
            raise InvalidInputError(
                "an asynchronous handler would wait here for the very loop that it stops; "
                "await asyncio.to_thread(...) around the call, or use its asynchronous form"
            )
        ended = threading.Event()

        async def tracked() -> T:
            try:
                return await coroutine
            finally:
                ended.set()

        future: Future[T] | None = None
        try:
            with self._lock:  # so that a close comes before it or after it, never between
                future = asyncio.run_coroutine_threadsafe(tracked(), self._running_loop())
            # A signal that comes in the moment before a wait begins is not seen until the wait ends.
            while not wait({future}, timeout=_LOOK_UP_S).done:
                pass
            return future.result()
        except CancelledError:
            coroutine.close()  # of a task that was cancelled before its first step
            raise ConfigurationError("the queue was closed while this call was running") from None
        except BaseException:
            if future is not None and future.cancel():
                ended.wait(_CLEAN_UP_S)
            raise

    def close(self) -> None:
        """Cancel what runs, stop the loop and its thread; a later use starts new ones."""
        if self._process != os.getpid():
            return
        if self._thread is threading.current_thread():
            raise InvalidInputError("a handler cannot close the queue that it runs on")
        with self._lock:
            loop, thread, closing = self._loop, self._thread, self._closing
            self._loop, self._thread, self._closing = None, None, threading.Event()
        if loop is not None and thread is not None:
            closing.set()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_serve, args=(self._loop, self._closing), name="tinycortex-loop", daemon=True
            )
            self._thread.start()
        return self._loop


def _serve(loop: asyncio.AbstractEventLoop, closing: threading.Event) -> None:
    asyncio.set_event_loop(loop)
    try:
        while not closing.is_set():  # a handler that stops its loop stops nobody else
            loop.run_forever()
    finally:
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=_CLEAN_UP_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
