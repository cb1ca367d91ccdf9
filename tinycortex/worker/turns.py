"""Turns: what a worker has the database do, one transaction after another."""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from sqlalchemy.orm import Session

from tinycortex.config import QueueSettings, WorkerSettings
from tinycortex.db import Database
from tinycortex.domain import policy
from tinycortex.domain.clock import Clock
from tinycortex.domain.failures import describe_error, find_failure, iter_causes
from tinycortex.domain.jobs import Job
from tinycortex.domain.kinds import KindSpec
from tinycortex.domain.outcomes import Defer, JobPlan
from tinycortex.errors import StorageBusyError, StorageCorruptError, StorageError
from tinycortex.group_commit import Batch, GroupCommit, Write
from tinycortex.handlers.context import RunSignals
from tinycortex.handlers.registry import HandlerRegistry
from tinycortex.repositories.jobs import JobRepository
from tinycortex.services.dispatcher import Result
from tinycortex.services.gate import LlmGate, Permit
from tinycortex.services.settlement import Settlement
from tinycortex.telemetry.emitter import handler_took
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
        renewed_at: when its lease was renewed, once nobody looks after it any more (monotonic seconds).
        context: where its end is written, and told; the worker's when None.
        note_written: called when its end is written, or kept.
    """

    job: Job
    permit: Permit | None
    signals: RunSignals = field(default_factory=RunSignals)
    begun: bool = False
    handler_ms: float | None = None
    renewed_at: float | None = None
    context: Context | None = None
    note_written: Callable[[], object] | None = None

    def release_permit(self) -> None:
        """Give the permit back, if there is one."""
        if self.permit is not None:
            self.permit.release()


class Ended(NamedTuple):
    """How a claim ended; None for one that is given back unused."""

    claim: Claim
    result: Result | None

    @property
    def has_writes(self) -> bool:
        """Tell whether the handler hands over writes of its own, which may take long and may fail."""
        return isinstance(self.result, JobPlan) and self.result.writes is not None


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What the database could not take yet."""

    ended: Ended
    again_at: float  # monotonic seconds


class Turn(NamedTuple):
    """What has come of a turn.

    Attributes:
        claims: rows that are leased to the caller now.
        fault: the gravest of what the database could not do; the results that it did not take are kept.
    """

    claims: list[Claim]
    fault: StorageError | None

    def get_claims(self) -> list[Claim]:
        """Return the claims, or raise the fault."""
        if self.fault is not None:
            raise self.fault
        return self.claims


