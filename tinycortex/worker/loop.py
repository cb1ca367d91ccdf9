"""Runs the worker, or its scheduler alone, from plain code, which needs no event loop of its own."""

import asyncio
import threading
from typing import Unpack

from tinycortex.config import WorkerSettings
from tinycortex.services.portal import LoopThread
from tinycortex.telemetry import Emitter
from tinycortex.worker.aio import Worker
from tinycortex.worker.options import RunOptions
from tinycortex.worker.upkeep import Faults, Upkeep

_LOOK_EVERY_S = 0.1


class SyncWorker:
    """The worker on the queue's own loop, while the calling thread waits."""

    def __init__(self, worker: Worker, portal: LoopThread) -> None:
        self._worker = worker
        self._portal = portal

    def run(self, stop: threading.Event, **options: Unpack[RunOptions]) -> None:
        """Work until ``stop`` is set, or until interrupted; see :meth:`Worker.run`."""
        self._portal.run(self._run(stop, options))

    async def _run(self, stop: threading.Event, options: RunOptions) -> None:
        stopping = _ThreadEvent(stop)
        watching = asyncio.create_task(stopping.watch())
        try:
            await self._worker.run(stopping, **options)
        finally:
            watching.cancel()


class SyncUpkeep:
    """Chores alone, without a worker, while the calling thread waits.

    Storage faults are waited out as by a worker; any other error ends it.
    """

    def __init__(self, upkeep: Upkeep, portal: LoopThread, settings: WorkerSettings, emitter: Emitter) -> None:
        self._upkeep = upkeep
        self._portal = portal
        self._settings = settings
        self._emitter = emitter

    def run(self, stop: threading.Event) -> None:
        """Do the chores, each when its time has come, until ``stop`` is set, or until interrupted.

        Raises:
            StorageCorruptError: the database is damaged.
            Exception: whatever else a chore met.
        """
        if not stop.is_set():
            self._portal.run(self._run(stop))

    async def _run(self, stop: threading.Event) -> None:
        stopping = asyncio.create_task(_ThreadEvent(stop).watch())
        upkeep = asyncio.create_task(self._upkeep.run(Faults(self._settings, self._emitter)))
        try:
            await asyncio.wait({stopping, upkeep}, return_when=asyncio.FIRST_COMPLETED)
            if upkeep.done():
                upkeep.result()
        finally:
            stopping.cancel()
            upkeep.cancel()


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
