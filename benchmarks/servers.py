"""A new database of each engine, for as long as a benchmark takes."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from benchmarks.postgresql_databases import server


@contextmanager
def sqlite() -> Iterator[str]:
    """Yield the URL of a file that is not there yet; it is removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"sqlite:///{Path(folder) / 'chunks.db'}"


@contextmanager
def postgresql() -> Iterator[str]:
    """Run a server with its default settings during the block, and yield the URL of an empty database on it.

    Raises:
        BenchmarkError: the package that carries the server is not there.
    """
    with server() as databases:
        yield databases.make()


SERVERS: dict[str, Callable[[], AbstractContextManager[str]]] = {"sqlite": sqlite, "postgresql": postgresql}
"""By the engine's name."""
