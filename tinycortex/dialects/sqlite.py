"""SQLite: one file, several processes, one writer at a time."""

import logging
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

from sqlalchemy import Connection, Engine, ExceptionContext, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.pool import ConnectionPoolEntry

from tinycortex.config import DatabaseSettings
from tinycortex.dialects import sqlite_observer
from tinycortex.dialects.base import Observer
from tinycortex.dialects.guard import Guard
from tinycortex.dialects.presence import FilePresence
from tinycortex.dialects.sqlite_faults import is_sqlite_busy, is_sqlite_corrupt, storage_error_of
from tinycortex.dialects.sqlite_watch import FileWatch, file_identity
from tinycortex.domain.clock import SystemClock
from tinycortex.domain.findings import Finding
from tinycortex.errors import ConfigurationError, StorageError, TransactionEndedError

logger = logging.getLogger(__name__)

_WRITE = "BEGIN IMMEDIATE"

_BEGIN = "tinycortex_begin"
_SYNCHRONOUS = "tinycortex_synchronous"
_RESULTS = "tinycortex_results"
_JOURNAL = "tinycortex_journal"
_IS_HERE = "tinycortex_is_here"

_PAGE_BYTES = 1024
"""The pages of a file that is made here. The keys of jobs are random, so that nearly every job changes a page of its
own in the index of the keys: the smaller that is, the less is written for it."""

_LOG_BYTES = 16 * 1024 * 1024
"""What the write-ahead log holds before SQLite copies it into the file, and what of it stays on the disk after that.
A page that was changed many times meanwhile is copied once."""

_LOOK_EVERY_S = (0.0005, 0.016)
"""How long a writer waits for the lock before it looks again. Shorter waits are fairer, and cost more than they give:
whoever finds the file changed by another process has to read its pages anew."""

_NO_END = "{} is refused here: the transaction commits, or is rolled back, when its block ends"
_OVER = (
    "the transaction is over: SQLite rolled it back for an error that its block caught (a full disk, OR ROLLBACK), "
    "or the block ended it by itself; let such an error through, and write what must stay in a transaction anew"
)


