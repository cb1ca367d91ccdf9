"""Diagnosis: what is wrong with the queue's database, found without changing anything."""

from collections.abc import Iterator

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from tinycortex import schema
from tinycortex.config import Settings
from tinycortex.db import Database, ObservedDatabase
from tinycortex.dialects import Presence
from tinycortex.domain.clock import Clock
from tinycortex.domain.findings import Finding, FindingCode, Severity
from tinycortex.domain.jobs import JobStatus
from tinycortex.domain.kinds import is_retired_kind
from tinycortex.errors import StorageCorruptError, StorageError
from tinycortex.handlers.registry import HandlerRegistry
from tinycortex.repositories.job_faults import JobFaults, Sample

_LOOKS = 3
"""A second look is needed when a program opens the file during the first; it then takes locks."""

_FAULTS_TOLD = 3

_CLOCK_TOLERANCE_MS = 3_600_000
"""No two clocks that anybody keeps differ by an hour."""

_LONGEST_LEASE_MS = 86_400_000
"""The longest lease that ``queue.lease_ms`` may ask for; a kind's own may be longer."""


class Diagnosis:
    """Looks for faults of the file, the schema and the rows, and of the disk and the clock around them."""

    def __init__(self, settings: Settings, registry: HandlerRegistry, clock: Clock) -> None:
        self._settings = settings
        self._registry = registry
        self._clock = clock

    def diagnose(self) -> list[Finding]:
        """Return what was found, errors first; empty when nothing is wrong. It reads every page.

        Nothing is made, repaired or tidied, the -wal beside a SQLite file included. A fault that makes the
        rest doubtful, such as damage, ends the search.

        Raises:
            ConfigurationError: the URL cannot serve as a queue.
        """
        findings: list[Finding] = []
        for _look in range(_LOOKS):
            database = ObservedDatabase(self._settings.database)
            try:
                findings = list(self._find_all(database))
                if database.was_still():
                    break
            finally:
                database.dispose()
        else:
            found = f"database {database.masked_url} was changed beneath each of {_LOOKS} looks"
            findings = [Finding.of(FindingCode.DATABASE_UNREADABLE, found)]
        return sorted(findings, key=lambda finding: finding.severity is not Severity.ERROR)

    def _find_all(self, database: Database) -> Iterator[Finding]:
        try:
            yield from self._search(database)
        except StorageCorruptError as error:
            yield Finding.of(FindingCode.DATABASE_DAMAGED, str(error))
        except (StorageError, OSError) as error:
            yield Finding.of(FindingCode.DATABASE_UNREADABLE, str(error))
        except DBAPIError as error:
            found = f"database {database.masked_url}: {error.orig}"
            yield Finding.of(FindingCode.DATABASE_UNREADABLE, found)

    def _search(self, database: Database) -> Iterator[Finding]:
        if not database.exists():
            yield Finding.of(FindingCode.DATABASE_MISSING, f"there is no database at {database.masked_url}")
            return
        yield from database.find_room_faults()
        if damage := database.find_damage():
            told = "; ".join(damage[:_FAULTS_TOLD])
            found = f"faults in what database {database.masked_url} stores: {len(damage)}, such as: {told}"
            yield Finding.of(FindingCode.DATABASE_DAMAGED, found)
            return
        revision = schema.find_revision(database)
        if revision is None:
            found = f"database {database.masked_url} has no tinycortex schema"
            yield Finding.of(FindingCode.SCHEMA_MISSING, found)
        elif revision != schema.HEAD:
            found = f"database {database.masked_url} is at revision {revision}, this tinycortex needs {schema.HEAD}"
            yield Finding.of(FindingCode.SCHEMA_OUTDATED, found)
        else:
            yield from database.find_journal_faults()
            yield from self._search_tables(database)

    def _search_tables(self, database: Database) -> Iterator[Finding]:
        differences = schema.find_differences(database)
        for difference in differences:
            yield Finding.of(FindingCode.SCHEMA_ALTERED, difference)
        faults = JobFaults(database)
        try:
            with database.reading() as session:
                yield from self._search_rows(faults, session)
                yield from self._search_leases(faults, database.presence, session)
        except DBAPIError:
            if not differences:  # else the rows can be read once the tables are whole
                raise

    def _search_rows(self, faults: JobFaults, session: Session) -> Iterator[Finding]:
        now_ms = self._clock.now_ms()
        longest_ms = max([_LONGEST_LEASE_MS, *(spec.lease_ms or 0 for spec in self._registry.list_specs())])
        ahead_ms = now_ms + _CLOCK_TOLERANCE_MS
        yield from _told(
            FindingCode.CLOCK_AHEAD,
            faults.find_ahead(ahead_ms, ahead_ms + longest_ms, session=session),
            "lie more than an hour ahead of this machine's clock",
        )
        yield from _told(
            FindingCode.KEY_BLOCKED,
            faults.find_blocked(session=session),
            "failed, and a ready or running one has their key",
        )
        yield from _told(FindingCode.KIND_RETIRED, faults.find_retired(session=session), "are of retired kinds")
        for (kind, status), jobs in faults.count_by_kind_and_status(session=session).items():
            if status not in tuple(JobStatus):
                yield Finding.of(FindingCode.STATUS_UNKNOWN, f"jobs of kind {kind!r} in status {status!r}: {jobs}")
            elif status == JobStatus.READY and not (is_retired_kind(kind) or self._registry.find_spec(kind)):
                found = f"jobs of kind {kind!r} that wait for a handler, and this process has none: {jobs}"
                yield Finding.of(FindingCode.KIND_UNHANDLED, found)

    def _search_leases(self, faults: JobFaults, presence: Presence, session: Session) -> Iterator[Finding]:
        yield from _told(
            FindingCode.LEASE_OVER,
            faults.find_expired(self._clock.now_ms(), session=session),
            "run without a lease, or longer than it",
        )
        dead = presence.find_dead(faults.list_owners(session=session))
        yield from _told(
            FindingCode.WORKER_DEAD,
            faults.find_owned(dead, session=session) if dead else None,
            "are held by workers whose process has ended",
        )


def _told(code: FindingCode, sample: Sample | None, what: str) -> Iterator[Finding]:
    if sample is not None:
        yield Finding.of(code, f"jobs that {what}: {sample.jobs}, such as {sample.example}")
