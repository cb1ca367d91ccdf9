"""The database: its engine, and the transaction as the unit of work. The only place that commits."""

import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, ExceptionContext, Pool, event
from sqlalchemy.orm import Session

from tinycortex.commits import AfterCommit
from tinycortex.config import DatabaseSettings
from tinycortex.dialects import Presence, Watch, dialect_for
from tinycortex.domain.clock import Clock
from tinycortex.domain.findings import Finding
from tinycortex.domain.redact import mask_url
from tinycortex.errors import InvalidInputError, StorageBusyError, StorageError

_TRIES = 5
"""Of a transaction that is undone for the sake of others, each time."""


@dataclass(slots=True)
class _Transaction:
    """One write transaction; tasks and threads that were started inside may outlive it."""

    database: "Database"
    open: bool = True


_TRANSACTIONS: ContextVar[tuple[_Transaction, ...]] = ContextVar("tinycortex_transactions", default=())
"""The write transactions that the running code is inside of, through whatever tasks and threads."""


def share_transactions(context: Context) -> None:
    """Have code that runs in ``context`` know of the write transactions that the running code is inside of."""
    context.run(_TRANSACTIONS.set, _TRANSACTIONS.get())


class Database:
    """One database, as the repositories see it.

    Args:
        settings: where it is and how to open it; nothing is opened before the first use.
        may_create: a database that is not there is made, as an upgrade does; else it is unavailable.

    Raises:
        ConfigurationError: the URL cannot serve as a queue.
    """

    def __init__(self, settings: DatabaseSettings, *, may_create: bool = False) -> None:
        self._settings = settings
        self._dialect = dialect_for(settings.url)
        self.masked_url = mask_url(settings.url)
        """The URL without its password, for messages."""
        self._may_create = may_create
        self.engine: Engine = self._create_engine()
        self.presence: Presence = self._dialect.presence(settings)
        self.row_lock = self._dialect.row_lock
        """How a search locks what it finds; see :class:`Dialect`."""
        self.has_arrays = self._dialect.has_arrays
        """Whether a parameter may be a list."""
        self._reader = self._dialect.reader(self.engine)
        self._quick = self.engine if settings.durability == "strict" else self._dialect.quick(self.engine, settings)
        self._name = uuid.uuid4().hex
        self._process = os.getpid()
        self._inherited: list[Pool] = []
        self._met: WeakKeyDictionary[StorageError, Connection] = WeakKeyDictionary()
        """Where each of its faults was met."""
        # Where the error arises, so that one of this database is told from any other's that a block meets.
        event.listen(self.engine, "handle_error", self._translate)

    @cached_property
    def clock(self) -> Clock:
        """The clock that every process which works on this database goes by."""
        return self._dialect.clock(self.engine)

    def _create_engine(self) -> Engine:
        return self._dialect.create_engine(self._settings, may_create=self._may_create)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Run the block in one write transaction: commit at its end, roll back when it raises.

        The commit is on the disk when the block has ended; see :class:`~tinycortex.writer.Writer` for another way.

        Raises:
            InvalidInputError: it would wait for the transaction that its own caller holds open.
            TransactionEndedError: the block went on after the transaction was over.
            StorageError: the database could not do its work; nothing of the block was kept.
        """
        with self.inside_transaction(), self._session(self.engine) as session:
            AfterCommit.leave_to_owner(session)
            yield session
        AfterCommit.make_due_calls_of(session)  # only here, where they may write too

    @contextmanager
    def _own_transaction(self) -> Iterator[Session]:
        """Do as :meth:`transaction` does, in a third less time as long as little is asked of the session."""
        with self.inside_transaction():
            self._leave_inherited()
            with self.engine.connect() as connection, IdleSession(connection) as session:
                AfterCommit.leave_to_owner(session)
                with session.kept_transaction():
                    yield session
        AfterCommit.make_due_calls_of(session)

    @contextmanager
    def inside_transaction(self) -> Iterator[None]:
        """Have the block known for one write transaction.

        Raises:
            InvalidInputError: it would wait for the transaction that its own caller holds open.
        """
        around = self.refuse_inside_transaction()
        own = _Transaction(self)
        _TRANSACTIONS.set((*around, own))
        try:
            yield
        finally:
            own.open = False

    def open_idle_session(self) -> "IdleSession":
        """Return a session for write transactions whose commits do not wait for the disk.

        With a durability of ``strict`` they do wait.

        Raises:
            StorageError: the database could not be opened.
        """
        self._leave_inherited()
        return IdleSession(self._quick.connect())

    def can_go_on(self, connection: Connection) -> bool:
        """Tell whether a connection that was kept is open still, and leads where a new one would."""
        return self._dialect.can_go_on(connection)

    def refuse_inside_transaction(self) -> tuple[_Transaction, ...]:
        """Raise :class:`InvalidInputError` where a write of this database would wait for its own caller.

        Returns:
            The write transactions, of other databases, that the running code is inside of.
        """
        around = tuple(transaction for transaction in _TRANSACTIONS.get() if transaction.open)
        if any(transaction.database is self for transaction in around):
            raise InvalidInputError(
                "a write transaction is open here already, and a second one would wait for it for ever; "
                "hand its session on, as in enqueue(job, session=session)"
            )
        return around

    def owns(self, error: BaseException) -> TypeGuard[StorageError]:
        """Tell whether ``error`` is a storage error of this database, whoever met it."""
        return isinstance(error, StorageError) and error.url == self.masked_url

    def is_busy(self, error: BaseException) -> bool:
        """Tell whether ``error`` comes from a lock that was held too long, in this database or another."""
        return isinstance(error, StorageBusyError) or self._dialect.classify(error) is StorageBusyError

    def waited_for_others(self, fault: StorageError, connection: Connection) -> bool:
        """Tell whether the busy ``fault`` is due to other transactions than that of ``connection``, which met it."""
        return self._dialect.row_lock != "" and self._met.get(fault) is connection

    def keep_open(self, session: Session) -> AbstractContextManager[None]:
        """Keep the block from ending the session's transaction, by whatever way the engine can refuse.

        Raises:
            TransactionEndedError: the block tried to; or it did, and nothing may be written after it.
        """
        return self._dialect.keep_open(session.connection())

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Run the block on one consistent snapshot, without taking the write lock.

        Raises:
            StorageError: the database could not do its work.
        """
        with self._session(self._reader) as session:
            yield session

    def within(self, session: Session | None) -> AbstractContextManager[Session]:
        """Run the block in the caller's transaction, or in one of its own when there is none.

        One of its own has a session for this package's code only, which a program may not be given: it does
        not know that it is in a transaction before it is used.
        """
        return self._own_transaction() if session is None else nullcontext(session)

    def write(self, do: Callable[[Session], object], session: Session | None) -> None:
        """Have ``do`` write in the caller's transaction, or in one of its own when there is none.

        One of its own that was undone to let another one go on, as after a deadlock, is made again.

        Raises:
            StorageError: nothing was written.
        """
        for left in reversed(range(_TRIES)):
            try:
                with self.within(session) as tx:
                    do(tx)
            except StorageBusyError as error:
                if session is not None or left == 0 or not self._dialect.was_undone_for_others(error.__cause__):
                    raise
            else:
                return

    def reading_within(self, session: Session | None) -> AbstractContextManager[Session]:
        """Run the block in the caller's transaction, or on a snapshot of its own when there is none."""
        return self.reading() if session is None else nullcontext(session)

    def exists(self) -> bool:
        """Tell whether there is a database to open, without making one."""
        return self._dialect.exists(self._settings)

    def find_damage(self) -> list[str]:
        """Return a line for each fault of the stored data, as the engine tells them; it reads every page.

        Raises:
            StorageError: it could not be read at all.
        """
        with self.reading() as session:
            return self._dialect.find_damage(session.connection())

    def watch(self) -> Watch:
        """Return what tells of commits of other processes; the caller closes it."""
        return self._dialect.watch(self._settings, self._origin)

    @cached_property
    def must_announce(self) -> bool:
        """Whether other processes see only those commits of this one that it announces."""
        return self._dialect.must_announce(self._settings)

    def announce(self) -> None:
        """Have the watches of other processes see that something was committed.

        Raises:
            StorageError: they may not.
        """
        self._leave_inherited()
        with self.engine.connect() as connection:
            self._dialect.announce(connection, self._origin)

    @property
    def _origin(self) -> str:
        return f"{self._name}-{os.getpid()}"

    def take_turns(self, session: Session, what: str) -> None:
        """Have the session's transaction, from here to its end, take turns with others that ask for the same ``what``.

        The next statement sees what those before it have committed.
        """
        self._dialect.take_turns(session.connection(), what)

    def list_preliminaries(self) -> list[str]:
        """Return the statements that come first in a transaction of migrations."""
        return self._dialect.list_preliminaries(self._settings)

    def on_commit(self, session: Session, do: Callable[[], object]) -> None:
        """Have ``do`` called once the session's outermost transaction has committed, by whoever owns it.

        It is called once however often one transaction asks for it, and not at all when that transaction, or
        the savepoint that the call was asked for in, is rolled back. It is not called either when the
        session has only joined a transaction of its connection, since that one may yet be rolled back.
        """
        AfterCommit.of(session).add(session, do)

    def find_room_faults(self) -> Iterable[Finding]:
        """Yield what is wrong with the disk space around the stored data.

        Raises:
            OSError: the system would not tell.
        """
        return self._dialect.find_room_faults(self._settings)

    def find_journal_faults(self) -> Iterable[Finding]:
        """Yield where the database keeps its journal in another way than the settings want."""
        return self._dialect.find_journal_faults(self._settings)

    def dispose(self) -> None:
        """Withdraw this process's workers and close every pooled connection; a later use opens new ones."""
        self._leave_inherited()
        self.presence.withdraw()
        self.engine.dispose()

    def _leave_inherited(self) -> None:
        # A connection must not cross a fork: two processes would use one file handle. The parent's pool is
        # kept, never closed, since closing it here would let go of what the parent holds.
        if self._process != os.getpid():
            self._inherited.append(self.engine.pool)
            self.engine.dispose(close=False)
            self._process = os.getpid()

    @contextmanager
    def _session(self, engine: Engine) -> Iterator[Session]:
        self._leave_inherited()
        with Session(engine, expire_on_commit=False) as session, session.begin():
            yield session

    def _translate(self, context: ExceptionContext) -> StorageError | None:
        error = context.original_exception
        kind = self._dialect.classify(error)
        if kind is None:
            return None
        told = " ".join(str(error).split())  # on one line, as a log record and a command's error are
        fault = kind(f"database {self.masked_url}: {told}", url=self.masked_url)
        if context.connection is not None:
            self._met[fault] = context.connection
        return fault


