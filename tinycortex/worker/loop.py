"""The loops that drive the step: until idle, or until told to stop."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from tinycortex.config import SchedulerSettings, WorkerSettings
from tinycortex.domain.redact import scrub_for_log
from tinycortex.errors import StorageCorruptError, StorageError
from tinycortex.worker.backoff import pause_ms
from tinycortex.worker.step import WorkerStep

logger = logging.getLogger(__name__)


class WorkerLoop:
    """Runs one job after another until told to stop, with the scheduler's tick between them.

    Storage faults pause it (contract §3); a damaged database ends it.

    Args:
        step: what to drive.
        bootstrap: start-up housekeeping, called once before the first step.
        tick: the scheduler's tick, called every ``scheduler.tick_s`` seconds.
        worker: pauses.
        scheduler: the tick's period.
    """

    def __init__(
        self,
        step: WorkerStep,
        *,
        bootstrap: Callable[[], object],
        tick: Callable[[], object],
        worker: WorkerSettings,
        scheduler: SchedulerSettings,
    ) -> None:
        self._step = step
        self._bootstrap = bootstrap
        self._tick = tick
        self._worker = worker
        self._scheduler = scheduler

    def run_sync(self, stop: threading.Event) -> None:
        """Run in this thread until ``stop`` is set; a handler that is running then is waited for."""
        self._bootstrap()
        next_tick = time.monotonic()
        while not stop.is_set():
            try:
                if time.monotonic() >= next_tick:
                    self._tick()
                    next_tick = time.monotonic() + self._scheduler.tick_s
                pause = 0 if self._step.run_once() else self._worker.idle_ms
            except StorageError as error:
                pause = self._pause_after(error)
            stop.wait(pause / 1000)

    async def run(self, stop: asyncio.Event) -> None:
        """Run on the running loop until ``stop`` is set; storage is used in threads only."""
        await asyncio.to_thread(self._bootstrap)
        next_tick = time.monotonic()
        while not stop.is_set():
            try:
                if time.monotonic() >= next_tick:
                    await asyncio.to_thread(self._tick)
                    next_tick = time.monotonic() + self._scheduler.tick_s
                pause = 0 if await self._step.run_once_async() else self._worker.idle_ms
            except StorageError as error:
                pause = self._pause_after(error)
            if pause:
                try:
                    await asyncio.wait_for(stop.wait(), pause / 1000)
                except TimeoutError:
                    continue

    def _pause_after(self, error: StorageError) -> int:
        if isinstance(error, StorageCorruptError):
            raise error
        pause = pause_ms(error, self._worker)
        logger.warning("%s; trying again in %d ms", scrub_for_log(str(error)), pause)
        return pause
