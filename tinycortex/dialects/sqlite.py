"""SQLite: one file, several processes, one writer at a time."""

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, ExceptionContext, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.pool import ConnectionPoolEntry

from tinycortex.config import DatabaseSettings
from tinycortex.dialects.presence import FilePresence
from tinycortex.errors import (
    ConfigurationError,
    HostIOError,
    StorageBusyError,
    StorageCorruptError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)

logger = logging.getLogger(__name__)

_BEGIN = "tinycortex_begin"
_IDENTITY = "tinycortex_file"

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


class SQLiteDialect:
    """SQLite through the standard library's driver."""

    def create_engine(self, settings: DatabaseSettings) -> Engine:
        """Build the engine: WAL, foreign keys, busy timeout, and BEGIN IMMEDIATE for every write transaction."""
        path = database_path(settings.url).absolute()  # where the engine opens it, whatever folder we are in later
        if path.is_dir():
            raise ConfigurationError(f"the database path {path} is a folder; name a file in it")
        engine = create_engine(
            settings.url,
            # The driver's own transactions start late, as readers that must upgrade; ours start as writers.
            connect_args={
                "timeout": settings.busy_timeout_ms / 1000,
                "isolation_level": None,
                "check_same_thread": False,
            },
        )

        keep_if_damaged = _keeper(engine, path)

        @event.listens_for(engine, "connect")
        def _prepare(connection: sqlite3.Connection, _record: object) -> None:
            try:
                connection.execute("PRAGMA foreign_keys=ON")
                _set_journal(connection, settings, path)
                connection.execute("PRAGMA synchronous=FULL")
            except sqlite3.Error as error:
                keep_if_damaged(error)
                connection.close()
                raise

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN IMMEDIATE"))

        _follow_the_file(engine, path)
        return engine

    def exists(self, settings: DatabaseSettings) -> bool:
        """Tell whether the file is there; connecting to a missing one would make it."""
        return database_path(settings.url).exists()

    def reader(self, engine: Engine) -> Engine:
        """Return a view of ``engine`` whose transactions are deferred: in WAL they wait for nobody."""
        return engine.execution_options(**{_BEGIN: "BEGIN"})

    def classify(self, error: BaseException) -> type[StorageError] | None:
        """Return the storage error of a driver's error; None for one that is not about storage."""
        link: Any = error.orig if isinstance(error, DBAPIError) else error
        if isinstance(link, OSError):
            return HostIOError if is_host_io(link) else None
        code = _primary_code(link)
        return next((kind for codes, kind in _CLASSES if code in codes), None)

    def find_damage(self, connection: Connection) -> list[str]:
        """Return what ``PRAGMA integrity_check`` finds."""
        lines = connection.exec_driver_sql("PRAGMA integrity_check").scalars()
        return [line for line in lines if line != "ok"]

    def presence(self, settings: DatabaseSettings) -> FilePresence:
        """Return presence by lock files beside the database: the kernel drops a dead process's lock."""
        path = database_path(settings.url)
        return FilePresence(path.with_name(f"{path.name}-workers"))


def database_path(url: str) -> Path:
    """Return the file that a SQLite URL names, or raise ConfigurationError for a database in memory."""
    name = make_url(url).database
    if not name or name == ":memory:" or name.startswith("file:"):
        raise ConfigurationError(
            "the queue needs a SQLite file that several connections can open, such as sqlite:///chunks.db; "
            "a database in memory, or a file: URI, is not one"
        )
    return Path(name)


def _follow_the_file(engine: Engine, path: Path) -> None:
    """Open anew what was moved or replaced: what is written into a file without a name is lost."""

    @event.listens_for(engine, "connect")
    def _remember(_connection: sqlite3.Connection, record: ConnectionPoolEntry) -> None:
        record.info[_IDENTITY] = _identity(path)

    @event.listens_for(engine, "checkout")
    def _compare(_connection: sqlite3.Connection, record: ConnectionPoolEntry, _proxy: object) -> None:
        if record.info[_IDENTITY] != _identity(path):
            raise DisconnectionError(f"{path} is another file by now")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _keeper(engine: Engine, path: Path) -> Callable[[BaseException], None]:
    """Leave a damaged file and its write-ahead log as they are, for whoever wants to save them.

    The last connection that closes would write the log into the file and remove it. One that may only
    read cannot, so one such is opened when damage is met, and closed after all the others.
    """
    kept: list[sqlite3.Connection] = []

    def keep_if_damaged(error: BaseException) -> None:
        if not kept and is_sqlite_corrupt(error):
            kept.append(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, check_same_thread=False))
            with suppress(sqlite3.Error):  # the first read takes the file's lock, whatever it finds
                kept[0].execute("PRAGMA schema_version").fetchone()

    @event.listens_for(engine, "handle_error")
    def _keep(context: ExceptionContext) -> None:
        keep_if_damaged(context.original_exception)

    @event.listens_for(engine, "engine_disposed")
    def _let_go(_engine: Engine) -> None:
        while kept:
            kept.pop().close()

    return keep_if_damaged


def _set_journal(connection: sqlite3.Connection, settings: DatabaseSettings, path: Path) -> None:
    wanted = settings.journal_mode
    # Switching takes the file for itself and ignores the busy timeout, so two openers must take turns.
    give_up = time.monotonic() + settings.busy_timeout_ms / 1000
    while True:
        try:
            mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
            if mode != wanted:
                mode = connection.execute(f"PRAGMA journal_mode={wanted}").fetchone()[0]
            break
        except sqlite3.OperationalError as error:
            if not is_sqlite_busy(error) or time.monotonic() >= give_up:
                raise
            time.sleep(0.01)
    if mode != wanted:
        logger.warning("%s: SQLite refused journal mode %s and stays in %s; use a local disk", path, wanted, mode)