class Turns:
    """Settles what has ended and claims what comes next, both in one transaction, in the thread of the storage.

    What it was told to do it does, so a task that is cancelled, however often and at whatever moment,
    leaves no claim behind that nobody ends.
    """

    def __init__(
        self,
        *,
        database: Database,
        jobs: JobRepository,
        registry: HandlerRegistry,
        settlement: Settlement,
        gate: LlmGate,
        storage: GroupCommit,
        heartbeat: Heartbeat,
        identity: WorkerIdentity,
        queue: QueueSettings,
        worker: WorkerSettings,
        clock: Clock,
    ) -> None:
        self._database = database
        self._jobs = jobs
        self._registry = registry
        self._settlement = settlement
        self._gate = gate
        self._storage = storage
        self._heartbeat = heartbeat
        self._identity = identity
        self._queue = queue
        self._worker = worker
        self._clock = clock
        self._kept: list[_Kept] = []
        self._loops: list[asyncio.AbstractEventLoop] = []

    @property
    def worker_id(self) -> str:
        """Return the word that this process's claims carry in ``locked_by``."""
        return self._identity.current()

    async def take(
        self,
        ended: Sequence[Ended],
        want: int,
        kinds: Collection[str] | None = None,
        *,
        let_go: Callable[[Claim], object],
    ) -> Turn:
        """Settle ``ended`` and lease up to ``want`` of the next due rows of ``kinds``, or of all registered.

        Args:
            ended: what the handlers planned or raised.
            want: claims to make; fewer, when fewer rows are due or too many results are kept.
            kinds: the kinds to claim.
            let_go: sees to a claim whose loop was closed over it, or whose taker is gone.

        Raises:
            asyncio.CancelledError: what was asked for is done all the same, and the claims are given back.
        """
        loop = asyncio.get_running_loop()
        taking = self._storage.submit_batch(self._take(ended, want, kinds, loop=loop, let_go=let_go))
        try:
            return await asyncio.shield(asyncio.wrap_future(taking))
        except BaseException:
            taking.add_done_callback(self._give_back_taken)  # at once, when it is there already
            raise

    def give_back(self, claim: Claim) -> None:
        """Have a claim given back unused, attempt and all."""
        claim.begun = True
        self.end(Ended(claim, None))

    def end(self, *all_ended: Ended) -> None:
        """Have claims settled that no task waits for."""
        for ended in all_ended:
            ended.claim.release_permit()
            self._storage.submit_batch(self._end(ended))

    async def find_next_due(self, kinds: Collection[str] | None = None) -> int | None:
        """Return when the next row comes due that a turn would claim (ms, UTC); None when there is none."""
        specs = self._list_specs(kinds, llm_bound=self._gate.available > 0)
        return await self._storage.call(self._jobs.find_next_ready_at, [spec.kind for spec in specs])

    async def flush(self) -> None:
        """Return when all that was asked for before is done."""
        await self._storage.call(int)

    # Loops

    def join(self) -> None:
        """Note that the running loop takes turns, and will write what is kept; it ends with :meth:`leave`."""
        self._loops.append(asyncio.get_running_loop())

    async def leave(self) -> None:
        """Return when all that was asked for is done, or kept with nobody to renew its lease."""
        self._loops.remove(asyncio.get_running_loop())
        await asyncio.shield(asyncio.wrap_future(self.leave_kept()))

    def leave_kept(self) -> "Future[None]":
        """Try once more to write what is kept; renew its leases no longer, as nobody may come to write it."""
        self._storage.submit(int)  # no part of the group before it, whose failures are to be kept by then
        return self._storage.submit_batch(self._leave_kept())

    @property
    def is_keeping(self) -> bool:
        """Tell whether a result waits for the database."""
        return bool(self._kept)

    def _is_driven(self) -> bool:
        return not all(loop.is_closed() for loop in self._loops)

    # Batches, in the thread of the storage

    def _take(
        self,
        ended: Sequence[Ended],
        want: int,
        kinds: Collection[str] | None,
        *,
        loop: asyncio.AbstractEventLoop,
        let_go: Callable[[Claim], object],
    ) -> Batch[Turn]:
        again = self._due_again(at_once=False)
        permits: list[Permit] = []
        claiming: list[Write] = []
        if want > 0 and len(self._kept) + len(again) < _MOST_KEPT:
            self._database.presence.announce(self.worker_id)
            permits = self._acquire_permits(want)
            specs = self._list_specs(kinds, llm_bound=bool(permits))
            if specs:
                claiming = [Write(partial(self._claim, want, len(permits), specs))]
        try:
            outcomes = yield [*self._writes_of(again), *self._writes_of(ended), *claiming]
            faults = self._note(again, outcomes[: len(again)], again=True)
            faults += self._note(ended, outcomes[len(again) : len(again) + len(ended)])
            jobs = outcomes[-1] if claiming else []
            if isinstance(jobs, BaseException):
                if not isinstance(jobs, StorageError):
                    raise jobs
                faults.append(jobs)
                jobs = []
            claims = [self._claim_of(job, permits, loop, let_go) for job in jobs]
        finally:
            for permit in permits:
                permit.release()
        return Turn(claims, max(faults, key=self._gravity, default=None))

    def _end(self, ended: Ended) -> Batch[None]:
        claim, result = ended
        if result is None and any(kept.ended.claim is claim for kept in self._kept):
            self._heartbeat.drop(claim.job)  # it has ended, and its loop, which might have written it, too
            return
        self._note([ended], (yield self._writes_of([ended])))
        if not self._is_driven():
            self._heartbeat.drop(claim.job)

    def _leave_kept(self) -> Batch[None]:
        again = self._due_again(at_once=True)
        self._note(again, (yield self._writes_of(again)), again=True)
        if not self._is_driven():
            for kept in self._kept:
                self._heartbeat.drop(kept.ended.claim.job)

    def _give_back_taken(self, taking: "Future[Turn]") -> None:
        if not taking.cancelled() and taking.exception() is None:
            for claim in taking.result().claims:
                self.give_back(claim)

    # Claim

    def _acquire_permits(self, want: int) -> list[Permit]:
        # They come first: with none free, LLM-bound kinds are left out and the others go on.
        permits: list[Permit] = []
        while len(permits) < want and (permit := self._gate.try_acquire()) is not None:
            permits.append(permit)
        return permits

    def _list_specs(self, kinds: Collection[str] | None, *, llm_bound: bool) -> list[KindSpec]:
        return [
            spec
            for spec in self._registry.list_specs()
            if (llm_bound or not spec.llm_bound) and (kinds is None or spec.kind in kinds)
        ]

    def _claim(self, want: int, permits: int, specs: list[KindSpec], session: Session | None) -> list[Job]:
        return self._jobs.claim_many(
            want,
            self._queue.lease_ms,
            kinds=specs,
            llm_limit=permits,
            worker_id=self.worker_id,
            session=session,
        )

    def _claim_of(
        self,
        job: Job,
        permits: list[Permit],
        loop: asyncio.AbstractEventLoop,
        let_go: Callable[[Claim], object],
    ) -> Claim:
        claim = Claim(job, permits.pop() if self._registry.get(job.kind).spec.llm_bound else None)
        claim.signals.live_on(loop, partial(let_go, claim))
        self._heartbeat.watch(job, claim.signals)
        return claim

    # Settle

    def _writes_of(self, all_ended: Sequence[Ended]) -> list[Write]:
        for claim, _result in all_ended:
            renewed_at = self._heartbeat.drop(claim.job)
            claim.renewed_at = claim.renewed_at if renewed_at is None else renewed_at
        return [Write(partial(self._write, ended), ended.has_writes, ended.claim.context) for ended in all_ended]

    def _write(self, ended: Ended, session: Session | None) -> None:
        """Write how a claim ended.

        A fault of this database that the handler met is not the job's fault: the row is put off, without
        its attempt, for as long as the fault calls for, and for longer each time that it comes back.
        """
        claim, result = ended
        fault = self._find_fault(result)
        if result is None or isinstance(fault, StorageCorruptError):
            self._jobs.release(claim.job, session=session)
            return
        with handler_took(claim.handler_ms):
            plan = result if fault is None else self._put_off(claim.job, fault)
            self._settlement.settle(claim.job, plan, session=session)

    def _find_fault(self, result: Result | None) -> StorageError | None:
        if not isinstance(result, BaseException) or find_failure(result) is not None:
            return None  # or the handler has decided what it means
        return next(filter(self._database.owns, iter_causes(result)), None)

    def _put_off(self, job: Job, fault: StorageError) -> Defer:
        now_ms = self._clock.now_ms()
        deferring_ms = now_ms - (now_ms if job.deferred_since_ms is None else job.deferred_since_ms)
        wait_ms = max(pause_ms(fault, self._worker), min(deferring_ms, policy.RETRY_CAP_MS))
        return Defer(until_ms=now_ms + wait_ms, reason=describe_error(fault))

    def _note(
        self, all_ended: Sequence[Ended], outcomes: Sequence[object], *, again: bool = False
    ) -> list[StorageError]:
        """Keep what could not be written; return the faults that the worker has to heed.

        One result that the database goes on refusing for want of room is tried again after a pause, and
        holds up no other job, until there are several.
        """
        faults: list[StorageError] = []
        for ended, error in zip(all_ended, outcomes, strict=True):
            claim, result = ended
            if claim.note_written is not None:
                claim.note_written()
            fault = self._find_fault(result)
            if isinstance(fault, StorageCorruptError):
                faults.append(fault)  # the handler met it
            if not isinstance(error, StorageError):
                if isinstance(error, BaseException):
                    raise error
                continue
            self._heartbeat.watch(claim.job, claim.signals, claim.renewed_at)
            lasting = again and not isinstance(error, StorageBusyError)
            wait_s = pause_ms(error, self._worker) / 1000 if lasting else 0.0
            self._kept.append(_Kept(ended, time.monotonic() + wait_s))
            if not lasting or isinstance(error, StorageCorruptError) or len(self._kept) >= _MOST_KEPT:
                faults.append(error)
        return faults

    def _due_again(self, *, at_once: bool) -> list[Ended]:
        now = time.monotonic()
        due = [kept for kept in self._kept if at_once or kept.again_at <= now]
        self._kept = [kept for kept in self._kept if not (at_once or kept.again_at <= now)]
        return [kept.ended for kept in due]

    def _gravity(self, fault: StorageError) -> float:
        return math.inf if isinstance(fault, StorageCorruptError) else pause_ms(fault, self._worker)
