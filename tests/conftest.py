"""Fixtures of every suite. An engine more is one word in ENGINES and one fixture ``make_<engine>``."""

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from full_queue import fill
from postgresql_server import Server, UpgradedDatabases, find_server
from tinycortex import Cortex, Database, QueueDelegates, Settings, schema
from tinycortex.cli import main
from tinycortex.config import DatabaseSettings
from tinycortex.domain.clock import Clock
from tinycortex.testing import FakeDelegates, ManualClock

pytest_plugins = ["postgresql_fixtures"]

ENGINES = ["sqlite", "postgresql"]

MakeDatabase = Callable[[bool], str]
"""Makes a database, at the newest revision or without any table, and returns its URL."""

OpenCortex = Callable[..., Cortex]
Run = Callable[..., tuple[int, str, str]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the long tests run for as long as somebody wants to wait."""
    parser.addoption("--simulations", type=int, default=2_000, help="examples that the simulator runs")
    parser.addoption("--simulation-seed", type=int, default=0, help="another seed, other examples")
    parser.addoption("--kills", type=int, default=10, help="processes that the kill test kills while it runs")
    parser.addoption("--kill-seed", type=int, default=0, help="another seed, other victims")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of a database on every engine; one of a file's own troubles, or of a server's, on that alone."""
    chosen = any("engine_name" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "engine_name" in metafunc.fixturenames and not chosen:
        folders = metafunc.definition.path.parent.relative_to(Path(__file__).parent).parts
        own = {"integration": ["sqlite"], "postgresql": ["postgresql"]}
        metafunc.parametrize("engine_name", own.get(folders[0], ENGINES))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the environment of whoever runs the tests out of them."""
    for name in os.environ:
        if name.upper().startswith("TINYCORTEX_") and not name.upper().startswith("TINYCORTEX_TEST_"):
            monkeypatch.delenv(name)


@pytest.fixture
def clock() -> ManualClock:
    """A clock that stands where the factories' rows were made."""
    return ManualClock()


@pytest.fixture
def delegates() -> FakeDelegates:
    """Delegates that answer what the test tells them to."""
    return FakeDelegates()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file at the newest revision; upgraded once, copied for every test."""
    path = tmp_path_factory.mktemp("template") / "template.db"
    schema.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def make_sqlite(tmp_path: Path, sqlite_template: Path) -> MakeDatabase:
    """Make SQLite files; one without any table is not there yet."""

    numbers = count()

    def make(upgraded: bool) -> str:
        path = tmp_path / ("chunks.db" if upgraded else f"empty-{next(numbers)}.db")
        if upgraded:
            shutil.copyfile(sqlite_template, path)
        return f"sqlite:///{path}"

    return make


@pytest.fixture(scope="session")
def postgresql_server() -> Server:
    """The PostgreSQL server of this run, which all of its processes share."""
    return find_server()


@pytest.fixture(scope="session")
def postgresql_databases(postgresql_server: Server) -> Iterator[UpgradedDatabases]:
    """PostgreSQL databases at the newest revision; the first one is upgraded, the others are copies."""
    with postgresql_server.database() as template:
        schema.upgrade(postgresql_server.url_of(template))
        databases = UpgradedDatabases(postgresql_server, template)
        yield databases
        databases.close()


@pytest.fixture
def make_postgresql(postgresql_server: Server, request: pytest.FixtureRequest) -> Iterator[MakeDatabase]:
    """Make databases on the server."""
    with ExitStack() as made:

        def make(upgraded: bool) -> str:
            if upgraded:
                databases: UpgradedDatabases = request.getfixturevalue("postgresql_databases")
                return postgresql_server.url_of(made.enter_context(databases.lend()))
            return postgresql_server.url_of(made.enter_context(postgresql_server.database()))

        yield make


@pytest.fixture
def empty_database_url(engine_name: str, request: pytest.FixtureRequest) -> str:
    """URL of a database without any table; on SQLite the file is not there yet."""
    make: MakeDatabase = request.getfixturevalue(f"make_{engine_name}")
    return make(False)


@pytest.fixture
def database_url(engine_name: str, request: pytest.FixtureRequest) -> str:
    """URL of a database of this test's own, at the newest revision."""
    make: MakeDatabase = request.getfixturevalue(f"make_{engine_name}")
    return make(True)


@pytest.fixture(params=ENGINES)
def target_engine(request: pytest.FixtureRequest) -> str:
    """The engine that this run of the test moves to; with ``engine_name`` it makes every pair."""
    return str(request.param)


@pytest.fixture
def target_url(target_engine: str, request: pytest.FixtureRequest) -> str:
    """URL of a database without any table, beside the one at ``database_url``."""
    make: MakeDatabase = request.getfixturevalue(f"make_{target_engine}")
    return make(False)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """The database at ``database_url``, without a queue around it."""
    database = Database(DatabaseSettings(url=database_url))
    yield database
    database.dispose()


@pytest.fixture
def source(database: Database) -> Database:
    """A queue with rows in every table, to be moved, that no program has open but for this object."""
    fill(database)
    return database


@pytest.fixture
def source_url(source: Database, database_url: str) -> str:
    """URL of a queue with rows in every table, that nobody has open."""
    source.dispose()
    return database_url


@pytest.fixture
def open_cortex(database_url: str, clock: ManualClock, delegates: FakeDelegates) -> Iterator[OpenCortex]:
    """Open one more queue on the test's database, as another process would; closed at the end."""
    opened: list[Cortex] = []

    def open_one(
        settings: Settings | None = None,
        *,
        clock: Clock = clock,
        delegates: QueueDelegates = delegates,
    ) -> Cortex:
        opened.append(Cortex.open(database_url, settings=settings, clock=clock, delegates=delegates))
        return opened[-1]

    yield open_one
    for cortex in opened:
        cortex.close()


@pytest.fixture
def cortex(open_cortex: OpenCortex) -> Cortex:
    """A queue on the test's database, with the manual clock and the fake delegates."""
    return open_cortex()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs one command in a folder of its own: exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    # What a command logs to is the standard error of this test, and closed after it.
    logger = logging.getLogger("tinycortex")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers])
    monkeypatch.setattr(logger, "level", logger.level)

    def invoke(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tinycortex", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return invoke
