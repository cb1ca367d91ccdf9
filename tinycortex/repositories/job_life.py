"""A job's life in rows: enqueue, claim, renew, settle, cancel; each one statement or one transaction."""

from collections.abc import Callable, Iterable
from typing import Any

import uuid_utils
from sqlalchemy import TextClause
from sqlalchemy.orm import Session

from tinycortex.db import Database
from tinycortex.domain import policy
from tinycortex.domain.clock import Clock, SystemClock
from tinycortex.domain.jobs import Job, JobStatus, NewJob, check_instant
from tinycortex.domain.kinds import BUILTIN_KINDS, KindSpec, OnDuplicate, check_lease_ms
from tinycortex.domain.payloads import parse_payload
from tinycortex.domain.text import error_text
from tinycortex.errors import InvalidInputError, JobFailure
from tinycortex.repositories import job_sql
from tinycortex.repositories.job_reader import JobReader, count_changed, execute, job_of

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
    """

    def __init__(
        self,
        database: Database,
        clock: Clock | None = None,
        *,
        find_spec: Callable[[str], KindSpec | None] = BUILTIN_KINDS.get,
        retry_jitter: float = policy.RETRY_JITTER,
    ) -> None:
        super().__init__(database)
        self._clock = clock or SystemClock()
        self._find_spec = find_spec
        self._retry_jitter = retry_jitter

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
        rows = [self._row(job, now_ms) for job in wanted]
        order = sorted(range(len(rows)), key=lambda index: rows[index]["dedupe_key"] or "")
        plain = [index for index in order if self._on_duplicate(wanted[index]) is OnDuplicate.IGNORE]
        inserted: set[str] = set()
        with self._database.within(session) as tx:
            for start in range(0, len(plain), _ROWS_PER_INSERT):
                inserted.update(self._insert(tx, [rows[index] for index in plain[start : start + _ROWS_PER_INSERT]]))
            for index in order:
                if self._on_duplicate(wanted[index]) is not OnDuplicate.IGNORE:
                    inserted.update(self._insert_replacing(tx, wanted[index], rows[index]))
        return [row["id"] if row["id"] in inserted else None for row in rows]

    def _row(self, job: NewJob, now_ms: int) -> dict[str, Any]:
        spec = self._find_spec(job.kind)
        default_attempts = policy.DEFAULT_MAX_ATTEMPTS if spec is None else spec.max_attempts
        return {
            "id": f"job:{uuid_utils.uuid7()}",
            "kind": job.kind,
            "payload_json": job.payload_json,
            "dedupe_key": job.dedupe_key,
            "max_attempts": default_attempts if job.max_attempts is None else job.max_attempts,
            "available_at_ms": now_ms if job.available_at_ms is None else job.available_at_ms,
            "created_at_ms": now_ms,
        }

    def _on_duplicate(self, job: NewJob) -> OnDuplicate:
        spec = self._find_spec(job.kind)
        return OnDuplicate.IGNORE if spec is None or job.dedupe_key is None else OnDuplicate(spec.on_duplicate)

    def _insert(self, tx: Session, rows: list[dict[str, Any]]) -> Iterable[str]:
        values = {f"{field}_{number}": row[field] for number, row in enumerate(rows) for field in job_sql.INSERT_FIELDS}
        return tx.execute(job_sql.enqueue_ignoring(len(rows)), values).scalars().all()

    def _insert_replacing(self, tx: Session, job: NewJob, row: dict[str, Any]) -> Iterable[str]:
        spec = self._find_spec(job.kind)
        outranks = (
            spec is not None
            and spec.outranks is not None
            and spec.outranks(parse_payload(spec.payload, job.payload_json))
        )
        rerun = self._on_duplicate(job) is OnDuplicate.RERUN
        choices = {
            "rerun": int(rerun),
            "replace_ready": int(outranks or not rerun),
            "replace_rerun": int(outranks or spec is None or spec.outranks is None),
        }
        return tx.execute(job_sql.ENQUEUE_REPLACING, row | choices).scalars().all()

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
        with self._database.within(session) as tx:
            row = tx.execute(job_sql.claim(wanted), values).first()
            return None if row is None else job_of(row)

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
        if (failure is not None and failure.is_unrecoverable) or job.attempts >= job.max_attempts:
            return self._settle(
                job_sql.MARK_FAILED,
                job,
                session,
                last_error=last_error,
                failure_reason=None if failure is None else error_text(failure.code),
                failure_class=None if failure is None else failure.failure_class.value,
            )
        retry_at_ms = self._clock.now_ms() + policy.retry_delay_ms(job.attempts, self._retry_jitter)
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
            if row is None:
                execute(tx, job_sql.MARK_CANCELLED, values)
                return False
            if row[0] is not None:
                self._enqueue_rerun(tx, job.kind, job.dedupe_key, job.max_attempts, row[0])
            return True

    def _enqueue_rerun(self, tx: Session, kind: str, key: str | None, max_attempts: int, payload_json: str) -> None:
        rerun = NewJob(kind=kind, payload_json=payload_json, dedupe_key=key, max_attempts=max_attempts)
        self.enqueue(rerun, session=tx)

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


def _claim(job: Job) -> dict[str, Any]:
    """Return the parameters that say which claim of which row is meant."""
    return {
        "id": job.id,
        "claim_token": job.claim_token,
        "attempts": job.attempts,
        "started_at_ms": job.started_at_ms,
    }
