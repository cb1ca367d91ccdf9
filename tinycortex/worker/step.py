"""One step of a worker: claim a row, perform its handler, settle (spec: Worker loop)."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from tinycortex.config import QueueSettings, WorkerSettings
from tinycortex.db import Database
from tinycortex.domain import policy
from tinycortex.domain.clock import Clock
from tinycortex.domain.failures import describe_error, find_failure, iter_causes
from tinycortex.domain.jobs import Job
from tinycortex.domain.kinds import KindSpec
from tinycortex.domain.outcomes import Defer
from tinycortex.errors import InvalidInputError, StorageBusyError, StorageCorruptError, StorageError
from tinycortex.handlers.context import RunSignals
from tinycortex.handlers.registry import HandlerRegistry
from tinycortex.repositories.jobs import JobRepository
from tinycortex.services.dispatcher import Dispatcher, Result
from tinycortex.services.gate import LlmGate, Permit
from tinycortex.services.portal import LoopThread
from tinycortex.services.settlement import Settlement
from tinycortex.telemetry.emitter import Emitter, handler_took
from tinycortex.threads import SerialThread
from tinycortex.worker.backoff import pause_ms
from tinycortex.worker.heartbeat import Heartbeat
from tinycortex.worker.identity import WorkerIdentity

_MOST_KEPT = 8
"""Results that wait for the database before a worker claims no more: each was work, and takes memory."""


@dataclass(slots=True, eq=False)
class Claim:
    """A leased row, the permit its handler runs under when its kind is LLM-bound, and what the handler is told.

    Attributes:
        begun: whether somebody has taken it on, and will end it.
        handler_ms: how long its handler ran, of the monotonic clock; None before its end.
    """

    job: Job
    permit: Permit | None
    signals: RunSignals = field(default_factory=RunSignals)
    begun: bool = False
    handler_ms: float | None = None

    def release_permit(self) -> None:
        """Give the permit back, if there is one."""
        if self.permit is not None:
            self.permit.release()


@dataclass(frozen=True, slots=True)
class _Kept:
    """How a claim ended, None for one that is given back unused, until the database can take it."""

    claim: Claim
    result: Result | None
    again_at: float  # monotonic seconds


class WorkerStep:
    """Claim, perform, settle: every loop drives these three, and nothing else touches a claim.

    Claims and settlements are made by one thread. What it was told to do it does, so a task that is
    cancelled, however often and at whatever moment, leaves no claim behind that nobody ends.
    """

    def __init__(
        self,
        *,
        database: Database,
        jobs: JobRepository,
        registry: HandlerRegistry,
        dispatcher: Dispatcher,
        settlement: Settlement,
        gate: LlmGate,
        portal: LoopThread,
        storage: SerialThread,
        heartbeat: Heartbeat,
        identity: WorkerIdentity,
        queue: QueueSettings,
        worker: WorkerSettings,
        clock: Clock,
    ) -> None:
        self._database = database
        self._jobs = jobs
        self._registry = registry
        self._dispatcher = dispatcher
        self._settlement = settlement
        self._gate = gate
        self._portal = portal
        self._storage = storage
        self._heartbeat = heartbeat
        self._identity = identity
        self._queue = queue
        self._worker = worker
        self._clock = clock
        self._kept: deque[_Kept] = deque()
        self._loops: list[asyncio.AbstractEventLoop] = []

    @property
    def emitter(self) -> Emitter:
        """Return what tells the events of the queue."""
        return self._jobs.emitter

    @property
    def worker_id(self) -> str:
        """Return the word that this process's claims carry in ``locked_by``."""
        return self._identity.current()

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
            claim = await self.claim(kinds)
            if claim is None:
                return False
            await self.carry_out(claim)
        except asyncio.CancelledError:
            # The program may end right after, and what is given back is to be written before.
            with suppress(asyncio.CancelledError):
                await self._storage.call(_nothing)
            raise
        return True

    # Claim

    async def claim(self, kinds: Collection[str] | None = None) -> Claim | None:
        """Lease the next due row of ``kinds``, or of all that are registered; None when there is none.

        Raises:
            StorageError: nothing was claimed.
        """
        claiming = self._storage.submit(self._claim, asyncio.get_running_loop(), kinds)
        try:
            return await asyncio.shield(asyncio.wrap_future(claiming))
        except BaseException:
            claiming.add_done_callback(self._give_back_claimed)  # at once, when it is there already
            raise

    def _claim(self, loop: asyncio.AbstractEventLoop, kinds: Collection[str] | None) -> Claim | None:
        # The permit comes first: with none free, LLM-bound kinds are left out and the others go on.
        self.settle_kept()
        self._database.presence.announce(self.worker_id)
        permit = self._gate.try_acquire()
        try:
            specs = self._list_specs(kinds, llm_bound=permit is not None)
            job = self._jobs.claim_next(self._queue.lease_ms, kinds=specs, worker_id=self.worker_id)
        except BaseException:
            if permit is not None:
                permit.release()
            raise
        if permit is not None and (job is None or not self._registry.get(job.kind).spec.llm_bound):
            permit.release()
            permit = None
        if job is None:
            return None
        claim = Claim(job, permit)
        claim.signals.live_on(loop, partial(self._let_go, claim))
        self._heartbeat.watch(job, claim.signals)
        return claim

    async def find_next_due(self, kinds: Collection[str] | None = None) -> int | None:
        """Return when the next row comes due that :meth:`claim` would take (ms, UTC); None when there is none."""
        specs = self._list_specs(kinds, llm_bound=self._gate.available > 0)
        return await self._storage.call(self._jobs.find_next_ready_at, [spec.kind for spec in specs])

    def _list_specs(self, kinds: Collection[str] | None, *, llm_bound: bool) -> list[KindSpec]:
        return [
            spec
            for spec in self._registry.list_specs()
            if (llm_bound or not spec.llm_bound) and (kinds is None or spec.kind in kinds)
        ]

    def _give_back_claimed(self, claiming: "Future[Claim | None]") -> None:
        if not claiming.cancelled() and claiming.exception() is None and (claim := claiming.result()) is not None:
            self.give_back_later(claim)

    # Perform

    def start(self, claim: Claim) -> "asyncio.Task[None]":
        """Carry out a claim in a task of its own."""
        task = asyncio.create_task(self.carry_out(claim), name=f"tinycortex {claim.job.id}")
        # A task that is cancelled before its first step never runs.
        task.add_done_callback(lambda _task: None if claim.begun else self.give_back_later(claim))
        return task

    async def carry_out(self, claim: Claim) -> None:
        """Run the handler of a claim and settle it.

        Raises:
            StorageError: the database could not write how the claim ended, which is then kept.
            asyncio.CancelledError: this task itself was cancelled. The claim is given back when its handler has
                ended, unless that runs in a thread, which nothing can stop: then it is settled.
        """
        claim.begun = True
        with self.emitter.tracer.handling(claim.job):
            await self._perform(claim)

    async def _perform(self, claim: Claim) -> None:
        began_at = time.perf_counter()
        try:
            result: Result = await self._dispatcher.dispatch(claim.job, claim.signals)
        except asyncio.CancelledError:  # of this task: what a handler raises is a value
            self._let_go(claim, began_at)
            raise
        except Exception as error:  # noqa: BLE001 - of the dispatch itself; the claim must end all the same
            result = error
        claim.handler_ms = _since(began_at)
        self._cool_down(claim, result)
        claim.release_permit()
        await self._storage.call(self.settle, claim, result)

    def _cool_down(self, claim: Claim, result: Result) -> None:
        """Close the gate for as long as the provider of an LLM-bound job asked for, before its permit is free."""
        if claim.permit is None:
            return
        failure = find_failure(result) if isinstance(result, BaseException) else None
        if failure is not None and failure.retry_after_s is not None:
            self._gate.close_for(failure.retry_after_s)
        elif isinstance(result, Defer) and result.cooldown:
            self._gate.close_for((result.until_ms - self._clock.now_ms()) / 1000)

    def _let_go(self, claim: Claim, began_at: float | None = None) -> None:
        """See to the end of a claim whose task is over; not before that of its handler, which may go on."""
        if not claim.signals.after_end(partial(self._settle_later, claim, began_at)):
            self.give_back_later(claim)

    def _settle_later(self, claim: Claim, began_at: float | None, returned: object) -> None:
        claim.handler_ms = None if began_at is None else _since(began_at)
        result = self._dispatcher.conclude(claim.job, claim.signals, returned)
        if result is None:
            self.give_back_later(claim)
        else:
            self._cool_down(claim, result)
            claim.release_permit()
            self._storage.submit(self._quietly, claim, partial(self.settle, claim, result))

    def give_back_later(self, claim: Claim) -> None:
        """Have a claim given back unused, attempt and all."""
        claim.begun = True
        claim.release_permit()
        self._storage.submit(self._quietly, claim, partial(self._give_back, claim))

    def _give_back(self, claim: Claim) -> None:
        if any(kept.claim is claim for kept in self._kept):
            self._heartbeat.drop(claim.job)  # it has ended, and its loop, which might have written it, too
        else:
            self._end(claim, None)

    def _quietly(self, claim: Claim, end: Callable[[], object]) -> None:
        """End a claim that nobody waits for. What cannot be written is kept, for as long as a loop may write it."""
        with suppress(StorageError):
            end()
        if not self._is_driven():
            self._heartbeat.drop(claim.job)

    def join(self) -> None:
        """Note that a loop drives this step, and will write what is kept; it ends with :meth:`leave`."""
        self._loops.append(asyncio.get_running_loop())

    def _is_driven(self) -> bool:
        return not all(loop.is_closed() for loop in self._loops)

    async def leave(self) -> None:
        """Return when all that storage was told to do is done, or kept with nobody to renew its lease."""
        self._loops.remove(asyncio.get_running_loop())
        await self._storage.call(self.leave_kept)

    async def retry_kept(self) -> None:
        """Write what is kept, as :meth:`claim` does, without claiming."""
        if self._kept:
            await self._storage.call(self.settle_kept)

    # Settle

    def settle(self, claim: Claim, result: Result) -> None:
        """End the claim; see :meth:`Settlement.settle`.

        A fault of this database that the handler met is not the job's fault: the row is put off, without
        its attempt, for as long as the fault calls for, and for longer each time that it comes back.

        Raises:
            StorageCorruptError: the handler met it.
            StorageError: the database could not write how the claim ended, which is then kept.
        """
        fault = self._find_fault(result) if isinstance(result, BaseException) else None
        if isinstance(fault, StorageCorruptError):
            self._end(claim, None)
            raise fault
        self._end(claim, result if fault is None else self._put_off(claim.job, fault))

    def _find_fault(self, error: BaseException) -> StorageError | None:
        if find_failure(error) is not None:
            return None  # the handler has decided what it means
        return next(filter(self._database.owns, iter_causes(error)), None)

    def _put_off(self, job: Job, fault: StorageError) -> Defer:
        now_ms = self._clock.now_ms()
        deferring_ms = now_ms - (now_ms if job.deferred_since_ms is None else job.deferred_since_ms)
        wait_ms = max(pause_ms(fault, self._worker), min(deferring_ms, policy.RETRY_CAP_MS))
        return Defer(until_ms=now_ms + wait_ms, reason=describe_error(fault))

    @property
    def is_keeping(self) -> bool:
        """Tell whether a result waits for the database."""
        return bool(self._kept)

    def settle_kept(self, *, at_once: bool = False) -> None:
        """Write the results that the database could not take before, as far as it can now.

        One that it goes on refusing for want of room holds up no other job, until there are several: it is
        tried again after a pause, or now when ``at_once`` is set.

        Raises:
            StorageError: the database cannot do its work, or refuses too many.
        """
        for _ in range(len(self._kept)):
            try:
                kept = self._kept.popleft()
            except IndexError:  # asked this way, since another thread may take the last one first
                return
            if not at_once and time.monotonic() < kept.again_at:
                self._kept.append(kept)
                continue
            try:
                self._end(kept.claim, kept.result, again=True)
            except (StorageBusyError, StorageCorruptError):
                raise
            except StorageError:
                if len(self._kept) >= _MOST_KEPT:
                    raise

    def leave_kept(self) -> None:
        """Try once more to write what is kept; renew its leases no longer, as nobody may come to write it."""
        with suppress(StorageError):
            self.settle_kept(at_once=True)
        if self._is_driven():
            return
        for kept in self._kept:
            self._heartbeat.drop(kept.claim.job)

    def _end(self, claim: Claim, result: Result | None, *, again: bool = False) -> None:
        """Write how a claim ended, None for one that is given back unused; keep what cannot be written."""
        renewed_at = self._heartbeat.drop(claim.job)
        try:
            if result is None:
                self._jobs.release(claim.job)
            else:
                with handler_took(claim.handler_ms):
                    self._settlement.settle(claim.job, result)
        except StorageError as error:
            self._heartbeat.watch(claim.job, claim.signals, renewed_at)
            wait_s = pause_ms(error, self._worker) / 1000 if again and not isinstance(error, StorageBusyError) else 0.0
            self._kept.append(_Kept(claim, result, time.monotonic() + wait_s))
            raise


def _since(began_at: float) -> float:
    return (time.perf_counter() - began_at) * 1000


def _nothing() -> None:
    """Be called when all that was asked for before is done."""
