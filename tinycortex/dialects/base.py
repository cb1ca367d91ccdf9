"""What an engine must answer; everything that differs between engines is behind this protocol."""

from collections.abc import Iterable
from typing import Protocol

from sqlalchemy import Connection, Engine

from tinycortex.config import DatabaseSettings
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


class Dialect(Protocol):
    """One database engine."""

    def create_engine(self, settings: DatabaseSettings) -> Engine:
        """Build the engine. A write transaction takes the write lock at its start.

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

    def classify(self, error: BaseException) -> type[StorageError] | None:
        """Return the storage error that the driver's ``error`` stands for, by code and never by message."""
        ...

    def find_damage(self, connection: Connection) -> list[str]:
        """Return a line for each fault of the stored data, as the engine itself tells them; empty when sound."""
        ...

    def presence(self, settings: DatabaseSettings) -> Presence:
        """Return this engine's way to tell dead workers."""
        ...
