"""Results: how claims ended, on their way to the database, and what it could not take yet."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy.orm import Session

from tinycortex.config import WorkerSettings
from tinycortex.db import Database
from tinycortex.domain import policy
from tinycortex.domain.clock import Clock
from tinycortex.domain.failures import describe_error, find_failure, iter_causes
from tinycortex.domain.jobs import Job
from tinycortex.domain.outcomes import Defer, Done, JobPlan
from tinycortex.errors import StorageBusyError, StorageCorruptError, StorageError
from tinycortex.group_commit import Write
from tinycortex.handlers.context import RunSignals
from tinycortex.repositories.jobs import JobRepository
from tinycortex.services.dispatcher import Result
from tinycortex.services.gate import Permit
from tinycortex.services.settlement import Settlement
from tinycortex.telemetry.emitter import handler_took
from tinycortex.worker.backoff import pause_ms
from tinycortex.worker.heartbeat import Heartbeat

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

    @property
    def is_plain(self) -> bool:
        """Tell whether the job is simply done, and so can be settled by one statement with others that are."""
        return isinstance(self.result, Done) and self.result.writes is None and self.claim.context is None


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What the database could not take yet."""

    ended: Ended
    again_at: float  # monotonic seconds


class Settling(NamedTuple):
    """Results that are being written.

    Attributes:
        plain: those that one statement settles; none, or at least two.
        others: each by itself.
        writes: what writes them.
        again: whether the database has refused them before.
    """

    plain: Sequence[Ended]
    others: Sequence[Ended]
    writes: Sequence[Write]
    again: bool

    def iter_outcomes(self, outcomes: Sequence[Any]) -> Iterator[tuple[Ended, object]]:
        """Yield each result with what the database returned or raised for it, given those of the writes."""
        if self.plain:
            together, *outcomes = outcomes
            yield from zip(self.plain, together, strict=True)
        yield from zip(self.others, outcomes, strict=True)


_NOTHING_AGAIN = Settling((), (), (), again=True)


