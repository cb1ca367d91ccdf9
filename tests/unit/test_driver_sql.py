"""A raw statement is handed to each driver in its own words."""

from typing import Any

import pytest
from sqlalchemy import Dialect, bindparam, text
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from tinycortex.repositories.execution import driver_sql

SQLITE: Dialect = SQLiteDialect_pysqlite()
POSTGRESQL: Dialect = PGDialect_psycopg()  # type: ignore[no-untyped-call]  # SQLAlchemy's

STATEMENT = text("SELECT 7 % :n, :word LIKE '%x', :n").bindparams(bindparam("word", "x"))


@pytest.mark.parametrize(
    ("dialect", "sql", "names"),
    [
        (SQLITE, "SELECT 7 % ?, ? LIKE '%x', ?", ("n", "word", "n")),
        (POSTGRESQL, "SELECT 7 %% %(n)s, %(word)s::VARCHAR LIKE '%%x', %(n)s", ("n", "word")),
    ],
)
def test_parameters_and_percent_signs_are_spelled_as_the_driver_wants(
    dialect: Dialect, sql: str, names: tuple[str, ...]
) -> None:
    """Each place of a positional parameter has its name; a percent sign is doubled where it is special."""
    prepared = driver_sql(STATEMENT, dialect)
    assert prepared is not None
    assert (prepared.sql, prepared.is_positional) == (sql, dialect is SQLITE)
    assert sorted(prepared.names) == sorted(names)
    assert prepared.constants == {"word": "x"}


def test_a_statement_is_compiled_once_for_each_dialect() -> None:
    """What another engine made of it is never handed to this one."""
    assert driver_sql(STATEMENT, SQLITE) is driver_sql(STATEMENT, SQLITE)
    assert driver_sql(STATEMENT, SQLITE) != driver_sql(STATEMENT, POSTGRESQL)


@pytest.mark.parametrize("dialect", [SQLITE, POSTGRESQL])
def test_a_list_of_values_has_no_one_spelling(dialect: Any) -> None:
    """Its length decides about the statement, which is therefore left to SQLAlchemy."""
    assert driver_sql(text("SELECT :a IN :ids").bindparams(bindparam("ids", expanding=True)), dialect) is None
