"""Runs the worker from plain code, which needs no event loop of its own."""

import asyncio
import threading
from collections.abc import Collection

from tinycortex.services.portal import LoopThread
from tinycortex.worker.aio import Worker

_LOOK_EVERY_S = 0.1


class SyncWorker:
    """The worker on the queue's own loop, while the calling thread waits."""

    def __init__(self, worker: Worker, portal: LoopThread) -> None:
        self._worker = worker
        self._portal = portal

    def run(self, stop: threading.Event, *, concurrency: int, kinds: Collection[str] | None = None) -> None:
        """Work until ``stop`` is set, or until interrupted; see :meth:`Worker.run`."""
        if not stop.is_set():
            self._portal.run(self._run(stop, concurrency, kinds))

    async def _run(self, stop: threading.Event, concurrency: int, kinds: Collection[str] | None) -> None:
        stopping = _ThreadEvent(stop)
        watching = asyncio.create_task(stopping.watch())
        try:
            await self._worker.run(stopping, concurrency=concurrency, kinds=kinds)
        finally:
            watching.cancel()


class _ThreadEvent(asyncio.Event):
    """A thread's event, as a loop sees it: at once when it is asked, and soon when it is waited for."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self._event = event

    def is_set(self) -> bool:
        return self._event.is_set()

    async def watch(self) -> None:
        # It cannot be awaited, and a thread that waits for it would cost more than looking.
        while not self._event.is_set():  # noqa: ASYNC110 - see above
            await asyncio.sleep(_LOOK_EVERY_S)
        self.set()
