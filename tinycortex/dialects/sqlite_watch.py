"""Noticing that a SQLite file was written to, or is another file by now."""

import os
import sqlite3
import time
from contextlib import suppress
from pathlib import Path

_LOOK_EVERY_S = 0.05

_LOOKS_PER_IDENTITY = 16
"""A file is seldom replaced, and to ask for its identity costs as much as a look."""


def file_identity(path: Path) -> tuple[int, int] | None:
    """Return what tells one file from another of the same name; None when there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - at half the time, for every transaction
    except OSError:
        return None
    return found.st_dev, found.st_ino


class FileWatch:
    """Looks at a file's version through a connection of its own, which may only read."""

    is_live = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._version: int | None = None
        self._identity: object = None
        self._looks = 0
        self._is_interrupted = False

    def wait(self, timeout_s: float) -> bool:
        """Wait until another connection has committed, or the file is another one, since the last look."""
        give_up = time.monotonic() + timeout_s
        while not self._is_interrupted:
            time.sleep(_LOOK_EVERY_S)  # at half the cost of a wait that could be cut short
            if self._has_changed():
                return True
            if time.monotonic() >= give_up:
                break
        self._is_interrupted = False
        return False

    def interrupt(self) -> None:
        """Have the waiting end, at the next look."""
        self._is_interrupted = True

    def _has_changed(self) -> bool:
        self._looks += 1
        if self._looks % _LOOKS_PER_IDENTITY == 1:
            self._follow_the_file()
        if self._connection is None:
            return False
        try:
            (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:  # locked for a moment, or gone: whoever works with it will be told
            return False
        before, self._version = self._version, version
        return bool(before != version)

    def _follow_the_file(self) -> None:
        identity = file_identity(self._path)
        if self._connection is not None and identity == self._identity:
            return
        self.close()
        self._identity, self._version = identity, None
        with suppress(sqlite3.Error):
            self._connection = sqlite3.connect(
                f"{self._path.as_uri()}?mode=ro", uri=True, timeout=0, isolation_level=None, check_same_thread=False
            )

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
