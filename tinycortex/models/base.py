"""The declarative base and the column types that both engines share (contract §1)."""

from sqlalchemy import REAL, BigInteger, Double, Integer, MetaData
from sqlalchemy.orm import DeclarativeBase

WholeNumber = BigInteger().with_variant(Integer(), "sqlite")
"""Milliseconds, counters and sizes: INTEGER on SQLite, BIGINT elsewhere."""

RealNumber: Double[float] = Double().with_variant(REAL(), "sqlite")
"""REAL on SQLite, DOUBLE PRECISION elsewhere."""


class Base(DeclarativeBase):
    """Base of every mapped table; its metadata is what ``alembic check`` compares with."""

    metadata = MetaData()
