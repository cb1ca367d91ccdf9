"""A job's life in rows: enqueue, claim, renew, settle, cancel; each one statement or one transaction."""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import uuid_utils
from sqlalchemy import Row, TextClause
from sqlalchemy.orm import Session

from tinycortex.db import Database
from tinycortex.domain import policy
from tinycortex.domain.clock import Clock, SystemClock
from tinycortex.domain.jobs import Job, JobStatus, NewJob, check_instant
from tinycortex.domain.kinds import BUILTIN_KINDS, KindSpec, OnDuplicate, check_lease_ms
from tinycortex.domain.payloads import parse_payload
from tinycortex.domain.text import error_text
from tinycortex.errors import InvalidInputError, JobFailure, PayloadError
from tinycortex.repositories import job_sql
from tinycortex.repositories.job_events import event_of_end
from tinycortex.repositories.job_reader import JobReader, count_changed, execute, job_of
from tinycortex.telemetry import Emitter, Event, JobCancelled, JobClaimed, JobsEnqueued

logger = logging.getLogger(__name__)

_ROWS_PER_INSERT = 200


class JobLife(JobReader):
    """The half of :class:`~tinycortex.repositories.jobs.JobRepository` that takes one job through its life.

    Methods that end a claim tell whether they took effect. A holder whose row has been claimed anew, is
    settled already, or was asked to stop changes nothing else and gets False; in the last case the row
    settles ``cancelled`` instead.

    Args:
        database: where the rows are.
        clock: the source of "now"; the machine's clock when left out.
        find_spec: what is special about a kind; the built-in kinds when left out.
        retry_jitter: share of a retry delay that is added on top of it at random.
        on_enqueued: called after the commit of new rows, in the thread that committed them.
        emitter: told of what has been committed; one that nobody hears when left out.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock | None = None,
        *,
        find_spec: Callable[[str], KindSpec | None] = BUILTIN_KINDS.get,
        retry_jitter: float = policy.RETRY_JITTER,
        on_enqueued: Callable[[], object] | None = None,
        emitter: Emitter | None = None,
    ) -> None:
        super().__init__(database)
        self._clock = clock or SystemClock()
        self._find_spec = find_spec
        self._retry_jitter = retry_jitter
        self._on_enqueued = on_enqueued
        self.emitter = emitter or Emitter()

    def _tell(self, tx: Session, event: Event) -> None:
        self._database.on_commit(tx, partial(self.emitter.emit, event))

    # Enqueue

    def enqueue(self, job: NewJob, *, session: Session | None = None) -> str | None:
        """Insert ``job`` unless a ready or running row has its key (spec: Dedupe keys).

        What an active twin makes of the request is its kind's ``on_duplicate``.

        Returns:
            The new row's id, or None when an active twin suppressed it.

        Raises:
            InvalidInputError: ``job`` is no NewJob.
            StorageError: nothing was written.
        """
        return self.enqueue_many([job], session=session)[0]

    def enqueue_tx(self, session: Session, job: NewJob) -> str | None:
        """Insert ``job`` in the caller's transaction; see :meth:`enqueue`."""
        return self.enqueue(job, session=session)

    def enqueue_many(self, jobs: Iterable[NewJob], *, session: Session | None = None) -> list[str | None]:
        """Insert many jobs in one transaction: all of them, or none when one cannot be written.

        Rows are written in the order of their keys, so that two callers with overlapping keys wait for
        each other instead of locking each other out.

        Returns:
            For each job, in the order given, the new row's id or None when an active twin (an earlier job
            of the same call perhaps) suppressed it.

        Raises:
            InvalidInputError: an item is no NewJob.
            PayloadError: a payload is not what its kind takes.
            StorageError: nothing was written.
        """
        wanted = list(jobs)
        if strangers := [job for job in wanted if not isinstance(job, NewJob)]:
            raise InvalidInputError(f"enqueue takes NewJob values, not {type(strangers[0]).__name__}")
        now_ms = self._clock.now_ms()
        # Minted in the order given, since ids break ties between equal times. The rows themselves are built
        # a statement at a time: beside the jobs only their ids are held.
        ids = [_mint_id() for _ in wanted]
        taken: list[str | None] = [None] * len(wanted)
        order = sorted(range(len(wanted)), key=lambda index: wanted[index].dedupe_key or "")
        plain = [index for index in order if self._on_duplicate(wanted[index]) is OnDuplicate.IGNORE]
        kinds = [job.kind for job in wanted]
        with self.emitter.tracer.sending(kinds) as trace_context, self._database.within(session) as tx:
            for start in range(0, len(plain), _ROWS_PER_INSERT):
                batch = plain[start : start + _ROWS_PER_INSERT]
                inserted = self._insert(
                    tx, [self._row(wanted[index], ids[index], now_ms, trace_context) for index in batch]
                )
                for index in batch:
                    taken[index] = ids[index] if ids[index] in inserted else None
            for index in order:
                if self._on_duplicate(wanted[index]) is not OnDuplicate.IGNORE:
                    row = self._row(wanted[index], ids[index], now_ms, trace_context)
                    inserted = self._insert_replacing(tx, wanted[index], row)
                    taken[index] = ids[index] if ids[index] in inserted else None
            if self._on_enqueued is not None:
                self._database.on_commit(tx, self._on_enqueued)
            if self.emitter.is_heard:
                new = [(job_id, job.kind) for job_id, job in zip(taken, wanted, strict=True) if job_id is not None]
                self._tell_new(tx, new)
        return taken

    def _tell_new(self, tx: Session, new: list[tuple[str, str]]) -> None:
        if new:
            ids, kinds = zip(*new, strict=True)
            self._tell(tx, JobsEnqueued(ids=ids, kinds=kinds))

    def _row(self, job: NewJob, job_id: str, now_ms: int, trace_context: str | None) -> dict[str, Any]:
        spec = self._find_spec(job.kind)
        default_attempts = policy.DEFAULT_MAX_ATTEMPTS if spec is None else spec.max_attempts
        return {
            "id": job_id,
            "kind": job.kind,
            "payload_json": job.payload_json,
            "dedupe_key": job.dedupe_key,
            "max_attempts": default_attempts if job.max_attempts is None else job.max_attempts,
            "available_at_ms": now_ms if job.available_at_ms is None else job.available_at_ms,
            "created_at_ms": now_ms,
            "trace_context": trace_context,
        }

    def _on_duplicate(self, job: NewJob) -> OnDuplicate:
        spec = self._find_spec(job.kind)
        return OnDuplicate.IGNORE if spec is None or job.dedupe_key is None else OnDuplicate(spec.on_duplicate)

    def _insert(self, tx: Session, rows: list[dict[str, Any]]) -> set[str]:
        values = {f"{field}_{number}": row[field] for number, row in enumerate(rows) for field in job_sql.INSERT_FIELDS}
        return set(tx.execute(job_sql.enqueue_ignoring(len(rows)), values).scalars())

    def _insert_replacing(self, tx: Session, job: NewJob, row: dict[str, Any]) -> set[str]:
        spec = self._find_spec(job.kind)
        rerun = self._on_duplicate(job) is OnDuplicate.RERUN
        outranks = self._outranks(job.kind, job.payload_json)
        choices = {
            "rerun": int(rerun),
            "replace_ready": int(outranks or not rerun),
            "replace_rerun": int(outranks or spec is None or spec.outranks is None),
        }
        return set(tx.execute(job_sql.ENQUEUE_REPLACING, row | choices).scalars())

    def _outranks(self, kind: str, payload_json: str) -> bool:
        spec = self._find_spec(kind)
        if spec is None or spec.outranks is None:
            return False
        return spec.outranks(parse_payload(spec.payload, payload_json))

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
        wanted = tuple(kinds)
        check_lease_ms(lease_ms)
        if not wanted:
            return None
        values = {"now_ms": self._clock.now_ms(), "lease_ms": lease_ms, "worker_id": worker_id}
        began_at = time.perf_counter()
        with self._database.within(session) as tx:
            row = tx.execute(job_sql.claim(wanted), values).first()
            job = None if row is None else job_of(row)
            if job is not None and self.emitter.is_heard:
                self._database.on_commit(tx, partial(self._tell_claimed, job, began_at))
            return job

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
        return self._settle(job_sql.RELEASE, job, session)

    def _settle(self, statement: TextClause, job: Job, session: Session | None, **values: Any) -> bool:
        values |= {"now_ms": self._clock.now_ms(), **_claim(job)}
        with self._database.within(session) as tx:
            row = execute(tx, statement, values).first()
            held = row is not None
            if row is None:
                statement = job_sql.MARK_CANCELLED
                row = execute(tx, statement, values).first()
            if row is not None:
                if self.emitter.is_heard:
                    self._tell(tx, event_of_end(statement, job, values))
                self._pass_on_request(tx, row)
            return held

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
        now_ms = self._clock.now_ms()
        rerun = {
            "id": _mint_id(),
            "kind": row.kind,
            "payload_json": request,
            "dedupe_key": row.dedupe_key,
            "max_attempts": policy.budget_of(row.max_attempts),
            "available_at_ms": now_ms,
            "created_at_ms": now_ms,
        }
        execute(tx, job_sql.FORGET_REQUEST, {"id": row.id})
        # In a settlement the key has just been freed, so nothing can suppress it; else a twin serves it.
        with self.emitter.tracer.sending([row.kind]) as trace_context:
            inserted = self._insert(tx, [rerun | {"trace_context": trace_context}])
        if inserted and self.emitter.is_heard:
            self._tell_new(tx, [(rerun["id"], row.kind)])

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
            rows = tx.execute(job_sql.WATCH, {"ids": list(claims)}).all()
        return {
            row.id: row.cancel_requested_at_ms is not None
            for row in rows
            if claims[row.id] == (row.claim_token, row.attempts, row.started_at_ms)
        }


def _mint_id() -> str:
    return f"job:{uuid_utils.uuid7()}"


def _claim(job: Job) -> dict[str, Any]:
    """Return the parameters that say which claim of which row is meant."""
    return {
        "id": job.id,
        "claim_token": job.claim_token,
        "attempts": job.attempts,
        "started_at_ms": job.started_at_ms,
    }
