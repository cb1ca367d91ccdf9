"""What SQLite's and the host's errors mean, decided by their codes (contract §4.12)."""

import sqlite3
from collections.abc import Iterator

from sqlalchemy.exc import DBAPIError

from tinycortex.errors import (
    HostIOError,
    StorageBusyError,
    StorageCorruptError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_IO_TRANSIENT = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_UNWRITABLE = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_PROTOCOL})
_HOST_IO_ERRNOS = frozenset({5, 28, 30})  # EIO, ENOSPC, EROFS


def is_sqlite_busy(error: BaseException) -> bool:
    """Tell whether ``error`` comes from SQLITE_BUSY or SQLITE_LOCKED (contract §4.12)."""
    return _has_code(error, _BUSY)


def is_sqlite_io_transient(error: BaseException) -> bool:
    """Tell whether ``error`` comes from SQLITE_IOERR (with every extended code) or SQLITE_CANTOPEN."""
    return _has_code(error, _IO_TRANSIENT)


def is_sqlite_disk_full(error: BaseException) -> bool:
    """Tell whether ``error`` comes from SQLITE_FULL."""
    return _has_code(error, frozenset({sqlite3.SQLITE_FULL}))


def is_sqlite_corrupt(error: BaseException) -> bool:
    """Tell whether ``error`` comes from SQLITE_CORRUPT or SQLITE_NOTADB."""
    return _has_code(error, _CORRUPT)


def is_host_io(error: BaseException) -> bool:
    """Tell whether ``error`` comes from the operating system's EIO, ENOSPC or EROFS."""
    return any(isinstance(link, OSError) and link.errno in _HOST_IO_ERRNOS for link in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error``, the driver's error inside it, and all that caused it, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [link.__context__, link.__cause__]
        if isinstance(link, DBAPIError):
            waiting.append(link.orig)


def _primary_code(error: BaseException) -> int | None:
    code = getattr(error, "sqlite_errorcode", None) if isinstance(error, sqlite3.Error) else None
    return None if code is None else code & 0xFF  # the low byte of an extended code is its primary one


def _has_code(error: BaseException, codes: frozenset[int]) -> bool:
    return any(_primary_code(link) in codes for link in _chain(error))


_CLASSES: tuple[tuple[frozenset[int], type[StorageError]], ...] = (
    (_BUSY, StorageBusyError),
    (frozenset({sqlite3.SQLITE_FULL}), StorageFullError),
    (_CORRUPT, StorageCorruptError),
    (_IO_TRANSIENT | _UNWRITABLE, StorageUnavailableError),
)


def storage_error_of(error: BaseException) -> type[StorageError] | None:
    """Return the storage error that ``error`` stands for; None for one that is not about storage."""
    link = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    if isinstance(link, OSError):
        return HostIOError if is_host_io(link) else None
    code = _primary_code(link)
    return next((kind for codes, kind in _CLASSES if code in codes), None)
