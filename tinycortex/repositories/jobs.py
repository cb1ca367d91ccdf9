"""JobRepository: every operation on the queue's rows, each one statement or one transaction."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import uuid_utils
from sqlalchemy import TextClause
from sqlalchemy.orm import Session

from tinycortex.db import Database
from tinycortex.domain import policy
from tinycortex.domain.clock import Clock, SystemClock
from tinycortex.domain.jobs import Job, JobStatus, NewJob, check_instant
from tinycortex.domain.kinds import BUILTIN_KINDS, KindSpec
from tinycortex.domain.text import error_text
from tinycortex.errors import InvalidInputError, JobFailure
from tinycortex.repositories import job_sql
from tinycortex.repositories.job_reader import JobReader, job_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeued:
    """What a requeue did.

    Attributes:
        revived: failed rows that are ready again.
        superseded: older failed rows of a revived row's key, now cancelled.
        blocked: failed rows left as they are, because a ready or running row has their key.
    """

    revived: int
    superseded: int
    blocked: int


class JobRepository(JobReader):
    """The rows of ``mem_tree_jobs``.

    Every method works in ``session`` when one is given, so that it commits or vanishes with the caller's
    own writes; without one, in a transaction of its own. Methods that end a claim tell whether they took
    effect: a holder whose row has been claimed anew, or is settled already, changes nothing and gets False.

    Args:
        database: where the rows are.
        clock: the source of "now"; the machine's clock when left out.
        retry_jitter: share of a retry delay that is added on top of it at random.
    """

    def __init__(
        self, database: Database, clock: Clock | None = None, *, retry_jitter: float = policy.RETRY_JITTER
    ) -> None:
        super().__init__(database)
        self._clock = clock or SystemClock()
        self._retry_jitter = retry_jitter

    # Enqueue

    def enqueue(self, job: NewJob, *, session: Session | None = None) -> str | None:
        """Insert ``job`` unless a ready or running row has its key (spec: Dedupe keys).

        Returns:
            The new row's id, or None when an active twin suppressed it.

        Raises:
            InvalidInputError: ``job`` is no NewJob.
            StorageError: nothing was written.
        """
        if not isinstance(job, NewJob):
            raise InvalidInputError(f"enqueue takes a NewJob, not {type(job).__name__}")
        now_ms = self._clock.now_ms()
        values = {
            "id": f"job:{uuid_utils.uuid7()}",
            "kind": job.kind,
            "payload_json": job.payload_json,
            "dedupe_key": job.dedupe_key,
            "max_attempts": policy.DEFAULT_MAX_ATTEMPTS if job.max_attempts is None else job.max_attempts,
            "available_at_ms": now_ms if job.available_at_ms is None else job.available_at_ms,
            "created_at_ms": now_ms,
        }
        with self._database.within(session) as tx:
            return tx.execute(job_sql.ENQUEUE, values).scalar()

    def enqueue_tx(self, session: Session, job: NewJob) -> str | None:
        """Insert ``job`` in the caller's transaction; see :meth:`enqueue`."""
        return self.enqueue(job, session=session)

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
            lease_ms: length of the lease (ms).
            kinds: the kinds to claim; rows of any other kind are not touched.
            worker_id: who claims, kept in ``locked_by``.
            session: the caller's transaction.

        Returns:
            The claimed row, or None when nothing is due.
        """
        wanted = tuple(kinds)
        if isinstance(lease_ms, bool) or not isinstance(lease_ms, int) or lease_ms <= 0:
            raise InvalidInputError(f"lease_ms is a whole number of milliseconds above 0, not {lease_ms!r}")
        if not wanted:
            return None
        now_ms = self._clock.now_ms()
        values = {"now_ms": now_ms, "locked_until_ms": now_ms + lease_ms, "worker_id": worker_id}
        with self._database.within(session) as tx:
            row = tx.execute(job_sql.claim(wanted), values).first()
            return None if row is None else job_of(row)

    # Settle

    def mark_done(self, job: Job, *, session: Session | None = None) -> bool:
        """Settle a claim as done (contract §4.4)."""
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
        terminal = (failure is not None and failure.is_unrecoverable) or job.attempts >= job.max_attempts
        if terminal:
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

    # Recover

    def release_running_locks(self, worker_id: str, *, session: Session | None = None) -> int:
        """Give back every row that ``worker_id`` holds, attempts too; rows of others are not touched."""
        return self._execute(job_sql.RELEASE_OWN, session, worker_id=worker_id)

    def recover_stale_locks(self, *, session: Session | None = None) -> int:
        """Free every running row whose lease is over; a row with no attempt left fails (contract §4.8).

        Returns:
            How many rows were freed or failed.
        """
        return self._execute(job_sql.RECOVER_EXPIRED, session, now_ms=self._clock.now_ms())

    def recover_owned(self, worker_ids: Iterable[str], *, session: Session | None = None) -> int:
        """Free every row held by workers that are known to be dead, as if their leases were over."""
        return self._execute(job_sql.RECOVER_OWNED, session, now_ms=self._clock.now_ms(), worker_ids=list(worker_ids))

    # Requeue

    def requeue_failed(self, *, session: Session | None = None) -> Requeued:
        """Make every failed row ready again with a fresh budget (contract §4.10)."""
        return self._requeue(job_sql.REQUEUE_ALL, session)

    def requeue_transient_failed(self, *, session: Session | None = None) -> Requeued:
        """Make every failed row ready again that is not classed unrecoverable."""
        return self._requeue(job_sql.REQUEUE_TRANSIENT, session)

    def requeue_job(self, job_id: str, *, session: Session | None = None) -> Requeued:
        """Make one failed row ready again, unless a ready or running row has its key.

        Raises:
            JobNotFoundError: there is no such row.
            InvalidInputError: the row is not failed.
        """
        with self._database.within(session) as tx:
            job = self.get_job(job_id, session=tx)
            if job.status != JobStatus.FAILED:
                raise InvalidInputError(f"job {job_id} is {job.status}; only a failed job can be requeued")
            return self._requeue(job_sql.REQUEUE_ONE, tx, id=job_id)

    def self_heal(self, *, session: Session | None = None) -> Requeued:
        """Requeue transiently failed rows, each at growing distances (spec: Scheduler helpers).

        At once the first time, then no earlier than 10 min · 2^(heals-1), at most 24 h, after it failed.
        """
        return self._requeue(job_sql.SELF_HEAL, session)

    def purge_retired_jobs(self, *, session: Session | None = None) -> int:
        """Delete every row of a retired kind (spec: Retired kinds)."""
        return self._execute(job_sql.PURGE_RETIRED, session)

    # One door for each shape of statement

    def _settle(self, statement: TextClause, job: Job, session: Session | None, **values: Any) -> bool:
        claim = {
            "id": job.id,
            "claim_token": job.claim_token,
            "attempts": job.attempts,
            "started_at_ms": job.started_at_ms,
        }
        return self._execute(statement, session, now_ms=self._clock.now_ms(), **claim, **values) == 1

    def _execute(self, statement: TextClause, session: Session | None, **values: Any) -> int:
        wanted = statement.compile().params.keys()
        with self._database.within(session) as tx:
            result = tx.connection().execute(statement, {name: values[name] for name in values if name in wanted})
            return result.rowcount

    def _requeue(self, statements: job_sql.Requeue, session: Session | None, **values: Any) -> Requeued:
        values["now_ms"] = self._clock.now_ms()
        with self._database.within(session) as tx:
            superseded = self._execute(statements.supersede, tx, **values)
            revived = self._execute(statements.revive, tx, **values)
            blocked = tx.execute(statements.count_left, values).scalar_one()
            return Requeued(revived=revived, superseded=superseded, blocked=blocked)
