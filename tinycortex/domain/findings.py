"""What can be wrong with a queue's database, how bad each fault is, and what to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from tinycortex.domain.redact import scrub_for_log


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """The queue cannot be trusted, or not be used, until something is done."""
    WARNING = "warning"
    """The queue works, and something in it waits for somebody."""


class FindingCode(StrEnum):
    """The faults that are looked for; scripts may compare these words."""

    DATABASE_MISSING = "database_missing"
    DATABASE_UNREADABLE = "database_unreadable"
    DATABASE_DAMAGED = "database_damaged"
    SCHEMA_MISSING = "schema_missing"
    SCHEMA_OUTDATED = "schema_outdated"
    SCHEMA_ALTERED = "schema_altered"
    DISK_FULL = "disk_full"
    DISK_LOW = "disk_low"
    LOG_LARGE = "log_large"
    JOURNAL_MODE = "journal_mode"
    LEASE_OVER = "lease_over"
    WORKER_DEAD = "worker_dead"
    KEY_BLOCKED = "key_blocked"
    KIND_UNHANDLED = "kind_unhandled"
    KIND_RETIRED = "kind_retired"
    STATUS_UNKNOWN = "status_unknown"
    CLOCK_AHEAD = "clock_ahead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault that was found.

    Attributes:
        code: which fault it is.
        severity: ``error`` or ``warning``; it follows from the code.
        found: what was seen, in one line, secrets masked.
        advice: what to do about it; it follows from the code.
    """

    code: FindingCode
    severity: Severity
    found: str
    advice: str

    @classmethod
    def of(cls, code: FindingCode, found: str) -> Self:
        """Build the finding that ``found`` says in the words of this one case."""
        return cls(
            code=code,
            severity=Severity.ERROR if code in _ERRORS else Severity.WARNING,
            found=" ".join(scrub_for_log(found).split()),
            advice=_ADVICE[code],
        )


_ERRORS = frozenset(
    {
        FindingCode.DATABASE_MISSING,
        FindingCode.DATABASE_UNREADABLE,
        FindingCode.DATABASE_DAMAGED,
        FindingCode.SCHEMA_MISSING,
        FindingCode.SCHEMA_OUTDATED,
        FindingCode.SCHEMA_ALTERED,
        FindingCode.DISK_FULL,
    }
)

_RECOVER = "start a worker, or run: tinycortex tick"

_ADVICE: Mapping[FindingCode, str] = {
    FindingCode.DATABASE_MISSING: (
        "check --database-url and the folder; to make a new database, run: tinycortex db upgrade"
    ),
    FindingCode.DATABASE_UNREADABLE: (
        "check the path, its permissions and its disk; a database that is busy, or whose last writer was killed, "
        "is readable again once a worker has opened it"
    ),
    FindingCode.DATABASE_DAMAGED: (
        "stop every program that uses the file, keep a copy of it and of its -wal, and restore a backup"
    ),
    FindingCode.SCHEMA_MISSING: "check --database-url; to add the schema, run: tinycortex db upgrade",
    FindingCode.SCHEMA_OUTDATED: "run: tinycortex db upgrade, or install the tinycortex that wrote a newer revision",
    FindingCode.SCHEMA_ALTERED: (
        "run: tinycortex db stamp --revision base, then: tinycortex db upgrade; it adds what is missing, and no row "
        "is lost"
    ),
    FindingCode.DISK_FULL: "free disk space at once: a write may be refused at any time",
    FindingCode.DISK_LOW: "free disk space, or move the database to a larger disk",
    FindingCode.LOG_LARGE: (
        "end the program that keeps a transaction open on the file; the log is removed when the last program closes it"
    ),
    FindingCode.JOURNAL_MODE: (
        "open the file once with these settings, as `tinycortex status` does; if it stays as it is, another program "
        "keeps it so, or it is on a network disk, where SQLite refuses WAL: move it to a local disk"
    ),
    FindingCode.LEASE_OVER: _RECOVER,
    FindingCode.WORKER_DEAD: _RECOVER,
    FindingCode.KEY_BLOCKED: "usually nothing: the active job does the work, and until it ends a retry leaves these",
    FindingCode.KIND_UNHANDLED: (
        "run a worker whose program has a handler for the kind; the command line knows the built-in kinds only"
    ),
    FindingCode.KIND_RETIRED: "run: tinycortex jobs purge-retired, or start a worker, which does so too",
    FindingCode.STATUS_UNKNOWN: "find the program that wrote the status; no worker will ever touch such a job",
    FindingCode.CLOCK_AHEAD: (
        "set the clocks of this machine and of those that write; a lease is not recovered before its end"
    ),
}
