"""Running raw statements: compiled once for each engine, and then handed straight to its driver."""

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import Connection, CursorResult, Dialect, Result, TextClause
from sqlalchemy.engine import IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.orm import Session

from tinycortex.dialects.guard import Guard


class DriverSql(NamedTuple):
    """A statement in the words of one driver.

    Attributes:
        sql: the statement; its parameters are spelled, and its percent signs doubled, as the driver wants.
        names: the statement's parameters; where they are positional, in their order, some more than once.
        constants: the values of those that the statement brings along.
        is_positional: whether the driver takes a tuple of values, or else a dict of them by name.
    """

    sql: str
    names: Sequence[str]
    constants: Mapping[str, Any]
    is_positional: bool


_NAME = itemgetter(0)
"""What a driver says first of a column."""

_Parameters = tuple[Any, ...] | dict[str, Any]


class Fetched(NamedTuple):
    """What a statement has brought.

    Attributes:
        rows: the values of each row, in the order of the columns.
        columns: their names; none where it returns no rows.
        changed: how many rows it changed.
    """

    rows: Sequence[Any]
    columns: tuple[str, ...]
    changed: int

    def first(self) -> Any | None:  # noqa: ANN401 - its attributes depend on the statement
        """Return the first row, with its columns as attributes; None where there is no row."""
        return _row_type(self.columns)(*self.rows[0]) if self.rows else None


# Bounded, since statements are built for each set of kinds, and an engine that was closed leaves its own behind.
@lru_cache(maxsize=256)
def driver_sql(statement: TextClause, dialect: Dialect) -> DriverSql | None:
    """Return what ``dialect``'s driver is to be given for ``statement``; None when that depends on the values.

    It does for a list of values, each of which is a parameter.
    """
    # SQLAlchemy makes the same of the statement each time, for about as long as SQLite takes to run it.
    compiled: Any = statement.compile(dialect=dialect)
    if any(parameter.expanding for parameter in compiled.binds.values()):
        return None
    return DriverSql(
        sql=compiled.string,
        names=tuple(compiled.positiontup if compiled.positional else compiled.binds),
        constants={name: parameter.value for name, parameter in compiled.binds.items() if not parameter.required},
        is_positional=compiled.positional,
    )


def fetch(tx: Session, statement: TextClause, values: Mapping[str, Any]) -> Fetched:
    """Run one raw statement with those of ``values`` that it names; they reach the driver as they are."""
    connection = tx.connection()
    prepared = driver_sql(statement, connection.dialect)
    if prepared is None:
        named = statement._bindparams  # noqa: SLF001 - the one list of a text()'s parameters
        return _read(connection.execute(statement, {name: values[name] for name in named if name in values}))
    given = {**prepared.constants, **values}
    parameters: _Parameters = (
        tuple(map(given.__getitem__, prepared.names))
        if prepared.is_positional
        else {name: given[name] for name in prepared.names}
    )
    guard = Guard.find_alone(connection)
    if guard is None:
        return _read(connection.exec_driver_sql(prepared.sql, parameters))
    return _run(connection, guard, prepared.sql, parameters)


def execute(tx: Session, statement: TextClause, values: Mapping[str, Any]) -> Result[Any]:
    """Run one raw statement as :func:`fetch` does, and return its rows with the names of their columns."""
    fetched = fetch(tx, statement, values)
    return IteratorResult(_describe(fetched.columns), iter(fetched.rows))


def count_changed(tx: Session, statement: TextClause, values: Mapping[str, Any]) -> int:
    """Run one raw statement and return how many rows it changed."""
    return fetch(tx, statement, values).changed


def _run(connection: Connection, guard: Guard, sql: str, parameters: _Parameters) -> Fetched:
    """Run a statement on the driver's own cursor.

    SQLAlchemy describes each result anew, column by column, and that takes several times as long as the
    database does. What it makes of an error is left to it.
    """
    cursor = connection.connection.cursor()
    guard.before(connection, cursor, sql)
    told: str | None = sql
    try:
        cursor.execute(sql, parameters)
        told = None  # what goes wrong from here on is no fault of the statement's
        columns = () if cursor.description is None else tuple(map(_NAME, cursor.description))
        fetched = Fetched(cursor.fetchall() if columns else (), columns, cursor.rowcount)
    except BaseException as error:  # noqa: BLE001 - raised anew, as SQLAlchemy would have
        connection._handle_dbapi_exception(error, told, parameters, cursor, None)  # noqa: SLF001 - the one place
    if guard.after is not None:
        guard.after(connection, cursor, sql)
    cursor.close()
    return fetched


def _read(result: CursorResult[Any]) -> Fetched:
    changed = result.rowcount
    return Fetched(result.all(), tuple(result.keys()), changed) if result.returns_rows else Fetched((), (), changed)


@lru_cache(maxsize=256)
def _row_type(columns: tuple[str, ...]) -> Callable[..., Any]:
    return namedtuple("_Row", columns)  # noqa: PYI024 - only now are its fields known


@lru_cache(maxsize=256)
def _describe(columns: tuple[str, ...]) -> SimpleResultMetaData:
    return SimpleResultMetaData(columns)
