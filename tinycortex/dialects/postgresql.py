"""PostgreSQL through psycopg 3: one server, workers on many machines, many writers at a time."""

import re
import selectors
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, ExceptionContext, create_engine, event, make_url
from sqlalchemy.exc import DisconnectionError

from tinycortex.config import DatabaseSettings
from tinycortex.dialects.base import Observer
from tinycortex.dialects.guard import Guard
from tinycortex.dialects.postgresql_clock import ServerClock
from tinycortex.dialects.postgresql_faults import READ_ONLY, UNDONE_FOR_OTHERS, sqlstate_of, storage_error_of
from tinycortex.dialects.postgresql_watch import NOTIFY, NotificationWatch, NoWatch
from tinycortex.domain.findings import Finding
from tinycortex.errors import ConfigurationError, StorageError, TransactionEndedError

_DRIVER = "psycopg"

_BEGUN = "tinycortex_begun"

_NO_END = "{} is refused here: the transaction commits, or is rolled back, when its block ends"
_OVER = (
    "the transaction is over: an error that its block caught has undone it, or the block ended it by itself; "
    "let such an error through, or meet it in a savepoint (session.begin_nested())"
)

_PATIENCE = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""What libpq is told unless the URL says otherwise: a server that is gone is noticed within a minute."""


class PostgreSQLDialect:
    """PostgreSQL 14 and later."""

    row_lock = "FOR UPDATE SKIP LOCKED"
    has_arrays = True
    has_schemas = True

    def create_engine(self, settings: DatabaseSettings, *, may_create: bool = False) -> Engine:  # noqa: ARG002 - a server makes no database
        """Build the engine: READ COMMITTED, a lock time-out, dead connections of the pool noticed before use."""
        engine = create_engine(
            _check(settings),
            # Handlers hold connections for as long as they like; the worker's own statements must not wait for them.
            max_overflow=-1,
            isolation_level="READ COMMITTED",
            use_native_hstore=False,  # or each new connection asks for a type that nobody uses
        )

        @event.listens_for(engine, "do_connect")
        def _be_patient(_dialect: object, _record: object, _arguments: list[Any], options: dict[str, Any]) -> None:
            options.update(connect_options(settings, options))

        @event.listens_for(engine, "checkout")
        def _look_for_the_end(connection: psycopg.Connection[Any], _record: object, _proxy: object) -> None:
            if _has_ended(connection):
                raise DisconnectionError("the server has closed the connection")

        @event.listens_for(engine, "checkin")
        def _forget_the_mode(connection: psycopg.Connection[Any] | None, _record: object) -> None:
            # A reader's connection comes back with False, which has the driver ask for READ WRITE: a standby answers
            # that with a word that fits anything, and a database that an administrator has closed obeys.
            if connection is not None and not connection.closed and connection.read_only is not None:
                connection.read_only = None

        @event.listens_for(engine, "handle_error")
        def _leave_a_standby(context: ExceptionContext) -> None:
            if sqlstate_of(context.original_exception) == READ_ONLY:
                context.is_disconnect = True  # another server may be the one that is written to by now

        _refuse_after_the_end(engine)
        if not settings.notify:
            _set_for_each_transaction(engine, _variables(settings))
        return engine

    def observe(self, settings: DatabaseSettings) -> Observer:
        """Return an engine whose transactions are read only; a server always tells what is stored."""
        return Observer(engine=self.reader(self.create_engine(settings)), holds=lambda: True)

    def exists(self, settings: DatabaseSettings) -> bool:  # noqa: ARG002 - only a connection could tell
        """Return True: a database that is not there is told by whoever connects, and never made."""
        return True

    def reader(self, engine: Engine) -> Engine:
        """Return a view of ``engine`` whose transactions are read only and see one snapshot."""
        return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    def quick(self, engine: Engine, settings: DatabaseSettings) -> Engine:  # noqa: ARG002 - see below
        """Return the engine: a crash of the server leaves workers alive, whose claims it must not take back."""
        return engine

    def can_go_on(self, connection: Connection) -> bool:
        """Tell whether the server has not hung up."""
        driver: Any = connection.connection.dbapi_connection
        return not _has_ended(driver)

    def clock(self, engine: Engine) -> ServerClock:
        """Return the server's clock."""
        return ServerClock(engine)

    def classify(self, error: BaseException) -> type[StorageError] | None:
        """Return the storage error of a driver's error; None for one that is not about storage."""
        return storage_error_of(error)

    def was_undone_for_others(self, error: BaseException | None) -> bool:
        """Tell whether the transaction was the one that ended a deadlock, or a conflict of snapshots."""
        return error is not None and sqlstate_of(error) in UNDONE_FOR_OTHERS

    @contextmanager
    def keep_open(self, connection: Connection) -> Iterator[None]:
        """Have the driver's connection and its cursors refuse to end the transaction."""
        driver: Any = connection.connection.dbapi_connection
        refused: list[str] = []

        def refuse(word: str) -> None:
            refused.append(word)
            raise TransactionEndedError(_NO_END.format(word))

        class KeptCursor(driver.cursor_factory):  # type: ignore[misc]  # whatever class the host has given it
            def execute(self, query: object, *rest: object, **options: object) -> object:
                if isinstance(query, str) and (word := _find_end(query)):
                    refuse(word)
                return super().execute(query, *rest, **options)

        factory = driver.cursor_factory
        driver.cursor_factory = KeptCursor
        driver.commit, driver.rollback = (lambda: refuse("COMMIT")), (lambda: refuse("ROLLBACK"))
        try:
            yield
        finally:
            del driver.commit, driver.rollback
            driver.cursor_factory = factory
            if refused:  # SQLAlchemy may take it for ended by now, or have let go of it, and would leave it open
                driver.rollback()
                if not connection.closed:
                    connection.invalidate()
        if refused:
            raise TransactionEndedError(_NO_END.format(refused[0]))
        if driver.info.transaction_status != TransactionStatus.INTRANS:
            raise TransactionEndedError(_OVER)

    def find_damage(self, connection: Connection) -> list[str]:  # noqa: ARG002 - the server checks its own pages
        """Return nothing: the server checks its pages as it reads them, and amcheck is its administrator's."""
        return []

    def watch(self, settings: DatabaseSettings, origin: str) -> NotificationWatch | NoWatch:
        """Return a watch by LISTEN; one that sees nothing where ``notify`` is off."""
        if not settings.notify:
            return NoWatch()
        url = make_url(settings.url)
        given: dict[str, Any] = url.translate_connect_args(username="user", database="dbname") | dict(url.query)
        options = given | connect_options(settings, given)
        return NotificationWatch(lambda: psycopg.connect(**options, autocommit=True), origin)

    def must_announce(self, settings: DatabaseSettings) -> bool:
        """Tell whether ``notify`` is on."""
        return settings.notify

    def announce(self, connection: Connection, origin: str) -> None:
        """Notify who listens, by a transaction of one statement."""
        connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql(NOTIFY, {"origin": origin})

    def take_turns(self, connection: Connection, what: str) -> None:
        """Take a lock that ends with the transaction; it is the table's, by whatever schema it is found."""
        connection.exec_driver_sql(
            "SELECT pg_advisory_xact_lock(hashtextextended(%(what)s, 'mem_tree_jobs'::regclass::oid::bigint))",
            {"what": f"tinycortex {what}"},
        )

    def find_room_faults(self, settings: DatabaseSettings) -> Iterable[Finding]:  # noqa: ARG002 - see below
        """Yield nothing: the disk is the server's."""
        return ()

    def find_journal_faults(self, settings: DatabaseSettings) -> Iterable[Finding]:  # noqa: ARG002 - see below
        """Yield nothing: the journal is the server's."""
        return ()

    def presence(self, settings: DatabaseSettings) -> "Leases":  # noqa: ARG002 - workers are on any machine
        """Return a presence that knows of nobody: leases decide."""
        return Leases()

    def list_preliminaries(self, settings: DatabaseSettings) -> list[str]:
        """Return what has migrations take turns, and makes the schema that the tables are to lie in."""
        wanted = settings.schema_name
        lock = f"SELECT pg_advisory_xact_lock(hashtextextended('tinycortex migrations {wanted or ''}', 0))"
        if wanted is None:
            return [lock]
        # Asked first, since IF NOT EXISTS wants the right to create even where nothing is to be created.
        make = (
            f"DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = '{wanted}') "
            f'THEN CREATE SCHEMA "{wanted}"; END IF; END $$'
        )
        return [lock, make, f'SET LOCAL search_path = "{wanted}"']

    def plain_predicate(self, predicate: str) -> str:
        """Return the predicate without casts, brackets and arrays, all of which the server adds to what it stores."""
        without_arrays = re.sub(r"= ANY \(+ARRAY\[(.*?)\]", r"IN \1", predicate)
        return re.sub(r"::\w+(\[\])?|[()]", "", without_arrays)


