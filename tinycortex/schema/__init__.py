"""Runs the migrations from Python, from a checkout and from an installed wheel alike.

Nothing here needs an ``alembic.ini``, changes the working directory, or touches the host's logging.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, inspect

from tinycortex.config import DatabaseSettings
from tinycortex.db import Database
from tinycortex.errors import SchemaError, SchemaMissingError, SchemaOutdatedError

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.operations.ops import MigrationScript

__all__ = [
    "HEAD",
    "VERSION_TABLE",
    "check",
    "current",
    "downgrade",
    "find_differences",
    "find_revision",
    "include_name",
    "sql",
    "stamp",
    "upgrade",
    "verify",
]

HEAD = "0005"
"""The newest revision. Written out so that opening a database need not load Alembic; a test keeps it true."""

VERSION_TABLE = "tinycortex_alembic_version"
"""Our own version table, so that a host application's Alembic may live in the same database."""

# Alembic keeps its environment in module globals, so one process runs one migration at a time.
_one_at_a_time = threading.Lock()


def upgrade(url: str, revision: str = "head", *, schema: str | None = None) -> None:
    """Bring the database to ``revision``, creating it when there is none; at head already, do nothing.

    All revisions run in one transaction, and several processes take turns. What another program made is adopted
    with all its rows.

    Args:
        url: where the database is.
        revision: where to bring it.
        schema: PostgreSQL's schema of the tables, made when there is none; the role's first one when left out.

    Raises:
        ConfigurationError: the URL cannot serve as a queue.
        SchemaError: the tables that are there cannot be adopted, or there is no such revision.
        StorageError: the database could not do its work.
    """
    _run(url, "upgrade", revision, schema)


def downgrade(url: str, revision: str, *, schema: str | None = None) -> None:
    """Take the database back to ``revision``. Contract tables and all their rows stay, even at ``base``."""
    _run(url, "downgrade", revision, schema)


def stamp(url: str, revision: str = "head", *, schema: str | None = None) -> None:
    """Record ``revision`` without running anything, for a database that was set up by other means."""
    _run(url, "stamp", revision, schema)


def current(url: str, *, schema: str | None = None) -> str | None:
    """Return the revision that the database is at, or None when it has none. Creates nothing."""
    database = Database(DatabaseSettings(url=url, schema_name=schema))
    try:
        return find_revision(database)
    finally:
        database.dispose()


def find_revision(database: Database) -> str | None:
    """Return the revision that the database is at, or None when it has none."""
    if not database.exists():
        return None
    with database.reading() as session:
        connection = session.connection()
        if not inspect(connection).has_table(VERSION_TABLE):
            return None
        row = connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").first()  # noqa: S608 - a constant
        return None if row is None else str(row[0])


def verify(database: Database) -> None:
    """Raise unless the database is at :data:`HEAD`.

    Raises:
        SchemaMissingError: there is no schema of ours yet.
        SchemaOutdatedError: it is at another revision.
        StorageError: the database could not do its work.
    """
    revision = find_revision(database)
    if revision is None:
        raise SchemaMissingError(f"database {database.masked_url} has no tinycortex schema; run: tinycortex db upgrade")
    if revision != HEAD:
        raise SchemaOutdatedError(
            f"database {database.masked_url} is at revision {revision}, this tinycortex needs {HEAD}; "
            "run: tinycortex db upgrade (or install the tinycortex that wrote it)"
        )


def check(url: str, *, schema: str | None = None) -> list[str]:
    """Return what differs between the database and the models, a line each; empty when nothing does.

    Tables and columns that we do not know are no difference: they belong to other programs.
    """
    database = Database(DatabaseSettings(url=url, schema_name=schema))
    try:
        verify(database)
        return find_differences(database)
    finally:
        database.dispose()


def include_name(name: str | None, kind: str, parents: Mapping[str, str | None]) -> bool:  # noqa: ARG001 - Alembic's
    """Tell a host application's Alembic whether what it found in the database may be the application's own.

    For ``context.configure(include_name=tinycortex.schema.include_name)`` in the host's ``env.py``, or to be asked by
    a function of its own: without it autogenerate would drop the tables of ours, which the host's models lack.

    Args:
        name: what Alembic found; None for the default schema.
        kind: what that is, such as ``table``.
        parents: the schema and the table that it lies in.
    """
    from tinycortex.models import Base  # noqa: PLC0415 - see HEAD

    return kind != "table" or (name != VERSION_TABLE and name not in Base.metadata.tables)


