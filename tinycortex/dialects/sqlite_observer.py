"""Looking at a SQLite file without changing anything: no file is made, no journal switched, no log written."""

import shutil
import sqlite3
from collections.abc import Hashable, Iterator
from contextlib import closing
from pathlib import Path

from sqlalchemy import Connection, Engine, NullPool, create_engine, event

from tinycortex.config import DatabaseSettings
from tinycortex.dialects.base import Observer
from tinycortex.domain.findings import Finding, FindingCode

_MIB = 2**20

_ROOM_NEEDED = 32 * _MIB
"""Bytes that the log may grow by before its next checkpoint, with room for a large transaction."""
_ROOM_WANTED = 256 * _MIB
_LOG_WANTED = 64 * _MIB
"""Bytes; SQLite checkpoints a log at 16 MB, so one of this size has not been taken over for long."""


def observe(path: Path, settings: DatabaseSettings) -> Observer:
    """Return a way to read the file at ``path`` (absolute) that changes nothing and never makes it.

    A reader of a file in WAL mode makes a log and its index beside it, and leaves them there. So a file that
    no program has open is read without locks, as it stands, and ``holds`` tells afterwards whether it stood
    still. Beside a log that a killed process left, SQLite may make the index (``-shm``).
    """
    standing = _find_standing(path) if find_journal_mode(path) == "wal" else None
    options = "mode=ro" if standing is None else "mode=ro&immutable=1"

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{path.as_uri()}?{options}",
            uri=True,
            timeout=settings.busy_timeout_ms / 1000,
            isolation_level=None,
            check_same_thread=False,
        )
        connection.text_factory = _faithful
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
    _begin_as_reader(engine)
    return Observer(engine=engine, holds=lambda: standing is None or _find_standing(path) == standing)


def _faithful(raw: bytes) -> str:
    # What is no UTF-8 becomes lone surrogates, which no text of ours has: it is seen, and told from all others.
    return raw.decode(errors="surrogateescape")


def _begin_as_reader(engine: Engine) -> None:
    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")


def _find_standing(path: Path) -> Hashable | None:
    """Return what tells one state of a file in WAL mode from the next; None when a program may have it open."""
    log = _beside(path, "-wal")
    try:
        if _beside(path, "-shm").exists() or (log.exists() and log.stat().st_size > 0):
            return None
        found = path.stat()
    except OSError:  # whoever reads the file will say so
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def find_journal_mode(path: Path) -> str | None:
    """Return ``wal`` or ``rollback``, as the file itself says; None when it cannot be read."""
    # The file's head says it, but to open and close the file by ourselves would drop the locks that other
    # connections of this process hold on it. SQLite refuses WAL in this way to who takes no locks.
    try:
        connection = sqlite3.connect(f"{path.as_uri()}?mode=ro&nolock=1", uri=True)
    except sqlite3.Error:
        return None
    with closing(connection):
        try:
            connection.execute("PRAGMA schema_version").fetchone()
        except sqlite3.Error as error:
            return "wal" if error.sqlite_errorcode == sqlite3.SQLITE_CANTOPEN else None
    return "rollback"


def find_journal_faults(path: Path, settings: DatabaseSettings) -> Iterator[Finding]:
    """Yield a finding when the file's journal is another than the settings want."""
    mode = find_journal_mode(path)
    if mode is not None and (mode == "wal") != (settings.journal_mode == "wal"):
        found = f"{path.name} is in journal mode {mode}, and the settings want {settings.journal_mode}"
        yield Finding.of(FindingCode.JOURNAL_MODE, found)


def find_room_faults(path: Path) -> Iterator[Finding]:
    """Yield what is wrong with the room beside the file: a disk that is nearly full, a log that only grows."""
    free = shutil.disk_usage(path.parent).free
    if free < _ROOM_WANTED:
        code = FindingCode.DISK_FULL if free < _ROOM_NEEDED else FindingCode.DISK_LOW
        yield Finding.of(code, f"{free // _MIB} MiB are free beside {path.name}")
    log = _beside(path, "-wal")
    if log.exists() and (size := log.stat().st_size) > _LOG_WANTED:
        yield Finding.of(FindingCode.LOG_LARGE, f"the write-ahead log {log.name} has grown to {size // _MIB} MiB")


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
