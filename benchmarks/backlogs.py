"""Database files with a backlog in them: each is built once, and copied for whoever changes it."""

import json
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tinycortex import schema

_HOUR_MS = 3_600_000
_FIELDS = "id, kind, payload_json, dedupe_key, status, available_at_ms, created_at_ms, completed_at_ms"
_INSERT = f"INSERT INTO mem_tree_jobs ({_FIELDS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608 - a constant

EFFECTS = "CREATE TABLE effects (chunk_id TEXT NOT NULL)"
"""A table of the program that uses the queue, for what it writes beside its jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What lies in a queue; the rows of each sort take the kinds in turns.

    Attributes:
        kinds: the kinds of the rows.
        ready: rows that are due.
        aside: rows, made before those, that are not due for an hour.
        behind: rows, made before those, that are done.
    """

    kinds: tuple[str, ...] = ()
    ready: int = 0
    aside: int = 0
    behind: int = 0


class Backlogs:
    """The files of one run.

    Attributes:
        folder: where they are; its owner removes it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._built: dict[Backlog, Path] = {}
        self._numbers = count()

    def find(self, backlog: Backlog) -> Path:
        """Return the file with ``backlog``, which everybody shares: leave its rows as they are."""
        if backlog not in self._built:
            self._built[backlog] = self._build(backlog)
        return self._built[backlog]

    def copy(self, backlog: Backlog = Backlog()) -> Path:
        """Return a file of the caller's own with ``backlog``, an empty queue when left out."""
        path = self.new_path()
        shutil.copyfile(self.find(backlog), path)
        return path

    def new_path(self) -> Path:
        """Return a path in the folder where nothing is yet."""
        return self.folder / f"{next(self._numbers)}.db"

    def remove(self, path: Path) -> None:
        """Delete a file of the caller's own and what SQLite and the queue keep beside it."""
        for one in path.parent.glob(f"{path.name}*"):
            if one.is_dir():
                shutil.rmtree(one)
            else:
                one.unlink()

    def _build(self, backlog: Backlog) -> Path:
        if backlog == Backlog():
            path = self.new_path()
            schema.upgrade(url_of(path))
            with closing(sqlite3.connect(path)) as connection:
                connection.execute(EFFECTS)
            return path
        path = self.copy()
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous=OFF")
            connection.execute("BEGIN")
            connection.executemany(_INSERT, rows_of(backlog))
            connection.execute("COMMIT")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # the file alone is copied
        return path


def url_of(path: Path) -> str:
    """Return the URL of the database in ``path``."""
    return f"sqlite:///{path}"


def rows_of(backlog: Backlog) -> Iterator[tuple[str, str, str, str, str, int, int, int | None]]:
    """Yield the rows of a backlog: id, kind, payload, key, status, due, created, completed."""
    now_ms = time.time_ns() // 1_000_000
    sorts = (
        ("done", backlog.behind, now_ms - _HOUR_MS, now_ms),
        ("ready", backlog.aside, now_ms + _HOUR_MS, None),
        ("ready", backlog.ready, now_ms - _HOUR_MS, None),
    )
    numbers = count()
    for status, rows, available_at_ms, completed_at_ms in sorts:
        for number in (next(numbers) for _ in range(rows)):
            kind = backlog.kinds[number % len(backlog.kinds)]
            payload = json.dumps({"chunk_id": f"c-{number}"})
            key = f"k:{number:032x}"
            yield f"job:{number:032x}", kind, payload, key, status, available_at_ms, now_ms, completed_at_ms
