"""Noticing commits of other processes, on whatever machine, by LISTEN."""

import time
from typing import Any

import psycopg

CHANNEL = "tinycortex"

_CONNECT_AGAIN_S = 2.0


class NotificationWatch:
    """Listens through a connection of its own, and opens another one when that is lost."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._connection: psycopg.Connection[Any] | None = None
        self._connect_at = 0.0

    def has_changed(self) -> bool:
        """Tell whether a commit was announced since the last look, or may have been: nobody listened meanwhile."""
        try:
            if self._connection is None:
                return self._listen()
            return any(True for _ in self._connection.notifies(timeout=0))
        except psycopg.Error:  # whoever works with the database will be told; the worker looks by itself too
            self.close()
            return False

    def _listen(self) -> bool:
        if time.monotonic() < self._connect_at:
            return False
        self._connect_at = time.monotonic() + _CONNECT_AGAIN_S
        self._connection = psycopg.connect(**self._options, autocommit=True)
        self._connection.execute(f"LISTEN {CHANNEL}")
        return True

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class NoWatch:
    """Sees nothing, so that a worker looks for itself, every ``worker.idle_ms``."""

    def has_changed(self) -> bool:
        """Return False."""
        return False

    def close(self) -> None:
        """Do nothing."""
