"""Running raw statements: compiled once for each engine, and then handed straight to its driver."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import CursorResult, Dialect, TextClause
from sqlalchemy.orm import Session


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


def execute(tx: Session, statement: TextClause, values: Mapping[str, Any]) -> CursorResult[Any]:
    """Run one raw statement with those of ``values`` that it names; they reach the driver as they are."""
    connection = tx.connection()
    prepared = driver_sql(statement, connection.dialect)
    if prepared is None:
        named = statement._bindparams  # noqa: SLF001 - the one list of a text()'s parameters
        return connection.execute(statement, {name: values[name] for name in named if name in values})
    given = {**prepared.constants, **values}
    if prepared.is_positional:
        return connection.exec_driver_sql(prepared.sql, tuple(map(given.__getitem__, prepared.names)))
    return connection.exec_driver_sql(prepared.sql, {name: given[name] for name in prepared.names})


def count_changed(tx: Session, statement: TextClause, values: Mapping[str, Any]) -> int:
    """Run one raw statement and return how many rows it changed."""
    return execute(tx, statement, values).rowcount
