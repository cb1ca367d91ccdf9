"""The worker: several jobs at a time on one event loop, until told to stop (spec: Worker loop)."""

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any

from tinycortex.config import WorkerSettings
from tinycortex.domain.clock import Clock
from tinycortex.errors import InvalidInputError, StorageError, TinycortexError
from tinycortex.handlers.registry import HandlerRegistry
from tinycortex.worker.heartbeat import Heartbeat
from tinycortex.worker.results import Claim, Ended
from tinycortex.worker.step import WorkerStep
from tinycortex.worker.upkeep import SHORTEST_PAUSE_S, Chore, Faults, Upkeep
from tinycortex.worker.wakeup import Wakeup

_QUIET_S = 1.0
"""How long a worker that was told nothing trusts in that, once it has looked and found nothing."""

_CLEAN_UP_S = 5.0
"""How long handlers that were cancelled may take to end."""


def check_concurrency(concurrency: int) -> int:
    """Return ``concurrency``, or raise :class:`InvalidInputError` when it is no number of jobs at a time."""
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise InvalidInputError(f"concurrency is a number of jobs at a time, at least 1, not {concurrency!r}")
    return concurrency


class Worker:
    """Runs jobs until told to stop, with the queue's upkeep beside them.

    Storage faults pause it (contract §3), at its start too; a damaged database ends it, and so does the
    end of its upkeep or of its heartbeat: a worker never looks healthy while something inside it is dead.

    Args:
        step: claims, performs, settles.
        registry: the kinds that this process can run.
        heartbeat: renews leases.
        wakeup: tells of new jobs.
        upkeep: the chores beside the jobs.
        tick: the scheduler's chore, which a run may leave to others.
        bootstrap: start-up housekeeping, done once before the first claim.
        settings: pauses, grace.
        clock: the queue's clock.
    """

    def __init__(
        self,
        step: WorkerStep,
        *,
        registry: HandlerRegistry,
        heartbeat: Heartbeat,
        wakeup: Wakeup,
        upkeep: Upkeep,
        tick: Chore,
        bootstrap: Callable[[], object],
        settings: WorkerSettings,
        clock: Clock,
    ) -> None:
        self.step = step
        self.registry = registry
        self.heartbeat = heartbeat
        self.wakeup = wakeup
        self.upkeep = upkeep
        self.tick = tick
        self.bootstrap = bootstrap
        self.settings = settings
        self.clock = clock

    async def run(
        self,
        stop: asyncio.Event,
        *,
        concurrency: int | None = None,
        kinds: Collection[str] | None = None,
        scheduler: bool = True,
    ) -> None:
        """Work until ``stop`` is set: then claim no more, and wait ``worker.shutdown_grace_s`` for what runs.

        Asynchronous handlers that still run then, or when this task is cancelled, are cancelled and their
        rows given back, attempts too. A thread cannot be stopped: its row is settled when it ends.

        Args:
            stop: set to stop; one that is set already lets nothing begin.
            concurrency: jobs at a time; ``worker.concurrency`` when None.
            kinds: the kinds to work on; all that are registered when None.
            scheduler: whether to tick, too; leases are recovered in any case.

        Raises:
            InvalidInputError: ``concurrency`` is no number above zero.
            UnknownKindError: one of ``kinds`` has no handler here.
            StorageCorruptError: the database is damaged.
            Exception: whatever ended the upkeep.
        """
        most = self.settings.concurrency if concurrency is None else check_concurrency(concurrency)
        wanted = self.registry.check_kinds(kinds)
        if not stop.is_set():
            await _Run(self, stop, most, wanted, chores=(self.tick,) if scheduler else ()).run()