class Results:
    """Writes how claims ended, keeps what the database could not take, and tries that again."""

    def __init__(
        self,
        *,
        database: Database,
        jobs: JobRepository,
        settlement: Settlement,
        heartbeat: Heartbeat,
        worker: WorkerSettings,
        clock: Clock,
    ) -> None:
        self._database = database
        self._jobs = jobs
        self._settlement = settlement
        self._heartbeat = heartbeat
        self._worker = worker
        self._clock = clock
        self._kept: list[_Kept] = []
        self._begun: set[tuple[str, int]] = set()

    # Write

    def begin(self, all_ended: Sequence[Ended], *, again: bool = False) -> Settling:
        """Return what writes ``all_ended``; their leases are renewed no more, and :meth:`note` is to follow."""
        for claim, _result in all_ended:
            renewed_at = self._heartbeat.drop(claim.job)
            claim.renewed_at = claim.renewed_at if renewed_at is None else renewed_at
            self._begun.add((claim.job.id, claim.job.claim_token))
        plain = [ended for ended in all_ended if ended.is_plain]
        if len(plain) < 2:  # noqa: PLR2004 - one needs no company
            return Settling((), all_ended, [self._write_of(ended) for ended in all_ended], again)
        pieces = [partial(self._write, ended) for ended in plain]
        others = [ended for ended in all_ended if not ended.is_plain]
        together = Write(partial(self._write_together, plain), pieces=pieces)
        return Settling(plain, others, [together, *map(self._write_of, others)], again)

    def begin_again(self, *, at_once: bool) -> Settling:
        """Return what writes the kept results whose time to be tried again has come, or ``at_once`` all of them."""
        now = time.monotonic()
        if not self._kept:
            return _NOTHING_AGAIN
        # The last one first, so that those which wait for a lock do not keep the others from their turn for ever.
        due = [kept.ended for kept in reversed(self._kept) if at_once or kept.again_at <= now]
        self._kept = [kept for kept in self._kept if not (at_once or kept.again_at <= now)]
        return self.begin(due, again=True)

    def _write_of(self, ended: Ended) -> Write:
        return Write(partial(self._write, ended), alone=ended.has_writes, context=ended.claim.context)

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

    def _write_together(self, plain: Sequence[Ended], session: Session | None) -> list[bool]:
        done = [(ended.claim.job, ended.result) for ended in plain if isinstance(ended.result, Done)]
        return self._settlement.settle_done(done, [ended.claim.handler_ms for ended in plain], session=session)

    def _find_fault(self, result: Result | None) -> StorageError | None:
        if not isinstance(result, BaseException) or find_failure(result) is not None:
            return None  # or the handler has decided what it means
        return next(filter(self._database.owns, iter_causes(result)), None)

    def _put_off(self, job: Job, fault: StorageError) -> Defer:
        now_ms = self._clock.now_ms()
        deferring_ms = now_ms - (now_ms if job.deferred_since_ms is None else job.deferred_since_ms)
        wait_ms = max(pause_ms(fault, self._worker), min(deferring_ms, policy.RETRY_CAP_MS))
        return Defer(until_ms=now_ms + wait_ms, reason=describe_error(fault))

    # Keep

    @property
    def is_keeping(self) -> bool:
        """Tell whether a result waits for the database."""
        return bool(self._kept)

    @property
    def is_full(self) -> bool:
        """Tell whether so many wait that nothing more is to be begun."""
        return len(self._kept) >= _MOST_KEPT

    def keeps(self, claim: Claim) -> bool:
        """Tell whether the result of ``claim`` waits for the database."""
        return any(kept.ended.claim is claim for kept in self._kept)

    def list_claims(self) -> set[tuple[str, int]]:
        """Return the claims whose results are being written, or kept, each by its row's id and its token."""
        kept = {(kept.ended.claim.job.id, kept.ended.claim.job.claim_token) for kept in self._kept}
        return self._begun | kept

    def forget(self) -> None:
        """Keep nothing any more."""
        self._kept = []
        self._begun = set()

    def abandon(self) -> None:
        """Renew the leases of what is kept no longer."""
        for kept in self._kept:
            self._heartbeat.drop(kept.ended.claim.job)

    def note(self, settling: Settling, outcomes: Sequence[Any]) -> list[StorageError]:
        """Keep what could not be written; return the faults that the worker has to heed.

        One result that the database goes on refusing for want of room is tried again after a pause, and
        holds up no other job, until there are several.
        """
        faults: list[StorageError] = []
        for ended, error in settling.iter_outcomes(outcomes):
            claim, result = ended
            self._begun.discard((claim.job.id, claim.job.claim_token))
            if claim.note_written is not None:
                claim.note_written()
            fault = self._find_fault(result)
            if isinstance(fault, StorageCorruptError):
                faults.append(fault)  # the handler met it
            if not isinstance(error, StorageError):
                if isinstance(error, BaseException):
                    raise error
                claim.signals.note_written()
                continue
            self._heartbeat.watch(claim.job, claim.signals, claim.renewed_at)
            lasting = settling.again and not isinstance(error, StorageBusyError)
            wait_s = pause_ms(error, self._worker) / 1000 if lasting else 0.0
            self._kept.append(_Kept(ended, time.monotonic() + wait_s))
            if not lasting or isinstance(error, StorageCorruptError) or self.is_full:
                faults.append(error)
        return faults

    def find_gravest(self, faults: Sequence[StorageError]) -> StorageError | None:
        """Return the fault that calls for the longest pause; one of damage before all others."""
        return max(faults, key=self._gravity, default=None)

    def _gravity(self, fault: StorageError) -> float:
        return math.inf if isinstance(fault, StorageCorruptError) else pause_ms(fault, self._worker)
