"""One step of a worker: claim a row, perform its handler, settle (spec: Worker loop)."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any

from tinycortex.db import Database
from tinycortex.domain.clock import Clock
from tinycortex.domain.cooldown import cooldown_ms
from tinycortex.errors import InvalidInputError
from tinycortex.group_commit import GroupCommit
from tinycortex.services.dispatcher import Dispatcher, Result
from tinycortex.services.gate import LlmGate
from tinycortex.services.portal import LoopThread
from tinycortex.telemetry.emitter import Emitter
from tinycortex.telemetry.tracing import NO_TRACER
from tinycortex.worker.results import Claim, Ended
from tinycortex.worker.turns import Turn, Turns


class WorkerStep:
    """Claim, perform, settle: every loop drives these, and nothing else touches a claim."""

    def __init__(
        self,
        *,
        database: Database,
        dispatcher: Dispatcher,
        turns: Turns,
        gate: LlmGate,
        portal: LoopThread,
        storage: GroupCommit,
        emitter: Emitter,
        clock: Clock,
    ) -> None:
        self._database = database
        self._dispatcher = dispatcher
        self.turns = turns
        self._gate = gate
        self._portal = portal
        self._storage = storage
        self.emitter = emitter
        self._clock = clock

    def run_once(self, kinds: Collection[str] | None = None) -> bool:
        """Claim one job, run its handler, settle; False when nothing was claimable.

        Raises:
            InvalidInputError: called where it would wait for its own caller for ever.
            StorageError: the database could not do its work. A result that could not be written is kept,
                its lease renewed, and written by a later step.
        """
        self._database.refuse_inside_transaction()
        if self._storage.is_current():
            raise InvalidInputError("a subscriber cannot run jobs: it is called by the very thread that claims them")
        return self._portal.run(self.run_once_async(kinds))

    async def run_once_async(self, kinds: Collection[str] | None = None) -> bool:
        """Do as :meth:`run_once` on the running loop."""
        try:
            claims, fault = await self.take([], 1, kinds)
            for claim in claims:  # whatever a result met that was kept before
                settled = await self.take(await self._carry_out(claim), 0)
                fault = settled.fault or fault
        except asyncio.CancelledError:
            # The program may end right after, and what is given back is to be written before.
            with suppress(asyncio.CancelledError):
                await self.turns.flush()
            raise
        if fault is not None:
            raise fault
        return bool(claims)

    async def _carry_out(self, claim: Claim) -> list[Ended]:
        ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        task = self.start(claim, ended.set_result, lambda _task: None)
        try:
            either: set[asyncio.Future[Any]] = {task, ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            ended.add_done_callback(lambda ended: self.turns.end(ended.result()))
            task.cancel()
            await asyncio.wait({task})
            raise
        return [ended.result()] if ended.done() else []

    async def take(self, ended: Sequence[Ended], want: int, kinds: Collection[str] | None = None) -> Turn:
        """Settle what has ended, and claim; see :meth:`Turns.take`."""
        return await self.turns.take(ended, want, kinds, let_go=self._let_go)

    def start(
        self, claim: Claim, end: Callable[[Ended], object], forget: Callable[["asyncio.Task[None]"], object]
    ) -> "asyncio.Task[None]":
        """Run the handler of a claim in a task of its own, which calls ``end`` with what came of it.

        When the task is cancelled, ``end`` is not called: the claim is given back, not before its handler has
        ended. One that runs in a thread, which nothing can stop, is settled when the thread ends. ``forget`` is
        called with the task when it is over.
        """

        def note_end(task: "asyncio.Task[None]") -> None:
            if not claim.begun:  # a task that is cancelled before its first step never runs
                self.turns.give_back(claim)
            forget(task)

        task = asyncio.create_task(self._perform(claim, end))
        task.add_done_callback(note_end)
        return task

    async def _perform(self, claim: Claim, end: Callable[[Ended], object]) -> None:
        claim.begun = True
        began_at = time.perf_counter()
        tracer = self.emitter.tracer
        with tracer.handling(claim.job):
            try:
                result: Result = await self._dispatcher.dispatch(claim.job, claim.signals)
            except asyncio.CancelledError:  # of this task: what a handler raises is a value
                self._let_go(claim, began_at)
                raise
            except Exception as error:  # noqa: BLE001 - of the dispatch itself; the claim must end all the same
                result = error
            self._note_end(claim, result, began_at)
            written = _trace_end(claim) if tracer is not NO_TRACER else None
            end(Ended(claim, result))
            if written is not None:
                await written.wait()

    def _note_end(self, claim: Claim, result: Result, began_at: float | None) -> None:
        claim.handler_ms = None if began_at is None else (time.perf_counter() - began_at) * 1000
        if claim.permit is not None:
            self._cool_down(result)
            claim.release_permit()

    def _cool_down(self, result: Result) -> None:
        """Close the gate for as long as the provider of an LLM-bound job asked for, before its permit is free."""
        self._gate.close_for(cooldown_ms(result, self._clock.now_ms()) / 1000)

    def _let_go(self, claim: Claim, began_at: float | None = None) -> None:
        """See to the end of a claim whose task is over; not before that of its thread, which goes on."""
        if not claim.signals.after_thread(partial(self._conclude, claim, began_at)):
            self.turns.give_back(claim)

    def _conclude(self, claim: Claim, began_at: float | None, returned: object) -> None:
        result = self._dispatcher.conclude(claim.job, claim.signals, returned)
        if result is None:
            self.turns.give_back(claim)
        else:
            self._note_end(claim, result, began_at)
            self.turns.end(Ended(claim, result))


def _trace_end(claim: Claim) -> asyncio.Event:
    """Have the end of a run written and told inside its trace; return what tells when that is done."""
    loop, written = asyncio.get_running_loop(), asyncio.Event()

    def note() -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(written.set)

    claim.context, claim.note_written = copy_context(), note
    return written
