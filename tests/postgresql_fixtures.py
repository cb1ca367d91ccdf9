"""Fixtures of what a PostgreSQL server can do to a queue."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from sqlalchemy import event, make_url

from postgresql_server import OwnServer, psycopg_url
from tinycortex import Cortex, Settings, schema
from tinycortex.config import DatabaseSettings, WorkerSettings
from tinycortex.testing import FakeDelegates

LONG_MS = 3_600_000

HURRIED = Settings(
    database=DatabaseSettings(busy_timeout_ms=200),
    worker=WorkerSettings(
        idle_ms=5, busy_ms=5, io_ms=5, recover_ms=LONG_MS, host_io_ms=LONG_MS, disk_full_ms=LONG_MS, other_ms=LONG_MS
    ),
)
"""Only the pauses that a fault of the server or of a lock calls for are short."""

OpenHurried = Callable[[str], Cortex]


@pytest.fixture
def administrator(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection of somebody else's to the test's database, each of whose statements is a transaction."""
    with psycopg.connect(psycopg_url(database_url), autocommit=True) as connection:
        yield connection


@pytest.fixture
def open_hurried() -> Iterator[OpenHurried]:
    """Open a queue with the server's clock, whose worker pauses for moments only; closed at the end."""
    with ExitStack() as opened:
        yield lambda url: opened.enter_context(Cortex.open(url, settings=HURRIED, delegates=FakeDelegates()))


@pytest.fixture
def hurried(open_hurried: OpenHurried, database_url: str) -> Cortex:
    """A queue on the test's database."""
    return open_hurried(database_url)


@pytest.fixture
def effects(administrator: psycopg.Connection[Any]) -> Callable[[], int]:
    """An application's table, into which handlers write, without any constraint; returns how many rows it has."""
    administrator.execute("CREATE TABLE effects (number INTEGER)")

    def count() -> int:
        row = administrator.execute("SELECT COUNT(*) FROM effects").fetchone()
        assert row is not None
        return int(row[0])

    return count


@pytest.fixture(scope="module")
def own_server() -> Iterator[OwnServer]:
    """A server of the module's own, which may be killed; whoever kills it starts it again."""
    with OwnServer() as server:
        yield server


@pytest.fixture
def own_url(own_server: OwnServer) -> Iterator[str]:
    """URL of a database at the newest revision on a server of its own; its role is no administrator."""
    with own_server.database() as name:
        with psycopg.connect(psycopg_url(own_server.url_of(name)), autocommit=True) as administrator:
            administrator.execute("DROP ROLE IF EXISTS ordinary")
            administrator.execute("CREATE ROLE ordinary LOGIN")
            administrator.execute(f"ALTER DATABASE {name} OWNER TO ordinary".encode())
        url = make_url(own_server.url_of(name)).set(username="ordinary").render_as_string(hide_password=False)
        schema.upgrade(url)
        yield url


@pytest.fixture
def at_statement() -> Callable[..., None]:
    """Return a function that has something done once, before or after the database sees a statement."""

    def register(cortex: Cortex, moment: str, word: str, do: Callable[[psycopg.Connection[Any]], object]) -> None:
        left = [do]

        def look(_connection: object, cursor: psycopg.Cursor[Any], statement: str, *_rest: object) -> None:
            if word in statement and left:
                left.pop()(cursor.connection)

        event.listen(cortex.database.engine, f"{moment}_cursor_execute", look)

    return register
