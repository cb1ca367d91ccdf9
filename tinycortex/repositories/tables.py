"""Whole tables, row by row and value by value as they are stored, whatever they mean."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Table, column, func, insert, inspect, literal, select, table, text, true
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from tinycortex.domain.jobs import ACTIVE_KEY_PREDICATE
from tinycortex.domain.text import find_text_fault
from tinycortex.errors import MoveError
from tinycortex.models import Base, JobRow

Row = Sequence[Any]

_BATCH = 500
"""Rows in memory at a time; a chunk may have a dozen kilobytes, and so may a vector."""

_SHOWN = 100
"""Characters of a key that a message shows."""

_CALLED = {int: "a whole number", float: "a real number", str: "text", bytes: "bytes"}


class StoredRows:
    """The rows of one of our tables, or some columns of some of them.

    Args:
        stored: the table.
        columns: the names of the columns; all of them when left out.
        where: the condition of a row, as SQL that both engines know; every row when left out.
    """

    def __init__(self, stored: Table, columns: Sequence[str] | None = None, where: str | None = None) -> None:
        self.name = stored.name
        self._stored = stored
        self._columns = [stored.columns[name] for name in columns] if columns else list(stored.columns)
        # Without their types, which would turn what another program has written into what they expect.
        self._from = table(stored.name, *(column(found.name) for found in self._columns))
        self._where = true() if where is None else text(where)
        self._expected = [(found.name, found.type.python_type, bool(found.nullable)) for found in self._columns]

    def has_any(self, session: Session) -> bool:
        """Tell whether there is a row; a table that is not there has none."""
        connection = session.connection()
        if not inspect(connection).has_table(self.name):
            return False
        return connection.execute(select(literal(1)).select_from(self._from).limit(1)).first() is not None

    def count(self, session: Session) -> int:
        """Count the rows, as the database does."""
        counting = select(func.count()).select_from(self._from).where(self._where)
        return int(session.connection().execute(counting).scalar_one())

    @contextmanager
    def read(self, session: Session) -> Iterator[Iterator[Sequence[Row]]]:
        """Yield every row in no particular order, some at a time, so that memory does not grow with them."""
        reading = select(*self._from.columns).where(self._where)
        # A block that raises leaves rows behind, which a server keeps until it is told.
        with session.connection().execute(reading, execution_options={"yield_per": _BATCH}) as found:
            yield found.partitions()

    def insert(self, session: Session, rows: Sequence[Row]) -> None:
        """Insert whole rows.

        Raises:
            MoveError: a row breaks a rule of the table, or holds what not every engine can; nothing was inserted.
        """
        for row in rows:
            self._check(row)
        names = [found.name for found in self._columns]
        values = [dict(zip(names, row, strict=True)) for row in rows]
        try:
            with session.begin_nested():
                session.connection().execute(insert(self._stored), values)
        except DBAPIError:  # one of the storage is a StorageError by now
            self._blame_one(session, rows, values)
            raise

    def _blame_one(self, session: Session, rows: Sequence[Row], values: list[dict[str, Any]]) -> None:
        for row, value in zip(rows, values, strict=True):
            try:
                with session.begin_nested():
                    session.connection().execute(insert(self._stored), value)
            except DBAPIError as error:
                rule = str(error.orig).partition("\n")[0]  # what follows on further lines may quote the row
                raise MoveError(f"{self._called(row)} breaks a rule of the table: {rule}") from error

    def _check(self, row: Row) -> None:
        for (name, expected, nullable), value in zip(self._expected, row, strict=True):
            fault: str | None = None
            if value is None:
                fault = None if nullable else "nothing (NULL), where a value must stand"
            elif type(value) is not expected:
                fault = f"{_CALLED.get(type(value), type(value).__name__)}, where {_CALLED[expected]} must stand"
            elif expected is str:
                fault = find_text_fault(value)
            elif expected is float and math.isnan(value):
                fault = "no number (NaN)"
            if fault is not None:
                raise MoveError(
                    f"{self._called(row)} holds {fault} in column {name}, which not every database can store; "
                    "mend the row in the source, and move again"
                )

    def _called(self, row: Row) -> str:
        keys = (
            f"{found.name}={ascii(value)[:_SHOWN]}"
            for found, value in zip(self._columns, row, strict=True)
            if found.primary_key
        )
        return f"the row of {self.name} with {', '.join(keys)}"


def all_tables() -> list[StoredRows]:
    """Return every table of ours, each after those that it refers to."""
    return [StoredRows(stored) for stored in Base.metadata.sorted_tables]


def active_keys() -> StoredRows:
    """Return the dedupe keys of active rows, as the database itself tells them, each with its job's id."""
    return StoredRows(JobRow.metadata.tables[JobRow.__tablename__], ("dedupe_key", "id"), ACTIVE_KEY_PREDICATE)
