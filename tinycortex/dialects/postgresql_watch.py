"""Noticing commits of other processes, on whatever machine, by LISTEN and NOTIFY."""

import logging
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg

from tinycortex.domain.redact import scrub_for_log

logger = logging.getLogger(__name__)

Connect = Callable[[], "psycopg.Connection[Any]"]

_SHORTEST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
"""How long a watch waits before it connects anew: it doubles with each failure, and a random part goes off it."""

# Of the schema where the tables are, which is the same for every role; search paths may differ. By number, since a
# schema's name may be as long as a channel's.
_CHANNEL = "SELECT 'tinycortex_' || relnamespace FROM pg_class WHERE oid = to_regclass('mem_tree_jobs')"

_LISTEN = f"DO $$ BEGIN EXECUTE 'LISTEN ' || ({_CHANNEL}); END $$"

# Commits that notify take turns over the whole server, until they are on the disk unless they do not wait for it.
NOTIFY = f"SELECT set_config('synchronous_commit', 'off', true), pg_notify(({_CHANNEL}), %(origin)s)"
"""Has the watches of all processes on this schema return, but for those of ``origin``, once it commits."""


class NotificationWatch:
    """Listens through a connection of its own, and opens another one when that is lost.

    Args:
        connect: opens one that commits by itself.
        origin: whose notices are none to this watch.
    """

    def __init__(self, connect: Connect, origin: str) -> None:
        self._connect = connect
        self._origin = origin
        self._connection: psycopg.Connection[Any] | None = None
        self._connect_at = 0.0
        self._pause_s = _SHORTEST_PAUSE_S
        self._is_missed = False
        self._waiting, self._waking = socket.socketpair()
        self._waiting.setblocking(False)
        self._waking.setblocking(False)

    @property
    def is_live(self) -> bool:
        """Whether it is connected."""
        return self._connection is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait until a commit is announced, or may have been while nobody listened."""
        try:
            if self._connection is not None:
                return self._wait_for_notice(self._connection, timeout_s)
            left_s = self._connect_at - time.monotonic()
            if left_s > 0:
                self._sleep(min(left_s, timeout_s))
                return False
            self._connection = self._listen()
        except psycopg.Error as error:  # whoever works with the database will be told; the worker looks by itself too
            self._lose(error)
            return False
        self._pause_s = _SHORTEST_PAUSE_S
        if self._is_missed:
            self._is_missed = False
            logger.warning("workers are told of new jobs again")
        return True

    def _wait_for_notice(self, connection: "psycopg.Connection[Any]", timeout_s: float) -> bool:
        # First what has been read already, together with an answer, and so does not show on the socket.
        if self._is_told(connection):
            return True
        self._sleep(timeout_s, connection)
        return self._is_told(connection)

    def _is_told(self, connection: "psycopg.Connection[Any]") -> bool:
        notices = list(connection.notifies(timeout=0))
        return any(notice.payload != self._origin for notice in notices)

    def _listen(self) -> "psycopg.Connection[Any]":
        connection = self._connect()
        try:
            connection.execute(_LISTEN)
        except BaseException:
            connection.close()
            raise
        return connection

    def _lose(self, error: psycopg.Error) -> None:
        self._close_connection()
        self._connect_at = time.monotonic() + self._pause_s * random.uniform(0.5, 1)  # noqa: S311 - no secret
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if not self._is_missed:
            self._is_missed = True
            logger.warning("workers are not told of new jobs, and look for themselves: %s", scrub_for_log(str(error)))

    def _sleep(self, timeout_s: float, connection: "psycopg.Connection[Any] | None" = None) -> None:
        """Return at the end of the time, at an interruption, or when the connection has something to say."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._waiting, selectors.EVENT_READ)
            if connection is not None:
                selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.select(timeout_s)
        with suppress(BlockingIOError):
            self._waiting.recv(64)

    def interrupt(self) -> None:
        """Have the waiting end."""
        with suppress(OSError):  # full of interruptions, or closed: there is nobody to wake
            self._waking.send(b"!")

    def close(self) -> None:
        """Close the connection."""
        self._close_connection()
        self._waiting.close()
        self._waking.close()

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class NoWatch:
    """Sees nothing, so that workers look for themselves, every ``worker.idle_ms``."""

    is_live = False

    def __init__(self) -> None:
        self._interrupted = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        """Wait, and return False."""
        self._interrupted.wait(timeout_s)
        self._interrupted.clear()
        return False

    def interrupt(self) -> None:
        """Have the waiting end."""
        self._interrupted.set()

    def close(self) -> None:
        """Do nothing."""
