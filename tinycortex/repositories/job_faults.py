"""Looking for faults among the queue's rows: how many jobs have one, and an example of them."""

from collections.abc import Iterable
from typing import NamedTuple

from sqlalchemy import TextClause
from sqlalchemy.orm import Session

from tinycortex.repositories import fault_sql
from tinycortex.repositories.execution import execute
from tinycortex.repositories.job_reader import JobReader


class Sample(NamedTuple):
    """Jobs with one fault: how many there are, and the id of one."""

    jobs: int
    example: str


class JobFaults(JobReader):
    """Reads what is wrong with rows. Every search returns None when no row has the fault."""

    def find_expired(self, now_ms: int, *, session: Session | None = None) -> Sample | None:
        """Look for running rows whose lease is over at ``now_ms``, or that have none."""
        return self._find(fault_sql.SAMPLE_EXPIRED, session, now_ms=now_ms)

    def find_owned(self, worker_ids: Iterable[str], *, session: Session | None = None) -> Sample | None:
        """Look for running rows that ``worker_ids`` hold."""
        return self._find(fault_sql.SAMPLE_OWNED, session, worker_ids=list(worker_ids))

    def find_blocked(self, *, session: Session | None = None) -> Sample | None:
        """Look for failed rows that no retry can revive, because a ready or running row has their key."""
        return self._find(fault_sql.SAMPLE_BLOCKED, session)

    def find_retired(self, *, session: Session | None = None) -> Sample | None:
        """Look for rows of retired kinds, whatever their status."""
        return self._find(fault_sql.SAMPLE_RETIRED, session)

    def find_ahead(self, written_ms: int, leased_ms: int, *, session: Session | None = None) -> Sample | None:
        """Look for rows created or started after ``written_ms``, or leased to beyond ``leased_ms``."""
        return self._find(fault_sql.SAMPLE_AHEAD, session, written_ms=written_ms, leased_ms=leased_ms)

    def _find(self, statement: TextClause, session: Session | None, **values: object) -> Sample | None:
        with self._database.reading_within(session) as tx:
            row = execute(tx, statement, values).one()
            return Sample(row.jobs, row.example) if row.jobs else None