class Leases:
    """A presence that knows of no worker, living or dead: each row waits for its lease."""

    def announce(self, worker_id: str) -> None:
        """Do nothing."""

    def withdraw(self) -> None:
        """Do nothing."""

    def find_dead(self, worker_ids: Iterable[str]) -> list[str]:  # noqa: ARG002 - nothing is known of any
        """Return nobody: in doubt, a worker lives."""
        return []

    def forget(self, worker_ids: Iterable[str]) -> None:
        """Do nothing."""


def connect_options(settings: DatabaseSettings, given: dict[str, Any]) -> dict[str, Any]:
    """Return what the driver is told beside what the URL has given."""
    said: dict[str, Any] = {name: value for name, value in _PATIENCE.items() if name not in given}
    if not settings.notify:
        # A pooler takes no options of a session, and what one has prepared is not there in the next transaction.
        return said | {"prepare_threshold": None}
    options = [f"-c {name}={value}" for name, value in _variables(settings).items()]
    return said | {"options": " ".join([*options, str(given.get("options", ""))]).strip()}


def _variables(settings: DatabaseSettings) -> dict[str, str]:
    """Return the variables of the server that the queue's sessions set."""
    # What was planned while the queue was empty, and kept, reads and sorts a whole backlog for each claim later on.
    variables = {"plan_cache_mode": "force_custom_plan"}
    variables["lock_timeout"] = str(max(1, settings.busy_timeout_ms))  # 0 would be to wait for ever
    if settings.schema_name is not None:
        variables["search_path"] = settings.schema_name
    return variables