class IdleSession(Session):
    """A session that keeps its connection, and does nothing until it is used for more than that connection."""

    def __init__(self, kept: Connection) -> None:
        super().__init__(kept, expire_on_commit=False, join_transaction_mode="control_fully")
        self.kept = kept
        """The connection; whoever opened the session closes it too."""
        self.was_used = False
        """Whether the last transaction was the session's as well."""

    def connection(self, *arguments: Any, **options: Any) -> Connection:
        """Return the kept connection, or that of the session's transaction: the same one, but for other options."""
        if arguments or options or self.in_transaction():
            return super().connection(*arguments, **options)
        return self.kept

    @contextmanager
    def kept_transaction(self) -> Iterator[None]:
        """Run the block in one transaction of the kept connection, which the session joins once it is used."""
        with self.kept.begin():
            yield
            self.was_used = self.in_transaction()
            if self.was_used:
                self.commit()


class ObservedDatabase(Database):
    """A database that is only looked at: nothing is made, switched or written, and every write is refused.

    Args:
        settings: where it is; it is looked for at once, and opened at the first use.

    Raises:
        ConfigurationError: the URL cannot serve as a queue.
    """

    def _create_engine(self) -> Engine:
        observer = self._dialect.observe(self._settings)
        self._holds = observer.holds
        return observer.engine

    def was_still(self) -> bool:
        """Tell whether all that was read can be trusted; if not, look again through a new object."""
        return self._holds()