def find_differences(database: Database) -> list[str]:
    """Return what differs between a database at :data:`HEAD` and the models; see :func:`check`."""
    from alembic.autogenerate import produce_migrations  # noqa: PLC0415 - see HEAD
    from alembic.migration import MigrationContext  # noqa: PLC0415 - see HEAD

    from tinycortex.models import Base  # noqa: PLC0415 - see HEAD
    from tinycortex.schema import adoption  # noqa: PLC0415 - see HEAD

    with database.reading() as session:
        connection = session.connection()
        context = MigrationContext.configure(connection, opts=_comparison_options())
        differences: list[str] = []
        for found in produce_migrations(context, Base.metadata).upgrade_ops_list:
            adoption.overlook_null_keys(found, Base.metadata)
            differences += adoption.describe(found)
        return differences + adoption.find_index_faults(connection, Base.metadata)


def sql(url: str, revisions: str = "base:head", *, schema: str | None = None) -> str:
    """Return the SQL of ``revisions`` (``from:to``, or one end) without connecting to any database."""
    return _run(url, "upgrade", revisions, schema, offline=True)


@contextmanager
def connect_for_migrations(settings: DatabaseSettings) -> Iterator[Connection]:
    """Open the one transaction that revisions run in; several of them take turns."""
    database = Database(settings, may_create=True)
    try:
        with database.transaction() as session:
            for statement in database.list_preliminaries():
                session.connection().exec_driver_sql(statement)
            yield session.connection()
    finally:
        database.dispose()


def write_script(context: ModuleType, settings: DatabaseSettings) -> None:
    """Write the SQL of the revisions that ``context`` was asked for, without connecting to any database."""
    configure_and_run(context, Database(settings).list_preliminaries(), url=settings.url)


def configure_and_run(context: ModuleType, before: Iterable[str] = (), **where: Any) -> None:
    """Run the revisions that ``context`` (Alembic's, from ``migrations/env.py``) was asked for."""
    context.configure(
        **where,
        **_comparison_options(),
        transactional_ddl=True,
        literal_binds=context.is_offline_mode(),
        dialect_opts={"paramstyle": "named"},
    )
    with context.begin_transaction():
        for statement in before:
            context.execute(statement)
        context.run_migrations()


def _comparison_options() -> dict[str, Any]:
    from tinycortex.models import Base  # noqa: PLC0415 - see HEAD
    from tinycortex.schema.adoption import overlook_null_keys  # noqa: PLC0415 - see HEAD

    def overlook(_context: object, _revision: object, scripts: "list[MigrationScript]") -> None:
        for operations in scripts[0].upgrade_ops_list:
            overlook_null_keys(operations, Base.metadata)

    def include_object(_item: object, _name: str | None, kind: str, reflected: bool, twin: object) -> bool:
        # What only the database has belongs to a host or to another program. An adopted file may lack our
        # foreign keys, which SQLite cannot add without rebuilding the table.
        return kind != "foreign_key_constraint" and not (reflected and twin is None)

    return {
        "target_metadata": Base.metadata,
        "version_table": VERSION_TABLE,
        "include_name": lambda name, kind, _parents: kind != "table" or name in Base.metadata.tables,
        "include_object": include_object,
        "process_revision_directives": overlook,
    }


def _run(url: str, command: str, revision: str, schema: str | None, *, offline: bool = False) -> str:
    from alembic import command as commands  # noqa: PLC0415 - see HEAD
    from alembic.util import CommandError  # noqa: PLC0415 - see HEAD

    script = StringIO()
    config = _config(script)
    settings = config.attributes["settings"] = DatabaseSettings(url=url, schema_name=schema)
    run = getattr(commands, command)
    try:
        with _one_at_a_time:
            if offline:
                config.attributes["quiet"] = True
                run(config, revision, sql=True)
                return script.getvalue()
            with connect_for_migrations(settings) as connection:
                config.attributes["connection"] = connection
                run(config, revision)
                return ""
    except CommandError as error:
        raise SchemaError(f"cannot {command} to {revision!r}: {error}") from error


def _config(script: StringIO) -> "Config":
    from alembic.config import Config  # noqa: PLC0415 - see HEAD

    config = Config(stdout=StringIO(), output_buffer=script)
    config.set_main_option("script_location", str(_migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _migrations_folder() -> Path:
    package = Path(__file__).resolve().parent.parent
    inside = package / "migrations"  # an installed wheel
    return inside if inside.is_dir() else package.parent / "migrations"  # a checkout
