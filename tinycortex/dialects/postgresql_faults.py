"""What PostgreSQL's errors mean, decided by their SQLSTATE (contract §4.12)."""

import psycopg
from sqlalchemy.exc import DBAPIError

from tinycortex.errors import (
    HostIOError,
    StorageBusyError,
    StorageCorruptError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)

READ_ONLY = "25006"
"""The server, a standby perhaps, takes no writes."""

UNDONE_FOR_OTHERS = frozenset({"40001", "40P01"})
"""The transaction conflicted with others, and was undone to let them go on."""

# The longest prefix that fits decides.
_CLASSES: dict[str, type[StorageError]] = {
    "08": StorageUnavailableError,  # the connection
    READ_ONLY: StorageUnavailableError,
    "28": StorageUnavailableError,  # refused by pg_hba.conf, or a password that is being changed
    "3D000": StorageUnavailableError,  # no such database
    "40001": StorageBusyError,  # serialization failure
    "40P01": StorageBusyError,  # deadlock
    "53": StorageUnavailableError,  # out of memory, too many connections
    "53100": StorageFullError,
    "55P03": StorageBusyError,  # lock time-out
    "57014": StorageBusyError,  # statement time-out, or cancelled by an administrator
    "57P": StorageUnavailableError,  # shut down, crashed, starting up
    "58": HostIOError,
    "XX001": StorageCorruptError,
    "XX002": StorageCorruptError,
}


def sqlstate_of(error: BaseException) -> str | None:
    """Return the SQLSTATE that a driver's error carries, or the one inside SQLAlchemy's; None when it has none."""
    link = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    found = getattr(link, "sqlstate", None)
    return found if isinstance(found, str) else None


def storage_error_of(error: BaseException) -> type[StorageError] | None:
    """Return the storage error that ``error`` stands for; None for one that is not about storage."""
    link = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    state = sqlstate_of(error)
    if state is not None:
        fitting = [_CLASSES[state[:length]] for length in (2, 3, 5) if state[:length] in _CLASSES]
        return fitting[-1] if fitting else None
    # Without a word of the server's, the connection itself is the fault: refused, cut, or closed.
    return StorageUnavailableError if isinstance(link, psycopg.OperationalError) else None