class _Run:
    """One run of a worker, on one event loop."""

    def __init__(
        self,
        worker: Worker,
        stop: asyncio.Event,
        concurrency: int,
        kinds: Collection[str] | None,
        *,
        chores: Collection[Chore],
    ) -> None:
        self._worker = worker
        self._step = worker.step
        self._chores = chores
        self._stop = stop
        self._free = concurrency
        self._kinds = kinds
        self._faults = Faults(worker.settings, worker.step.emitter)
        self._idle_s = max(worker.settings.idle_ms / 1000, SHORTEST_PAUSE_S)
        self._quiet = False
        self._over = False
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._ended: list[Ended] = []
        self._stopping = self._help(stop.wait())
        self._upkeep = self._help(self._keep_up())

    def _help(self, coroutine: Coroutine[Any, Any, object]) -> "asyncio.Task[object]":
        task = asyncio.create_task(coroutine)
        task.add_done_callback(lambda _task: self._changed.set())
        return task

    async def _keep_up(self) -> None:
        await self._worker.upkeep.do_until_done(self._worker.bootstrap, self._faults)
        self._ready.set()
        self._changed.set()
        await self._worker.upkeep.run(self._faults, *self._chores)

    async def run(self) -> None:
        """Serve, wait for what runs, and leave nothing behind."""
        loop = asyncio.get_running_loop()
        self._step.turns.join()
        try:
            with self._worker.wakeup.listen(lambda: loop.call_soon_threadsafe(self._changed.set)):
                while not self._stop.is_set():
                    await self._serve_once()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._worker.settings.shutdown_grace_s):
                    while self._running or self._ended:
                        await self._finish_once()
        finally:
            await self._end()

    async def _serve_once(self) -> None:
        """Settle what has ended, and claim as many jobs as there is room for; or wait for a reason to."""
        self._changed.clear()
        try:
            self._check()
            if await self._take_turn():
                return
            if self._ready.is_set() and self._free > 0:
                await self._wait_for_jobs()
            else:
                await self._wait(self._idle_s)
        except StorageError as error:
            await asyncio.wait({self._stopping, self._upkeep}, timeout=self._faults.pause_after(error))

    async def _take_turn(self) -> bool:
        """Tell whether there is more to do at once."""
        ended, self._ended = self._ended, []
        want = self._free if self._ready.is_set() and (ended or not self._quiet) else 0
        if not (ended or want or self._step.turns.is_keeping):
            return False
        claims, fault = await self._step.take(ended, want, self._kinds)
        for claim in claims:
            self._start(claim)
        if claims:
            await asyncio.sleep(0)  # those that end at once then share the next turn with what has ended meanwhile
        if fault is not None:
            raise fault
        return bool(claims or self._ended)

    async def _finish_once(self) -> None:
        """Settle what has ended, or wait for the end of what runs."""
        self._changed.clear()
        ended, self._ended = self._ended, []
        if not ended:
            await self._changed.wait()
        elif (fault := (await self._step.take(ended, 0)).fault) is not None:
            self._faults.pause_after(fault)  # what is kept is tried again at the end

    def _start(self, claim: Claim) -> None:
        self._running.add(self._step.start(claim, self._note_end, self._forget))
        self._free -= 1

    def _note_end(self, ended: Ended) -> None:
        if self._over:
            self._step.turns.end(ended)
            return
        self._free += 1
        self._ended.append(ended)
        self._changed.set()

    def _forget(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        self._changed.set()

    def _check(self) -> None:
        """Raise what ended something that the worker cannot do without."""
        if self._upkeep.done():
            self._upkeep.result()
        if not self._worker.heartbeat.is_healthy():
            raise TinycortexError(
                "the heartbeat's thread has ended, so that no lease is renewed; start the worker anew"
            )

    async def _wait_for_jobs(self) -> None:
        due_at_ms = await self._step.turns.find_next_due(self._kinds)
        left_s = math.inf if due_at_ms is None else (due_at_ms - self._worker.clock.now_ms()) / 1000
        with self._worker.wakeup.idle():
            trusts = self._quiet and self._worker.wakeup.is_live
            pause_s = max(self._idle_s, _QUIET_S) if trusts else self._idle_s
            woken = await self._wait(min(max(left_s, 0.001), pause_s))
        # A claim that finds nothing takes the write lock for it; while nothing happens, looking is enough.
        self._quiet = not woken and left_s > self._idle_s and not self._step.turns.is_keeping

    async def _wait(self, timeout_s: float) -> bool:
        # Not wait_for: before Python 3.12 it loses a cancellation that comes a moment after what it waits for.
        try:
            async with asyncio.timeout(timeout_s):
                return await self._changed.wait()
        except TimeoutError:
            return False

    async def _end(self) -> None:
        self._over = True
        self._step.turns.end(*self._ended)
        tasks = {self._stopping, self._upkeep, *self._running}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_CLEAN_UP_S)
        # What was given back is written when this worker is seen to have ended.
        await self._step.turns.leave()
