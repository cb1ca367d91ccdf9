"""What a worker does beside its jobs, and the storage faults that it waits out."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from tinycortex.config import WorkerSettings
from tinycortex.domain.redact import scrub_for_log
from tinycortex.errors import StorageCorruptError, StorageError
from tinycortex.telemetry import Emitter, WorkerPaused
from tinycortex.threads import SerialThread
from tinycortex.worker.backoff import pause_ms

logger = logging.getLogger(__name__)

SHORTEST_PAUSE_S = 0.005
"""Whatever the settings say: a worker that has nothing to do does not spin."""

_TELL_EVERY_S = 60.0
"""A fault that lasts is told this often, not each time it is met."""


class Faults:
    """The storage faults that one run of a worker waits out (contract §3)."""

    def __init__(self, settings: WorkerSettings, emitter: Emitter) -> None:
        self._settings = settings
        self._emitter = emitter
        self._tell_again_at: dict[type[StorageError], float] = {}

    def pause_after(self, error: StorageError) -> float:
        """Return the pause (s) that ``error`` calls for; raise it when waiting cannot help."""
        if isinstance(error, StorageCorruptError):
            raise error
        pause = pause_ms(error, self._settings)
        now = time.monotonic()
        if now >= self._tell_again_at.get(type(error), now):
            self._tell_again_at[type(error)] = now + _TELL_EVERY_S
            logger.warning("%s; trying again every %d ms", scrub_for_log(str(error)), pause)
        self._emitter.emit(WorkerPaused(error=type(error).__name__, pause_ms=pause))
        return pause / 1000


@dataclass(frozen=True, slots=True)
class Chore:
    """Something to be done every ``every_s`` seconds, of the monotonic clock."""

    do: Callable[[], object]
    every_s: float


class Upkeep:
    """Does the chores of a worker in a thread of their own, each when its time has come.

    A chore that a storage fault stops stays due; any other error ends the upkeep, and the worker with it.
    """

    def __init__(self, thread: SerialThread, *chores: Chore) -> None:
        self._thread = thread
        self._chores = chores

    async def do_until_done(self, do: Callable[[], object], faults: Faults) -> None:
        """Do one thing, waiting out the storage faults that stop it."""
        while True:
            try:
                await self._thread.call(do)
            except StorageError as error:
                await asyncio.sleep(faults.pause_after(error))
            else:
                return

    async def run(self, faults: Faults, *more: Chore) -> None:
        """Do the chores, and ``more`` before them, for ever, all of them at the start."""
        chores = (*more, *self._chores)
        due_at = [time.monotonic()] * len(chores)
        while chores:
            pause_s = 0.0
            for number, chore in enumerate(chores):
                if due_at[number] <= time.monotonic():
                    try:
                        await self._thread.call(chore.do)
                    except StorageError as error:
                        pause_s = max(pause_s, faults.pause_after(error))
                    else:
                        due_at[number] = time.monotonic() + chore.every_s
            await asyncio.sleep(max(pause_s, min(due_at) - time.monotonic(), SHORTEST_PAUSE_S))
