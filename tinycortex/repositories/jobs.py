"""JobRepository: every operation on the queue's rows, each one statement or one transaction."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from tinycortex.domain import policy
from tinycortex.domain.jobs import JobStatus
from tinycortex.domain.kinds import KindSpec
from tinycortex.errors import InvalidInputError
from tinycortex.repositories import upkeep_sql
from tinycortex.repositories.execution import count_changed, execute
from tinycortex.repositories.job_life import JobLife
from tinycortex.repositories.job_reader import job_of
from tinycortex.telemetry import LeasesRecovered

_REQUEUE_ATTEMPTS = 5

_PURGE_BATCH = 500
"""Rows deleted in one transaction: some ten milliseconds of the write lock."""


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


class JobRepository(JobLife):
    """The rows of ``mem_tree_jobs``.

    Every method works in ``session`` when one is given, so that it commits or vanishes with the caller's
    own writes; without one, in a transaction of its own. See :class:`JobLife` for the life of one job and
    :class:`~tinycortex.repositories.job_reader.JobReader` for reading.
    """

    # Recover and release

    def release_running_locks(self, worker_id: str, *, session: Session | None = None) -> int:
        """Give back every row that ``worker_id`` holds, attempts too; rows of others are not touched."""
        values = {"worker_id": worker_id, "now_ms": self._clock.now_ms()}
        with self._database.within(session) as tx:
            cancelled = self._freed(tx, execute(tx, upkeep_sql.CANCEL_OWN, values).all())
            return cancelled + self._freed(tx, execute(tx, upkeep_sql.RELEASE_OWN, values).all())

    def release_unknown(
        self, worker_id: str, known: Collection[tuple[str, int]], *, session: Session | None = None
    ) -> int:
        """Give back, attempts too, the rows that ``worker_id`` holds by claims that it was never told of.

        A claim is kept without a word when the connection breaks after its commit and before the answer.

        Args:
            worker_id: whose claims are meant.
            known: those that it was told of, each by its row's id and its token.
            session: the caller's transaction.
        """
        with self._database.within(session) as tx:
            held = map(job_of, execute(tx, upkeep_sql.LIST_OWN, {"worker_id": worker_id}).all())
            unknown = [job for job in held if (job.id, job.claim_token) not in known]
            return sum(self.release(job, session=tx) for job in unknown)

    def recover_stale_locks(self, *, session: Session | None = None) -> int:
        """Free every running row whose lease is over; a row with no attempt left fails (contract §4.8).

        Returns:
            How many rows were freed or failed.
        """
        values = {"now_ms": self._clock.now_ms()}
        with self._database.within(session) as tx:
            return self._recovered(tx, execute(tx, upkeep_sql.RECOVER_EXPIRED, values).all())

    def recover_owned(self, worker_ids: Iterable[str], *, session: Session | None = None) -> int:
        """Free every row held by workers that are known to be dead, as if their leases were over."""
        values = {"worker_ids": list(worker_ids), "now_ms": self._clock.now_ms()}
        with self._database.within(session) as tx:
            return self._recovered(tx, execute(tx, upkeep_sql.RECOVER_OWNED, values).all())

    def pass_on_left_requests(self, *, session: Session | None = None) -> int:
        """Enqueue the requests that rows kept while they ran, where another program settled them; return how many."""
        with self._database.reading_within(session) as tx:
            if session is None and execute(tx, upkeep_sql.LEFT_REQUESTS, {}).first() is None:
                return 0  # as nearly always: no write lock is taken for it
        with self._database.within(session) as tx:
            return self._freed(tx, execute(tx, upkeep_sql.LEFT_REQUESTS, {}).all())

    def _recovered(self, tx: Session, rows: Sequence[Row[Any]]) -> int:
        if rows and self.emitter.is_heard:
            statuses = [row.status for row in rows]
            failed, cancelled = statuses.count(JobStatus.FAILED), statuses.count(JobStatus.CANCELLED)
            self._tell(tx, LeasesRecovered(count=len(rows), failed=failed, cancelled=cancelled))
        return self._freed(tx, rows)

    def _freed(self, tx: Session, rows: Sequence[Row[Any]]) -> int:
        for row in rows:
            self._pass_on_request(tx, row)
        return len(rows)

    # Requeue

    def requeue_failed(self, *, session: Session | None = None) -> Requeued:
        """Make every failed row ready again with a fresh budget (contract §4.10)."""
        return self._requeue(upkeep_sql.REQUEUE_ALL, session)

    def requeue_transient_failed(self, *, session: Session | None = None) -> Requeued:
        """Make every failed row ready again that is not classed unrecoverable."""
        return self._requeue(upkeep_sql.REQUEUE_TRANSIENT, session)

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
            return self._requeue(upkeep_sql.REQUEUE_ONE, tx, id=job_id)

    def self_heal(self, *, session: Session | None = None) -> Requeued:
        """Requeue transiently failed rows, each at growing distances (spec: Scheduler helpers).

        At once the first time, then no earlier than 10 min · 2^(heals-1), at most 24 h, after it failed.
        """
        return self._requeue(upkeep_sql.SELF_HEAL, session)

    def _requeue(self, statements: upkeep_sql.Requeue, session: Session | None, **values: Any) -> Requeued:
        values["now_ms"] = self._clock.now_ms()
        with self._database.within(session) as tx:
            for left in reversed(range(_REQUEUE_ATTEMPTS)):
                try:
                    with tx.begin_nested():
                        requeued = Requeued(
                            superseded=count_changed(tx, statements.supersede, values),
                            revived=count_changed(tx, statements.revive, values),
                            blocked=int(execute(tx, statements.count_left, values).scalar_one()),
                        )
                    break
                except IntegrityError:  # a twin was committed by another writer since the search for twins
                    if not left:
                        raise
            if requeued.revived:
                self._database.announce(tx)
            return requeued

    # Purge

    def purge_retired_jobs(self, *, session: Session | None = None) -> int:
        """Delete every row of a retired kind (spec: Retired kinds)."""
        with self._database.within(session) as tx:
            return count_changed(tx, upkeep_sql.PURGE_RETIRED, {})

    def purge(self, older_than_ms: int, statuses: Iterable[JobStatus], *, kinds: Iterable[KindSpec] = ()) -> int:
        """Delete the settled rows that completed more than ``older_than_ms`` ago; return how many.

        Works in batches, each a short transaction of its own, so that no writer waits long.

        Args:
            older_than_ms: least age of a row's completion (ms).
            statuses: terminal statuses; a ready or running row is never deleted.
            kinds: kinds whose ``remember_ms`` keeps their rows for longer.

        Raises:
            InvalidInputError: the age is no whole number of ms, or a status is not terminal.
            StorageError: some batches may have been deleted before.
        """
        if isinstance(older_than_ms, bool) or not isinstance(older_than_ms, int):
            raise InvalidInputError(f"older_than_ms is a whole number of milliseconds, not {older_than_ms!r}")
        if not 0 <= older_than_ms <= policy.MAX_TIME_MS:
            raise InvalidInputError(f"older_than_ms is between 0 and {policy.MAX_TIME_MS} ms, not {older_than_ms}")
        wanted = [JobStatus.parse(status) for status in statuses]
        if alive := [status for status in wanted if not status.is_terminal]:
            raise InvalidInputError(f"only settled rows can be purged, not {alive[0]} ones")
        remembered = tuple((spec.kind, spec.remember_ms) for spec in kinds if spec.remember_ms > older_than_ms)
        now_ms = self._clock.now_ms()
        values = {"now_ms": now_ms, "before_ms": now_ms - older_than_ms, "batch": _PURGE_BATCH}
        return sum(sum(self._purge_batches(status, remembered, values)) for status in wanted)

    def _purge_batches(
        self, status: JobStatus, remembered: tuple[tuple[str, int], ...], values: dict[str, Any]
    ) -> Iterator[int]:
        search = upkeep_sql.find_purgeable(status, remembered)
        while True:
            with self._database.reading() as tx:
                ids = list(execute(tx, search, values).scalars())
            if not ids:
                return
            with self._database.transaction() as tx:
                yield count_changed(tx, upkeep_sql.PURGE, values | {"ids": ids, "status": status.value})
