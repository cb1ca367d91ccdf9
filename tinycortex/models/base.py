"""The declarative base and the column types that both engines share (contract §1)."""

from sqlalchemy import REAL, BigInteger, Double, Integer, MetaData, Text
from sqlalchemy.orm import DeclarativeBase

WholeNumber = BigInteger().with_variant(Integer(), "sqlite")
"""Milliseconds, counters and sizes: INTEGER on SQLite, BIGINT elsewhere."""

RealNumber: Double[float] = Double().with_variant(REAL(), "sqlite")
"""REAL on SQLite, DOUBLE PRECISION elsewhere."""

PlainText = Text().with_variant(Text(collation="C"), "postgresql")
"""TEXT that is compared byte by byte, as SQLite does, whatever the language of the database is."""


class Base(DeclarativeBase):
    """Base of every mapped table; its metadata is what ``alembic check`` compares with."""

    metadata = MetaData()