def _set_for_each_transaction(engine: Engine, variables: dict[str, str]) -> None:
    """Set the variables anew in each transaction, since the next one may be in another session."""
    # One journey to the server, as none of the statements has a parameter.
    statements = "; ".join(f"SET LOCAL {name} = '{value}'" for name, value in variables.items())

    @event.listens_for(engine, "begin")
    def _set(connection: Connection) -> None:
        connection.exec_driver_sql(statements)


def _check(settings: DatabaseSettings) -> str:
    url = make_url(settings.url)
    if url.get_driver_name() != _DRIVER:
        raise ConfigurationError(
            f"the queue talks to PostgreSQL through {_DRIVER}, not {url.get_driver_name()}; "
            f"use a URL such as postgresql+{_DRIVER}://user@host/database"
        )
    return settings.url


def _has_ended(connection: psycopg.Connection[Any]) -> bool:
    """Tell whether a connection is closed, or has something to read: to an idle one the server says only that it ends.

    A ping would cost a journey to the server for every transaction.
    """
    if connection.closed:
        return True
    with selectors.DefaultSelector() as selector:
        selector.register(connection.fileno(), selectors.EVENT_READ)
        return bool(selector.select(0))


_ENDS = frozenset({"ABORT", "BEGIN", "COMMIT", "END", "ROLLBACK", "START"})


def _find_end(statement: str) -> str | None:
    """Return the word by which ``statement`` would end or begin a transaction; None when it does neither."""
    words = statement.upper().rstrip(" ;\n").split(None, 2)
    if not words or words[0] not in _ENDS or words[:2] == ["ROLLBACK", "TO"]:
        return None
    return words[0]


def _refuse_after_the_end(engine: Engine) -> None:
    """Write nothing after an error that was caught: the server would undo it all, and call that a commit."""

    @event.listens_for(engine, "begin")
    def _note_begin(connection: Connection) -> None:
        connection.info[_BEGUN] = False

    def look(connection: Connection, cursor: psycopg.Cursor, statement: str, *_rest: object) -> None:
        status = cursor.connection.info.transaction_status
        if status == TransactionStatus.INERROR and not statement.startswith("ROLLBACK TO"):
            raise TransactionEndedError(_OVER)
        if status == TransactionStatus.IDLE and connection.info.get(_BEGUN):  # the driver would begin another one
            raise TransactionEndedError(_OVER)

    def note_begun(connection: Connection, cursor: psycopg.Cursor, *_rest: object) -> None:
        connection.info[_BEGUN] = connection.in_transaction() and not cursor.connection.autocommit

    Guard(engine, look, note_begun)

    @event.listens_for(engine, "commit")
    def _look_once_more(connection: Connection) -> None:
        driver: Any = connection.connection.dbapi_connection
        if driver.info.transaction_status == TransactionStatus.INERROR:
            raise TransactionEndedError(_OVER)