class SQLiteDialect:
    """SQLite through the standard library's driver."""

    row_lock = ""
    has_arrays = False
    has_schemas = False

    def create_engine(self, settings: DatabaseSettings, *, may_create: bool = False) -> Engine:
        """Build the engine: WAL, foreign keys, busy timeout, and BEGIN IMMEDIATE for every write transaction."""
        path = _file_of(settings)
        engine = create_engine(
            settings.url,
            # Handlers hold connections for as long as they like; the worker's own statements must not wait for them.
            max_overflow=-1,
            # The driver's own transactions start late, as readers that must upgrade; ours start as writers.
            connect_args={
                "timeout": settings.busy_timeout_ms / 1000,
                "isolation_level": None,
                "check_same_thread": False,
            },
        )

        @event.listens_for(engine, "do_connect")
        def _make_no_file(_dialect: object, _record: object, arguments: list[Any], options: dict[str, Any]) -> None:
            if not may_create:  # SQLite makes an empty one otherwise, in place of a file that was deleted
                arguments[0], options["uri"] = f"{path.as_uri()}?mode=rw", True

        keep_if_damaged = _keeper(engine, path)

        @event.listens_for(engine, "connect")
        def _prepare(connection: sqlite3.Connection, record: ConnectionPoolEntry) -> None:
            connection.text_factory = _readable
            try:
                connection.execute("PRAGMA foreign_keys=ON")
                if may_create:
                    connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")  # a file that has pages keeps its own
                record.info[_JOURNAL] = _set_journal(connection, settings, path)
                connection.execute("PRAGMA synchronous=FULL")
                (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
                connection.execute(f"PRAGMA wal_autocheckpoint={_LOG_BYTES // page_bytes}")
                # Else the log of one large transaction stays as large as it was, for as long as anybody is connected.
                connection.execute(f"PRAGMA journal_size_limit={_LOG_BYTES}")
            except sqlite3.Error as error:
                keep_if_damaged(error)
                connection.close()
                raise

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            options = connection.get_execution_options()
            _set(connection, "synchronous", options.get(_SYNCHRONOUS, "FULL"))
            begin = options.get(_BEGIN, _WRITE)
            if begin == _WRITE:
                _wait_for_the_lock(connection, settings.busy_timeout_ms)
            else:
                _set(connection, "busy_timeout", settings.busy_timeout_ms)
                connection.exec_driver_sql(begin)

        _guard(engine)
        _follow_the_file(engine, path)
        return engine

    def observe(self, settings: DatabaseSettings) -> Observer:
        """Return a way to read the file that changes nothing."""
        return sqlite_observer.observe(_file_of(settings), settings)

    def exists(self, settings: DatabaseSettings) -> bool:
        """Tell whether the file is there; connecting to a missing one would make it."""
        return database_path(settings.url).exists()

    def reader(self, engine: Engine) -> Engine:
        """Return a view of ``engine`` whose transactions are deferred: in WAL they wait for nobody."""
        return engine.execution_options(**{_BEGIN: "BEGIN"})

    def quick(self, engine: Engine, settings: DatabaseSettings) -> Engine:
        """Return a view of ``engine`` that syncs the log at checkpoints only; in WAL the file stays sound."""
        return engine.execution_options(**{_SYNCHRONOUS: "NORMAL"}) if settings.journal_mode == "wal" else engine

    def can_go_on(self, connection: Connection) -> bool:
        """Tell whether the file is still where it was opened: what is written into one without a name is lost."""
        return bool(connection.info[_IS_HERE]())

    def clock(self, engine: Engine) -> SystemClock:  # noqa: ARG002 - one file, one machine, one clock
        """Return the machine's own clock."""
        return SystemClock()

    def classify(self, error: BaseException) -> type[StorageError] | None:
        """Return the storage error of a driver's error; None for one that is not about storage."""
        return storage_error_of(error)

    def was_undone_for_others(self, error: BaseException | None) -> bool:  # noqa: ARG002 - one writer has no rival
        """Return False: writers take turns."""
        return False

    @contextmanager
    def keep_open(self, connection: Connection) -> Iterator[None]:
        """Have SQLite itself refuse BEGIN, COMMIT and ROLLBACK, from whatever layer they come."""
        driver: Any = connection.connection.dbapi_connection
        refused: list[str] = []

        def authorize(action: int, word: str | None, *_rest: object) -> int:
            if action != sqlite3.SQLITE_TRANSACTION:
                return sqlite3.SQLITE_OK
            refused.append(str(word))
            return sqlite3.SQLITE_DENY

        driver.set_authorizer(authorize)
        try:
            yield
        except Exception as error:
            if refused:
                raise TransactionEndedError(_NO_END.format(refused[0])) from error
            raise
        finally:
            driver.set_authorizer(None)
            if refused:  # SQLAlchemy may take it for ended by now, and would leave it open
                driver.rollback()
        if refused:
            raise TransactionEndedError(_NO_END.format(refused[0]))
        if not driver.in_transaction:
            raise TransactionEndedError(_OVER)

    def find_damage(self, connection: Connection) -> list[str]:
        """Return what ``PRAGMA integrity_check`` finds."""
        lines = connection.exec_driver_sql("PRAGMA integrity_check").scalars()
        return [line for line in lines if line != "ok"]

    def watch(self, settings: DatabaseSettings, origin: str) -> FileWatch:  # noqa: ARG002 - a file does not tell whose
        """Return a watch by ``PRAGMA data_version``, which changes when another connection commits."""
        return FileWatch(database_path(settings.url).absolute())

    def must_announce(self, settings: DatabaseSettings) -> bool:  # noqa: ARG002 - see below
        """Return False: every commit shows in the file."""
        return False

    def announce(self, connection: Connection, origin: str) -> None:
        """Do nothing."""

    def take_turns(self, connection: Connection, what: str) -> None:
        """Do nothing: there is one write transaction at a time."""

    def find_room_faults(self, settings: DatabaseSettings) -> Iterator[Finding]:
        """Yield what is wrong with the free disk beside the file, and with its write-ahead log."""
        return sqlite_observer.find_room_faults(_file_of(settings))

    def find_journal_faults(self, settings: DatabaseSettings) -> Iterator[Finding]:
        """Yield a finding when the file's journal mode is not the one that ``settings`` want."""
        return sqlite_observer.find_journal_faults(_file_of(settings), settings)

    def list_preliminaries(self, settings: DatabaseSettings) -> list[str]:  # noqa: ARG002 - there are none
        """Return nothing: a write transaction has the file to itself."""
        return []

    def plain_predicate(self, predicate: str) -> str:
        """Return the predicate itself: SQLite stores it as it was written."""
        return predicate

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


# Another program may have written what is no UTF-8. A backslash makes it show, and is never JSON by itself.
_readable = partial(str, encoding="utf-8", errors="backslashreplace")


def _guard(engine: Engine) -> None:
    """Write nothing outside the transaction that was begun, and leave no result unread behind it.

    SQLite ends a transaction without being asked to when the disk is full, and SQLAlchemy does not see it: what is
    written then would commit by itself, a statement at a time.

    A result that was not read to its end keeps the snapshot that it reads, in which nobody can write any more: once
    somebody else has, every later transaction of that connection would be told that the database is locked.
    """

    def look(connection: Connection, cursor: sqlite3.Cursor, *_rest: object) -> None:
        if not cursor.connection.in_transaction and connection.in_transaction():
            raise TransactionEndedError(_OVER)

    def note(connection: Connection, cursor: sqlite3.Cursor, *_rest: object) -> None:
        if cursor.description is not None:
            _results_of(connection).add(cursor)

    Guard(engine, look, note, leaves_results=True)

    @event.listens_for(engine, "commit")
    def _look_once_more(connection: Connection) -> None:
        driver: Any = connection.connection.dbapi_connection
        if not driver.in_transaction:
            raise TransactionEndedError(_OVER)

    @event.listens_for(engine, "checkin")
    def _close(connection: sqlite3.Connection | None, record: ConnectionPoolEntry) -> None:
        results = list(record.info.pop(_RESULTS, ()))
        if connection is not None:  # else it has been closed, and they with it
            for cursor in results:
                cursor.close()


def _results_of(connection: Connection) -> WeakSet[sqlite3.Cursor]:
    found: WeakSet[sqlite3.Cursor] | None = connection.info.get(_RESULTS)
    if found is None:
        found = connection.info[_RESULTS] = WeakSet()
    return found


def _wait_for_the_lock(connection: Connection, patience_ms: int) -> None:
    """Begin to write as soon as nobody else does.

    SQLite's own waiting looks less often the longer it has waited, up to a tenth of a second apart: beside several
    busy writers, who waits longest is then the last to be served. Looks at short random intervals are fair.
    """
    driver: Any = connection.connection.dbapi_connection
    give_up = time.monotonic() + patience_ms / 1000
    begin = connection.exec_driver_sql if Guard.find_alone(connection) is None else driver.execute
    _set(connection, "busy_timeout", 0)
    try:
        failure = _try(begin, _WRITE)
        while failure is not None:
            if time.monotonic() >= give_up or not is_sqlite_busy(failure):
                connection.exec_driver_sql(_WRITE)  # once more, as its errors are told like any other statement's
                return
            time.sleep(random.uniform(*_LOOK_EVERY_S))  # noqa: S311 - no secret
            failure = _try(driver.execute, _WRITE)
    finally:
        if connection.info[_JOURNAL] != "wal":  # there a commit may have to wait, for readers
            _set(connection, "busy_timeout", patience_ms)


def _set(connection: Connection, pragma: str, value: object) -> None:
    """Set what stays set on the connection, unless it is: SQLite prepares a PRAGMA anew each time."""
    known = f"tinycortex_{pragma}"
    if connection.info.get(known) != value:
        connection.exec_driver_sql(f"PRAGMA {pragma}={value}")
        connection.info[known] = value


def _try(execute: Callable[[str], object], statement: str) -> Exception | None:
    try:
        execute(statement)
    except (sqlite3.Error, DBAPIError, StorageError) as error:
        return error
    return None


def _file_of(settings: DatabaseSettings) -> Path:
    if settings.schema_name is not None:
        raise ConfigurationError(f"SQLite has no schemas; leave out database.schema ({settings.schema_name!r})")
    path = database_path(settings.url).absolute()  # where the engine opens it, whatever folder we are in later
    if path.is_dir():
        raise ConfigurationError(f"the database path {path} is a folder; name a file in it")
    return path


def _follow_the_file(engine: Engine, path: Path) -> None:
    """Open anew what was moved or replaced: what is written into a file without a name is lost."""

    @event.listens_for(engine, "connect")
    def _remember(_connection: sqlite3.Connection, record: ConnectionPoolEntry) -> None:
        opened = file_identity(path)
        record.info[_IS_HERE] = lambda: file_identity(path) == opened

    @event.listens_for(engine, "checkout")
    def _compare(_connection: sqlite3.Connection, record: ConnectionPoolEntry, _proxy: object) -> None:
        if not record.info[_IS_HERE]():
            raise DisconnectionError(f"{path} is another file by now")


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


def _set_journal(connection: sqlite3.Connection, settings: DatabaseSettings, path: Path) -> str:
    """Have the file keep the journal that is wanted; return the one that it keeps."""
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
    return str(mode)
