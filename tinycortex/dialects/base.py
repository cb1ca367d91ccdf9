"""What an engine must answer; everything that differs between engines is behind this protocol."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from sqlalchemy import Connection, Engine

from tinycortex.config import DatabaseSettings
from tinycortex.domain.clock import Clock
from tinycortex.domain.findings import Finding
from tinycortex.errors import StorageError


class Presence(Protocol):
    """Tells which workers are certainly gone, so that their rows need not wait for their leases."""

    def announce(self, worker_id: str) -> None:
        """Make ``worker_id`` provably alive until it is withdrawn or its process ends."""
        ...

    def withdraw(self) -> None:
        """Take back every announcement of this object."""
        ...

    def find_dead(self, worker_ids: Iterable[str]) -> list[str]:
        """Return those of ``worker_ids`` whose process has certainly ended; in doubt, a worker lives."""
        ...

    def forget(self, worker_ids: Iterable[str]) -> None:
        """Drop what is kept about dead workers, once their rows are recovered."""
        ...


class Watch(Protocol):
    """Waits for the commits of others to a database. Used by one thread, but for ``is_live`` and :meth:`interrupt`."""

    @property
    def is_live(self) -> bool:
        """Whether it would be told; if not, workers look for themselves."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is a commit since the last call, or may be one; never raises for storage.

        Returns:
            False when the time was over, or the waiting interrupted, and nothing was seen.
        """
        ...

    def interrupt(self) -> None:
        """Have the waiting end; the next one, if there is none now."""
        ...

    def close(self) -> None:
        """Let go of what the watch holds."""
        ...


class Observer(NamedTuple):
    """A way to read a database that changes nothing, not even on the disk around it.

    Attributes:
        engine: reads; every write is refused.
        holds: tells, after a look, whether what was seen is what is stored; if not, look again with a new observer.
    """

    engine: Engine
    holds: Callable[[], bool]


class Dialect(Protocol):
    """One database engine.

    Attributes:
        row_lock: the clause by which a search locks the rows that it finds and passes over those that others have
            locked; empty where a write transaction has the database to itself.
        has_arrays: whether a parameter may be a list.
        has_schemas: whether a database has several of them.
    """

    row_lock: str
    has_arrays: bool
    has_schemas: bool

    def create_engine(self, settings: DatabaseSettings, *, may_create: bool = False) -> Engine:
        """Build the engine. A write transaction takes the write lock at its start.

        A statement or a commit that comes after its transaction is over raises TransactionEndedError, whichever way
        the statement takes to the driver: the engine has a :class:`~tinycortex.dialects.guard.Guard`.

        Args:
            settings: where the database is and how to open it.
            may_create: a database that is not there is made; else it is unavailable.

        Raises:
            ConfigurationError: the URL cannot serve as a queue.
        """
        ...

    def observe(self, settings: DatabaseSettings) -> Observer:
        """Return a way to look at the database without changing anything; a missing one is not made.

        Raises:
            ConfigurationError: the URL cannot serve as a queue.
        """
        ...

    def exists(self, settings: DatabaseSettings) -> bool:
        """Tell whether the database can be there, without creating anything."""
        ...

    def reader(self, engine: Engine) -> Engine:
        """Return a view of ``engine`` whose transactions only read and never wait for a writer."""
        ...

    def quick(self, engine: Engine, settings: DatabaseSettings) -> Engine:
        """Return a view of ``engine`` whose commits do not wait for the disk.

        A power cut may take the last of them back, each as a whole, and the database stays sound; where it
        would not, the view is like the engine.
        """
        ...

    def can_go_on(self, connection: Connection) -> bool:
        """Tell whether a connection that lay idle is open still, and leads to the same database as a new one."""
        ...

    def clock(self, engine: Engine) -> Clock:
        """Return the clock that every process which works on the database goes by."""
        ...

    def classify(self, error: BaseException) -> type[StorageError] | None:
        """Return the storage error that the driver's ``error`` stands for, by code and never by message."""
        ...

    def was_undone_for_others(self, error: BaseException | None) -> bool:
        """Tell whether a driver's error says that a transaction was undone to let others go on."""
        ...

    def keep_open(self, connection: Connection) -> AbstractContextManager[None]:
        """Keep the block from ending the connection's transaction.

        Raises:
            TransactionEndedError: the block tried to, or the transaction is over.
        """
        ...

    def find_damage(self, connection: Connection) -> list[str]:
        """Return a line for each fault of the stored data, as the engine itself tells them; empty when sound."""
        ...

    def watch(self, settings: DatabaseSettings, origin: str) -> Watch:
        """Return a watch on the database, which costs an idle worker next to nothing.

        Args:
            settings: where the database is and how to open it.
            origin: who watches; what the same one has announced need not be seen.
        """
        ...

    def must_announce(self, settings: DatabaseSettings) -> bool:
        """Tell whether watches see only the commits that are announced."""
        ...

    def announce(self, connection: Connection, origin: str) -> None:
        """Have the watches of others than ``origin`` return, by a commit of the connection that is made here."""
        ...

    def take_turns(self, connection: Connection, what: str) -> None:
        """Wait until no other transaction of this database that asked for the same ``what`` is open."""
        ...

    def find_room_faults(self, settings: DatabaseSettings) -> Iterable[Finding]:
        """Yield what is wrong with the room that the stored data has; asked of the system, not of the database."""
        ...

    def find_journal_faults(self, settings: DatabaseSettings) -> Iterable[Finding]:
        """Yield where the database keeps its journal in another way than ``settings`` want."""
        ...

    def list_preliminaries(self, settings: DatabaseSettings) -> list[str]:
        """Return the statements that come first in a transaction of migrations, so that these take turns."""
        ...

    def plain_predicate(self, predicate: str) -> str:
        """Return an index's predicate without what the engine adds to it as it stores it."""
        ...

    def presence(self, settings: DatabaseSettings) -> Presence:
        """Return this engine's way to tell dead workers."""
        ...
