"""Turns: what a worker has the database do, one transaction after another."""

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, TypeVar

from sqlalchemy.orm import Session

from tinycortex.config import QueueSettings, WorkerSettings
from tinycortex.db import Database
from tinycortex.domain.clock import Clock
from tinycortex.domain.jobs import Job
from tinycortex.domain.kinds import KindSpec
from tinycortex.errors import StorageBusyError, StorageError
from tinycortex.group_commit import Batch, GroupCommit, Write
from tinycortex.handlers.registry import HandlerRegistry
from tinycortex.repositories.jobs import JobRepository
from tinycortex.services.gate import LlmGate, Permit
from tinycortex.services.settlement import Settlement
from tinycortex.threads import result_of
from tinycortex.worker.heartbeat import Heartbeat
from tinycortex.worker.identity import WorkerIdentity
from tinycortex.worker.results import Claim, Ended, Results

T = TypeVar("T")


class Turn(NamedTuple):
    """What has come of a turn.

    Attributes:
        claims: rows that are leased to the caller now, beside a fault too.
        fault: the gravest of what the database could not do; the results that it did not take are kept.
    """

    claims: list[Claim]
    fault: StorageError | None


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
        self._results = Results(
            database=database, jobs=jobs, settlement=settlement, heartbeat=heartbeat, worker=worker, clock=clock
        )
        self._gate = gate
        self._storage = storage
        self._heartbeat = heartbeat
        self._identity = identity
        self._queue = queue
        self._process = os.getpid()
        self._loops: list[asyncio.AbstractEventLoop] = []
        self._in_doubt = False
        """Whether a claim may have been kept although the database's answer was lost."""

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
        taking = self._submit(self._take(ended, want, kinds, loop=loop, let_go=let_go))
        try:
            return await result_of(taking)
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
            self._submit(self._end(ended))

    async def find_next_due(self, kinds: Collection[str] | None = None) -> int | None:
        """Return when a turn would next find a row to claim, or a gate open again (ms, UTC); None when never."""
        return await self._storage.call(self._find_next_due, kinds)

    async def flush(self) -> None:
        """Return when all that was asked for before is done."""
        await self._storage.call(int)

    # Loops

    def join(self) -> None:
        """Note that the running loop takes turns, and will write what is kept; it ends with :meth:`leave`."""
        self._start_afresh_in_a_child()
        self._loops.append(asyncio.get_running_loop())

    async def leave(self) -> None:
        """Return when all that was asked for is done, or kept with nobody to renew its lease."""
        self._loops.remove(asyncio.get_running_loop())
        await result_of(self.leave_kept())

    def leave_kept(self) -> "Future[None]":
        """Try once more to write what is kept; renew its leases no longer, as nobody may come to write it."""
        self._storage.submit(int)  # no part of the group before it, whose failures are to be kept by then
        return self._submit(self._leave_kept())

    @property
    def is_keeping(self) -> bool:
        """Tell whether a result waits for the database."""
        return self._results.is_keeping

    def _is_driven(self) -> bool:
        return not all(loop.is_closed() for loop in self._loops)

    def _start_afresh_in_a_child(self) -> None:
        if self._process != os.getpid():  # what is kept is the parent's to write, and the loops are its own
            self._process = os.getpid()
            self._loops = []
            self._results.forget()

    # Batches, in the thread of the storage

    def _submit(self, batch: Batch[T]) -> "Future[T]":
        self._start_afresh_in_a_child()
        return self._storage.submit_batch(batch)

    def _take(
        self,
        ended: Sequence[Ended],
        want: int,
        kinds: Collection[str] | None,
        *,
        loop: asyncio.AbstractEventLoop,
        let_go: Callable[[Claim], object],
    ) -> Batch[Turn]:
        was_full = self._results.is_full
        again, now = self._results.begin_again(at_once=False), self._results.begin(ended)
        permits: list[Permit] = []
        claiming: list[Write] = []
        if want > 0 and not was_full:
            self._database.presence.announce(self.worker_id)
            claim = partial(self._claim, want, kinds, permits)
            # What it locks for a shared permit must not be held while another's result waits for who waits for it.
            claiming = [Write(claim, closes=self._jobs.shared_gate.is_shared)]
        try:
            outcomes = yield [*again.writes, *now.writes, *claiming]
            settled = len(again.writes) + len(now.writes)
            faults = self._results.note(again, outcomes[: len(again.writes)])
            faults += self._results.note(now, outcomes[len(again.writes) : settled])
            jobs = outcomes[-1] if claiming else []
            if isinstance(jobs, BaseException):
                if not isinstance(jobs, StorageError):
                    raise jobs
                self._in_doubt = self._in_doubt or not isinstance(jobs, StorageBusyError)
                faults.append(jobs)
                jobs = []
            elif claiming:
                self._in_doubt = False
            claims = [self._claim_of(job, permits, loop, let_go) for job in jobs]
        finally:
            for permit in permits:
                permit.release()
        return Turn(claims, self._results.find_gravest(faults))

    def _end(self, ended: Ended) -> Batch[None]:
        claim, result = ended
        if result is None and self._results.keeps(claim):
            self._heartbeat.drop(claim.job)  # it has ended, and its loop, which might have written it, too
            return
        settling = self._results.begin([ended])
        self._results.note(settling, (yield settling.writes))
        if not self._is_driven():
            self._heartbeat.drop(claim.job)

    def _leave_kept(self) -> Batch[None]:
        again = self._results.begin_again(at_once=True)
        self._results.note(again, (yield again.writes))
        if not self._is_driven():
            self._results.abandon()

    def _give_back_taken(self, taking: "Future[Turn]") -> None:
        if not taking.cancelled() and taking.exception() is None:
            for claim in taking.result().claims:
                self.give_back(claim)

    # Claim

    def _list_specs(self, kinds: Collection[str] | None, *, llm_bound: bool) -> list[KindSpec]:
        return [
            spec
            for spec in self._registry.list_specs()
            if (llm_bound or not spec.llm_bound) and (kinds is None or spec.kind in kinds)
        ]

    def _find_next_due(self, kinds: Collection[str] | None) -> int | None:
        specs = self._list_specs(kinds, llm_bound=self._gate.available > 0)
        opens_at_ms = None
        if self._jobs.shared_gate.is_shared and any(spec.llm_bound for spec in specs):
            # Asked now, as nothing tells when a permit comes back that was never given back.
            state = self._jobs.shared_gate.look()
            opens_at_ms = state.closed_until_ms
            if state.free == 0:
                specs = [spec for spec in specs if not spec.llm_bound]
        due_at_ms = self._jobs.find_next_ready_at(spec.kind for spec in specs)
        return min((at_ms for at_ms in (due_at_ms, opens_at_ms) if at_ms is not None), default=None)

    def _claim(
        self, want: int, kinds: Collection[str] | None, permits: list[Permit], session: Session | None
    ) -> list[Job]:
        # Permits come before the claim: with none free, LLM-bound kinds are left out and the others go on. And
        # after what is written before it, which may take long: a gate that closes meanwhile stays closed.
        if self._in_doubt:
            known = self._heartbeat.list_claims() | self._results.list_claims()
            self._jobs.release_unknown(self.worker_id, known, session=session)
        while len(permits) < want and (permit := self._gate.try_acquire()) is not None:
            permits.append(permit)
        return self._jobs.claim_many(
            want,
            self._queue.lease_ms,
            kinds=self._list_specs(kinds, llm_bound=bool(permits)),
            llm_limit=len(permits),
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
