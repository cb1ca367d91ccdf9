"""What the memory's repositories share: inserting what is not there, and lists of ids in portions."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import TextClause, text
from sqlalchemy.orm import Session

from tinycortex.models import Base

IDS_PER_STATEMENT = 500
"""Fewer than any engine's limit of parameters."""


def insert_missing(session: Session, model: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert those of ``rows`` whose key is not there yet; every row names the same columns."""
    if rows:
        session.execute(_insert_missing(model, tuple(rows[0])), [dict(row) for row in rows])


def split_ids(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield ``ids`` in portions that fit one statement."""
    for start in range(0, len(ids), IDS_PER_STATEMENT):
        yield ids[start : start + IDS_PER_STATEMENT]


# Raw, because SQLAlchemy spells ON CONFLICT once per engine, while SQLite and PostgreSQL spell it alike.
# Unlike INSERT OR IGNORE it lets NOT NULL and CHECK violations through.
@lru_cache(maxsize=32)
def _insert_missing(model: type[Base], columns: tuple[str, ...]) -> TextClause:
    names, values = ", ".join(columns), ", ".join(f":{column}" for column in columns)
    return text(f"INSERT INTO {model.__tablename__} ({names}) VALUES ({values}) ON CONFLICT DO NOTHING")
