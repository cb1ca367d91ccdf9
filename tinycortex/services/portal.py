"""LoopThread: lets plain code run coroutines, whatever thread it is in and whatever loops run there."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_CLEAN_UP_S = 5.0


class LoopThread:
    """One event loop in a thread of its own, started by its first use and shared by all callers.

    Asynchronous handlers called from plain code thus all see one loop, as clients that they keep need.
    A Ctrl-C reaches the waiting caller, never the handler.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = 0

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` to its end and return its result; interrupted, cancel it and let it clean up."""
        ended = threading.Event()

        async def tracked() -> T:
            try:
                return await coroutine
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(tracked(), self._running_loop())
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                ended.wait(_CLEAN_UP_S)
            raise

    def close(self) -> None:
        """Stop the loop and its thread; a later use starts new ones."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None and self._process == os.getpid():
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            # A thread does not cross a fork; its loop would wait for ever.
            if self._loop is None or self._process != os.getpid():
                self._loop, self._process = asyncio.new_event_loop(), os.getpid()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name="tinycortex-loop", daemon=True)
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
