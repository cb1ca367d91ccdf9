"""A job's life in rows: claim, renew, settle, cancel; each one statement or one transaction."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, zip_longest
from operator import attrgetter
from typing import Any

from sqlalchemy import Row, TextClause
from sqlalchemy.orm import Session

from tinycortex.domain import policy
from tinycortex.domain.jobs import Job, JobStatus, check_instant
from tinycortex.domain.kinds import BUILTIN_KINDS, KindSpec, check_lease_ms
from tinycortex.domain.text import error_text
from tinycortex.errors import InvalidInputError, JobFailure, PayloadError
from tinycortex.repositories import job_sql
from tinycortex.repositories.execution import count_changed, execute, fetch
from tinycortex.repositories.job_events import event_of_end
from tinycortex.repositories.job_intake import JobIntake, mint_id
from tinycortex.repositories.job_reader import job_of
from tinycortex.telemetry import JobCancelled, JobClaimed, JobsEnqueued
from tinycortex.telemetry.emitter import handler_took

logger = logging.getLogger(__name__)

_CLAIMS_PER_STATEMENT = (2, 4, 8, 16, 32, 64, 128, 256)
"""Of few sizes, so that each statement is built and compiled once; what is left of one names no claim."""

_MOST_CLAIMS = _CLAIMS_PER_STATEMENT[-1]

_NOT_HELD = object()

_NO_CLAIM = ("", -1, -1, -1)

_claim_values = attrgetter(*job_sql.CLAIM_FIELDS)


class JobLife(JobIntake):
    """The half of :class:`~tinycortex.repositories.jobs.JobRepository` that takes one job through its life.

    Methods that end a claim tell whether they took effect. A holder whose row has been claimed anew, is
    settled already, or was asked to stop changes nothing else and gets False; in the last case the row
    settles ``cancelled`` instead.
    """

    # Claim

    def claim_next(
        self,
        lease_ms: int = policy.DEFAULT_LOCK_DURATION_MS,
        *,
        kinds: Iterable[KindSpec] = tuple(BUILTIN_KINDS.values()),
        worker_id: str | None = None,
        session: Session | None = None,
    ) -> Job | None:
        """Lease the next due row of ``kinds``, most downstream first (spec: Claiming and ordering).

        One statement. The row counts one more attempt and carries a token that no other claim of it has.

        Args:
            lease_ms: length of the lease (ms), for kinds that have none of their own.
            kinds: the kinds to claim; rows of any other kind are not touched.
            worker_id: who claims, kept in ``locked_by``.
            session: the caller's transaction.

        Returns:
            The claimed row, or None when nothing is due.

        Raises:
            InvalidInputError: ``lease_ms`` is not whole milliseconds above zero.
            StorageError: nothing was claimed.
        """
        claimed = self.claim_many(1, lease_ms, kinds=kinds, worker_id=worker_id, session=session)
        return claimed[0] if claimed else None

    def claim_many(
        self,
        limit: int,
        lease_ms: int = policy.DEFAULT_LOCK_DURATION_MS,
        *,
        kinds: Iterable[KindSpec] = tuple(BUILTIN_KINDS.values()),
        llm_limit: int | None = None,
        worker_id: str | None = None,
        session: Session | None = None,
    ) -> list[Job]:
        """Lease the rows that ``limit`` calls of :meth:`claim_next` would, in their order, in one statement.

        Args:
            limit: the most rows to lease.
            lease_ms: length of the leases (ms), for kinds that have none of their own.
            kinds: the kinds to claim; rows of any other kind are not touched.
            llm_limit: the most rows of LLM-bound kinds among them; rows that come after those left out take
                their places. None for no such limit. The permits that all processes share limit them, too.
            worker_id: who claims, kept in ``locked_by``.
            session: the caller's transaction.

        Returns:
            The claimed rows, the one to run first in front; empty when nothing is due.

        Raises:
            InvalidInputError: ``limit`` is no whole number above zero, ``llm_limit`` none of at least zero, or
                ``lease_ms`` is not whole milliseconds above zero.
            StorageError: nothing was claimed.
        """
        _check_count("limit", limit, least=1)
        check_lease_ms(lease_ms)
        if llm_limit is not None:
            _check_count("llm_limit", llm_limit, least=0)
        wanted = _within_limit(kinds, llm_limit)
        if not wanted:
            return []
        began_at = time.perf_counter()
        with self._database.within(session) as tx:
            if self.shared_gate.is_shared and any(spec.llm_bound for spec in wanted):
                free = self.shared_gate.take_turn(tx)
                llm_limit = free if llm_limit is None else min(free, llm_limit)
                wanted = _within_limit(wanted, llm_limit)
                if not wanted:
                    return []
            if llm_limit is not None and llm_limit >= limit:
                llm_limit = None
            statement = job_sql.claim(wanted, limit=limit, llm_limit=llm_limit, row_lock=self._database.row_lock)
            values = {"now_ms": self._clock.now_ms(), "lease_ms": lease_ms, "worker_id": worker_id}
            found = fetch(tx, statement, values | {"limit": limit, "llm_limit": llm_limit})
            jobs = [job_of(row) for row in found.rows]
            if len(jobs) > 1:  # RETURNING has no order of its own
                ranks = {spec.kind: spec.rank for spec in wanted}
                jobs.sort(key=lambda job: (ranks[job.kind], job.available_at_ms, job.id))
            if self.emitter.is_heard:
                for job in jobs:
                    self._database.on_commit(tx, partial(self._tell_claimed, job, began_at))
            return jobs

    def _tell_claimed(self, job: Job, began_at: float) -> None:
        due_for_ms = 0 if job.started_at_ms is None else job.started_at_ms - job.available_at_ms
        claim_ms = (time.perf_counter() - began_at) * 1000
        self.emitter.emit(JobClaimed(job=job, waited_ms=due_for_ms, claim_ms=claim_ms))

    def renew(
        self, job: Job, lease_ms: int = policy.DEFAULT_LOCK_DURATION_MS, *, session: Session | None = None
    ) -> bool:
        """Push the lease of a claim on to ``lease_ms`` from now; False when the claim is no longer held."""
        until_ms = self._clock.now_ms() + check_lease_ms(lease_ms)
        with self._database.within(session) as tx:
            return count_changed(tx, job_sql.RENEW, {**_claim(job), "locked_until_ms": until_ms}) == 1

    def note_error(self, job: Job, message: str, *, session: Session | None = None) -> bool:
        """Keep ``message`` in ``last_error`` while the claim goes on; False when it is no longer held."""
        with self._database.within(session) as tx:
            return count_changed(tx, job_sql.NOTE_ERROR, {**_claim(job), "last_error": error_text(message)}) == 1

    # Settle

    def mark_done(self, job: Job, *, session: Session | None = None) -> bool:
        """Settle a claim as done, and enqueue the rerun that was asked for meanwhile (contract §4.4)."""
        return self._settle(job_sql.MARK_DONE, job, session)

    def mark_done_many(
        self, jobs: Sequence[Job], *, handler_ms: Sequence[float | None] = (), session: Session | None = None
    ) -> list[bool]:
        """Settle many claims as :meth:`mark_done` does each, in one transaction; return which took effect.

        Args:
            jobs: the claims, of different rows.
            handler_ms: how long their handlers ran (ms), for what is told of them.
            session: the caller's transaction.
        """
        now_ms = self._clock.now_ms()
        with self._database.within(session) as tx:
            done = self._mark_done_many(tx, jobs, now_ms)
            requests = {(job_id, claim_token): request for job_id, claim_token, request in done}
            is_heard = self.emitter.is_heard
            for job, took_ms in zip_longest(jobs, handler_ms):
                claim = (job.id, job.claim_token)
                if not is_heard and requests.get(claim, _NOT_HELD) is None:
                    continue
                with handler_took(took_ms):
                    row = fetch(tx, job_sql.FIND_KEPT, {"id": job.id}).first() if claim in requests else None
                    self._conclude(tx, job_sql.MARK_DONE, row, {"now_ms": now_ms}, job)
            self._tell_of_permits(tx, (job.kind for job in jobs))
        return [(job.id, job.claim_token) in requests for job in jobs]

    def _mark_done_many(self, tx: Session, jobs: Sequence[Job], now_ms: int) -> Iterator[tuple[str, int, str | None]]:
        claims = list(map(_claim_values, jobs))
        if self._database.has_arrays and claims:
            columns = dict(zip(job_sql.CLAIM_FIELDS, map(list, zip(*claims, strict=True)), strict=True))
            yield from fetch(tx, job_sql.MARK_DONE_LISTED, columns | {"now_ms": now_ms}).rows
            return
        for start in range(0, len(claims), _MOST_CLAIMS):
            some = claims[start : start + _MOST_CLAIMS]
            size = next(size for size in _CLAIMS_PER_STATEMENT if size >= len(some))
            named = chain.from_iterable([*some, *[_NO_CLAIM] * (size - len(some))])
            values = dict(zip(job_sql.claim_parameters(size), named, strict=True))
            yield from fetch(tx, job_sql.mark_done_many(size), values | {"now_ms": now_ms}).rows

    def mark_failed(self, job: Job, message: str, *, session: Session | None = None) -> bool:
        """Settle a claim with an untyped failure: a retry while budget is left, then failed (contract §4.5)."""
        return self.mark_failed_typed(job, message, None, session=session)

    def mark_failed_typed(
        self, job: Job, message: str, failure: JobFailure | None, *, session: Session | None = None
    ) -> bool:
        """Settle a claim with a failure (spec: Typed failures).

        An unrecoverable one is terminal at once. Any other one is tried again after
        :func:`~tinycortex.domain.policy.retry_delay_ms` while ``attempts < max_attempts``.

        Args:
            job: the claim.
            message: stored in ``last_error``, mended and cut to 64 KiB.
            failure: the typed failure, or None for an untyped error.
            session: the caller's transaction.
        """
        last_error = error_text(message)
        if (failure is not None and failure.is_unrecoverable) or job.attempts >= policy.budget_of(job.max_attempts):
            return self._settle(
                job_sql.MARK_FAILED,
                job,
                session,
                last_error=last_error,
                failure_reason=None if failure is None else error_text(failure.code),
                failure_class=None if failure is None else failure.failure_class.value,
            )
        delay_ms = policy.retry_delay_ms(job.attempts, self._retry_jitter)
        if failure is not None and failure.retry_after_s is not None:
            delay_ms = max(delay_ms, int(failure.retry_after_s * 1000))
        retry_at_ms = self._clock.now_ms() + delay_ms
        return self._settle(job_sql.MARK_RETRY, job, session, last_error=last_error, available_at_ms=retry_at_ms)

    def mark_deferred(
        self, job: Job, until_ms: int, reason: str, *, progress: bool = False, session: Session | None = None
    ) -> bool:
        """Put a claim off to exactly ``until_ms`` (ms, UTC) and give its attempt back (contract §4.7)."""
        check_instant("until_ms", until_ms)
        return self._settle(
            job_sql.MARK_DEFERRED,
            job,
            session,
            available_at_ms=until_ms,
            last_error=error_text(reason),
            progress=int(progress),
        )

    def release(self, job: Job, *, session: Session | None = None) -> bool:
        """Give one claim back unused, its attempt too (contract §4.8)."""
        with self._database.within(session) as tx:
            self._wake(tx)
            return self._settle(job_sql.RELEASE, job, tx)

    def _settle(self, statement: TextClause, job: Job, session: Session | None, **values: Any) -> bool:
        values |= {"now_ms": self._clock.now_ms(), **_claim(job)}
        with self._database.within(session) as tx:
            row = fetch(tx, statement, values).first()
            self._conclude(tx, statement, row, values, job)
            self._tell_of_permits(tx, [job.kind])
            return row is not None

    def close_gate(self, job: Job, cooldown_ms: int, *, session: Session) -> None:
        """Have no LLM-bound row leased for ``cooldown_ms``, where processes share permits and ``job`` holds one."""
        if self._is_llm_bound(job.kind):
            self.shared_gate.close_for(cooldown_ms, session)

    def _tell_of_permits(self, tx: Session, kinds: Iterable[str]) -> None:
        """Have workers look again that wait for permits which rows of ``kinds`` have given back."""
        if self.shared_gate.is_shared and any(map(self._is_llm_bound, kinds)):
            self._wake(tx)

    def _is_llm_bound(self, kind: str) -> bool:
        spec = self._find_spec(kind)
        return spec is not None and spec.llm_bound

    def _conclude(
        self, tx: Session, statement: TextClause, row: Row[Any] | None, values: dict[str, Any], job: Job
    ) -> None:
        """Tell of the end of a claim that ``statement`` has written to ``row``; None when it was not free to."""
        if row is None:
            statement = job_sql.MARK_CANCELLED
            row = fetch(tx, statement, values | _claim(job)).first()
        if row is not None:
            if self.emitter.is_heard:
                self._tell(tx, event_of_end(statement, job, values))
            self._pass_on_request(tx, row)

    def _pass_on_request(self, tx: Session, row: Row[Any]) -> None:
        """See to the request that was kept with a row while it ran (``on_duplicate="rerun"``).

        A row that runs again anyway takes it as its own payload, unless its own outranks it: the later run
        then serves both. For a settled row it becomes a job of its own.
        """
        request = row.rerun_payload_json
        if request is None:
            return
        if row.status == JobStatus.READY:
            stays = self._is_higher(row.kind, row.payload_json) and not self._is_higher(row.kind, request)
            payload = row.payload_json if stays else request
            execute(tx, job_sql.TAKE_PAYLOAD, {"id": row.id, "payload_json": payload})
            return
        # Not a NewJob: the row may be another program's, with values that a request of ours may not have.
        now_ms, job_id = self._clock.now_ms(), mint_id()
        budget = policy.budget_of(row.max_attempts)
        if not count_changed(tx, job_sql.FORGET_REQUEST, {"id": row.id}):
            return
        # In a settlement the key has just been freed, so nothing can suppress it; else a twin serves it.
        with self.emitter.tracer.sending([row.kind]) as trace_context:
            rerun = (job_id, row.kind, request, row.dedupe_key, budget, now_ms, now_ms, trace_context)
            inserted = self._insert(tx, [rerun])
        if inserted:
            self._wake(tx)
            if self.emitter.is_heard:
                self._tell(tx, JobsEnqueued(ids=(job_id,), kinds=(row.kind,)))

    def _is_higher(self, kind: str, payload_json: str) -> bool:
        try:
            return self._outranks(kind, payload_json)
        except PayloadError:  # another program's; the handler will say so
            return False
        except Exception:
            # An application's own function: what it makes of one row must not stop the recovery of all.
            logger.exception("outranks of kind %s failed; its payload counts as an ordinary one", kind)
            return False

    # Cancel

    def cancel(self, job_id: str, *, session: Session | None = None) -> JobStatus:
        """Cancel a ready row at once, or ask the holder of a running one to stop.

        Returns:
            ``cancelled`` when the row has settled and its key is free; ``running`` when its holder has
            been asked, and the row will settle ``cancelled`` at its end.

        Raises:
            JobNotFoundError: there is no such row.
            InvalidInputError: the row has settled already.
        """
        values = {"id": job_id, "now_ms": self._clock.now_ms()}
        with self._database.within(session) as tx:
            # Or it might go on from running to ready, or back, between the two statements.
            tx.execute(job_sql.LOCK, {"id": job_id}).all()
            if count_changed(tx, job_sql.CANCEL_READY, values) == 1:
                if self.emitter.is_heard:
                    self._tell(tx, JobCancelled(job=self.get_job(job_id, session=tx)))
                return JobStatus.CANCELLED
            if count_changed(tx, job_sql.REQUEST_CANCEL, values) == 1:
                return JobStatus.RUNNING
            job = self.get_job(job_id, session=tx)
            raise InvalidInputError(f"job {job_id} is {job.status}; only a ready or running job can be cancelled")

    def watch(self, jobs: Iterable[Job], *, session: Session | None = None) -> dict[str, bool]:
        """Return, for those of the claims ``jobs`` that are still held, by id, whether they were asked to stop."""
        claims = {job.id: (job.claim_token, job.attempts, job.started_at_ms) for job in jobs}
        with self._database.reading_within(session) as tx:
            rows = execute(tx, job_sql.WATCH, {"ids": list(claims)}).all()
        return {
            row.id: row.cancel_requested_at_ms is not None
            for row in rows
            if claims[row.id] == (row.claim_token, row.attempts, row.started_at_ms)
        }


def _claim(job: Job) -> dict[str, Any]:
    """Return the parameters that say which claim of which row is meant."""
    return dict(zip(job_sql.CLAIM_FIELDS, _claim_values(job), strict=True))


def _within_limit(kinds: Iterable[KindSpec], llm_limit: int | None) -> tuple[KindSpec, ...]:
    return tuple(kinds) if llm_limit != 0 else tuple(spec for spec in kinds if not spec.llm_bound)


def _check_count(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise InvalidInputError(f"{name} is a whole number of at least {least}, not {value!r}")
