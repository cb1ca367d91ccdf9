"""The loops that drive the step: until idle, or until told to stop."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tinycortex.config import SchedulerSettings, WorkerSettings
from tinycortex.domain.redact import scrub_for_log
from tinycortex.errors import StorageCorruptError, StorageError
from tinycortex.worker.backoff import pause_ms
from tinycortex.worker.step import WorkerStep

logger = logging.getLogger(__name__)

_TELL_EVERY_S = 60.0
"""A fault that lasts is told this often, not each time it is met."""


class WorkerLoop:
    """Runs one job after another until told to stop, with the queue's upkeep between them.

    Storage faults pause it (contract §3), at its start too; a damaged database ends it, and so does any
    error of the upkeep that is no storage fault: a worker never goes on without its scheduler.

    Args:
        step: what to drive.
        bootstrap: start-up housekeeping, called once before the first step.
        tick: the scheduler's tick, called every ``scheduler.tick_s`` seconds.
        recover: frees what dead workers held, called every ``worker.recover_ms``.
        worker: pauses.
        scheduler: the tick's period.
    """

    def __init__(
        self,
        step: WorkerStep,
        *,
        bootstrap: Callable[[], object],
        tick: Callable[[], object],
        recover: Callable[[], object],
        worker: WorkerSettings,
        scheduler: SchedulerSettings,
    ) -> None:
        self._step = step
        self._bootstrap = bootstrap
        self._tick = tick
        self._recover = recover
        self._worker = worker
        self._scheduler = scheduler

    def run_sync(self, stop: threading.Event) -> None:
        """Run in this thread until ``stop`` is set; a handler that is running then is waited for."""
        upkeep, faults = self._upkeep(), _Faults(self._worker)
        while not stop.is_set():
            try:
                upkeep.do_due()
                pause = 0 if self._step.run_once() else self._worker.idle_ms
            except StorageError as error:
                pause = faults.pause_after(error)
            stop.wait(pause / 1000)

    async def run(self, stop: asyncio.Event) -> None:
        """Run on the running loop until ``stop`` is set; storage is used in threads only."""
        upkeep, faults = self._upkeep(), _Faults(self._worker)
        while not stop.is_set():
            try:
                if upkeep.is_due():
                    await asyncio.to_thread(upkeep.do_due)
                pause = 0 if await self._step.run_once_async() else self._worker.idle_ms
            except StorageError as error:
                pause = faults.pause_after(error)
            if pause:
                try:
                    await asyncio.wait_for(stop.wait(), pause / 1000)
                except TimeoutError:
                    continue

    def _upkeep(self) -> "_Upkeep":
        return _Upkeep(
            _Chore(self._bootstrap, math.inf),
            _Chore(self._tick, self._scheduler.tick_s),
            _Chore(self._recover, self._worker.recover_ms / 1000),
        )


@dataclass(slots=True)
class _Chore:
    do: Callable[[], object]
    every_s: float
    due_at: float = -math.inf  # monotonic seconds


class _Upkeep:
    """What one run of the loop does beside its jobs. A chore that fails stays due."""

    def __init__(self, *chores: _Chore) -> None:
        self._chores = chores

    def is_due(self) -> bool:
        """Tell whether there is anything to do."""
        now = time.monotonic()
        return any(chore.due_at <= now for chore in self._chores)

    def do_due(self) -> None:
        """Do each chore whose time has come."""
        for chore in self._chores:
            if chore.due_at <= time.monotonic():
                chore.do()
                chore.due_at = time.monotonic() + chore.every_s


class _Faults:
    """The storage faults that one run of the loop waits out."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._tell_again_at: dict[type[StorageError], float] = {}

    def pause_after(self, error: StorageError) -> int:
        """Return the pause (ms) that ``error`` calls for; raise it when waiting cannot help."""
        if isinstance(error, StorageCorruptError):
            raise error
        pause = pause_ms(error, self._settings)
        now = time.monotonic()
        if now >= self._tell_again_at.get(type(error), now):
            self._tell_again_at[type(error)] = now + _TELL_EVERY_S
            logger.warning("%s; trying again every %d ms", scrub_for_log(str(error)), pause)
        return pause
