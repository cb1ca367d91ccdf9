"""Reading the queue's rows: one row, lists, counts. Readers never wait for a writer."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from operator import itemgetter
from typing import Any

from sqlalchemy.orm import Session

from tinycortex.db import Database
from tinycortex.domain.jobs import Job, JobStatus
from tinycortex.errors import FailureClass, InvalidInputError, JobNotFoundError
from tinycortex.repositories import job_sql, reader_sql
from tinycortex.repositories.execution import execute

_STATUSES = {status.value: status for status in JobStatus}

_STATUS = job_sql.JOB_FIELDS.index("status")

# Where whole numbers belong, and what stands for anything else there.
_WHOLE_NUMBERS = {
    place: 0 if field.type is int else None
    for place, field in enumerate(fields(Job))
    if field.type in {int, int | None}
}

_is_fitting = frozenset({int, type(None)}).issuperset
_pick_whole_numbers = itemgetter(*_WHOLE_NUMBERS)

# A frozen dataclass sets its fields by name, one call each, which takes as long as to find and read the row.
_SET_FIELDS: tuple[Callable[[Job, Any], None], ...] = tuple(getattr(Job, name).__set__ for name in job_sql.JOB_FIELDS)


def job_of(row: Iterable[Any]) -> Job:
    """Return the snapshot of one row that holds every column, in the order of :data:`job_sql.COLUMNS`."""
    values = tuple(row)
    if not _is_fitting(map(type, _pick_whole_numbers(values))):  # SQLite lets another program write text there
        values = tuple(
            _WHOLE_NUMBERS[place] if place in _WHOLE_NUMBERS and not _is_fitting([type(value)]) else value
            for place, value in enumerate(values)
        )
    job = Job.__new__(Job)
    for set_field, value in zip(_SET_FIELDS, values, strict=True):
        set_field(job, value)
    # A word that we do not know was written by another program; it is shown, never guessed at.
    _SET_FIELDS[_STATUS](job, _STATUSES.get(values[_STATUS], values[_STATUS]))
    return job


class JobReader:
    """The reading half of :class:`~tinycortex.repositories.jobs.JobRepository`.

    Every method reads in ``session`` when one is given, and else on a snapshot of its own.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def find_job(self, job_id: str, *, session: Session | None = None) -> Job | None:
        """Return one row, or None."""
        with self._database.reading_within(session) as tx:
            row = execute(tx, reader_sql.GET_JOB, {"id": job_id}).first()
            return None if row is None else job_of(row)

    def get_job(self, job_id: str, *, session: Session | None = None) -> Job:
        """Return one row, or raise :class:`JobNotFoundError`."""
        job = self.find_job(job_id, session=session)
        if job is None:
            raise JobNotFoundError(f"there is no job {job_id!r}; `tinycortex jobs list` shows those there are")
        return job

    def list_jobs(
        self,
        *,
        status: JobStatus | None = None,
        kind: str | None = None,
        limit: int = 100,
        session: Session | None = None,
    ) -> list[Job]:
        """List rows, newest first."""
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise InvalidInputError(f"limit is a whole number above 0, not {limit!r}")
        wanted = {"status": None if status is None else JobStatus.parse(status).value, "kind": kind}
        given = {name: value for name, value in wanted.items() if value is not None}
        with self._database.reading_within(session) as tx:
            found = execute(tx, reader_sql.list_jobs(tuple(given)), {**given, "limit": limit})
            return [job_of(row) for row in found]

    def has_key(self, kind: str, dedupe_key: str, *, session: Session | None = None) -> bool:
        """Tell whether any row of ``kind``, whatever its status, has ``dedupe_key``."""
        with self._database.reading_within(session) as tx:
            return execute(tx, reader_sql.HAS_KEY, {"kind": kind, "dedupe_key": dedupe_key}).first() is not None

    def count_by_kind_and_status(self, *, session: Session | None = None) -> dict[tuple[str, str], int]:
        """Count the rows by (kind, status)."""
        with self._database.reading_within(session) as tx:
            return {(row.kind, row.status): row.jobs for row in execute(tx, reader_sql.COUNT_BY_KIND_AND_STATUS, {})}

    def count_by_status(self, *, session: Session | None = None) -> dict[JobStatus, int]:
        """Count the rows by status; every status is there, zero or not."""
        counts = dict.fromkeys(JobStatus, 0)
        for (_kind, status), jobs in self.count_by_kind_and_status(session=session).items():
            if status in _STATUSES:
                counts[_STATUSES[status]] += jobs
        return counts

    def count_failed(self, *, session: Session | None = None) -> dict[tuple[str | None, str | None], int]:
        """Count the failed rows by (failure_reason, failure_class)."""
        with self._database.reading_within(session) as tx:
            return {
                (row.failure_reason, row.failure_class): row.jobs for row in execute(tx, reader_sql.COUNT_FAILED, {})
            }

    def count_failed_unrecoverable(self, *, session: Session | None = None) -> int:
        """Count the failed rows that are parked because retrying cannot help (spec: Typed failures)."""
        failed = self.count_failed(session=session)
        return sum(
            jobs for (_reason, failure_class), jobs in failed.items() if failure_class == FailureClass.UNRECOVERABLE
        )

    def find_next_ready_at(self, kinds: Iterable[str], *, session: Session | None = None) -> int | None:
        """Return the earliest ``available_at_ms`` of the ready rows of ``kinds``, or None when there are none."""
        wanted = tuple(kinds)
        if not wanted:
            return None
        with self._database.reading_within(session) as tx:
            return _whole(execute(tx, reader_sql.next_ready_at(wanted), {}).scalar())

    def find_oldest_ready_at(self, *, session: Session | None = None) -> int | None:
        """Return when the ready row that has waited longest became due (ms, UTC; may be to come), or None."""
        with self._database.reading_within(session) as tx:
            return _whole(execute(tx, reader_sql.OLDEST_READY_AT, {}).scalar())

    def count_expired(self, now_ms: int, *, session: Session | None = None) -> int:
        """Count the running rows whose lease is over at ``now_ms``."""
        with self._database.reading_within(session) as tx:
            return int(execute(tx, reader_sql.COUNT_EXPIRED, {"now_ms": now_ms}).scalar_one())

    def list_owners(self, *, session: Session | None = None) -> list[str]:
        """List the workers that hold running rows."""
        with self._database.reading_within(session) as tx:
            return [owner for owner in execute(tx, reader_sql.LIST_OWNERS, {}).scalars() if isinstance(owner, str)]


def _whole(found: object) -> int | None:
    return found if isinstance(found, int) else None
