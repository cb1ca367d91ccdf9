"""A queue with rows in every table, with every sort of value that there is, and what is stored in a database."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import select

from tinycortex import Database
from tinycortex.config import DatabaseSettings
from tinycortex.models import (
    Base,
    BufferRow,
    ChunkEmbeddingRow,
    ChunkSkipRow,
    EntityRow,
    GateRow,
    IngestedSourceRow,
    ScoreRow,
    SummaryEmbeddingRow,
    SummaryRow,
    SummarySkipRow,
    TreeRow,
)
from tinycortex.testing import ChunkRowFactory, JobRowFactory, insert_rows

TEXT = "na\xefve \N{GRINNING FACE} \\ ' \" %s :name \x7f\x1b\r\n\t \ufffd \u2028"
LARGEST = 2**63 - 1
STATES = ["delayed", "done", "failed", "failed_transient", "deferred", "cancelled"]

KEYS = ["key:0", "key:1", "key:2"]
"""The dedupe keys of active rows."""


def fill(database: Database) -> None:
    """Insert at least one row into each table; no job runs."""
    insert_rows(
        database,
        *(JobRowFactory.build(**{state: True}) for state in STATES),
        *(JobRowFactory.build(dedupe_key=key) for key in KEYS),
        JobRowFactory.build(failed=True, dedupe_key="key:0", last_error=TEXT, claim_token=LARGEST, heals=7),
        JobRowFactory.build(kind="from_the_future", payload_json="", status="parked", available_at_ms=-LARGEST - 1),
        ChunkRowFactory.build(id="chunk", content=TEXT, path_scope="", timestamp_ms=LARGEST),
        ChunkRowFactory.build(sealed=True),
        TreeRow(id="tree", kind="source", scope=TEXT, created_at_ms=1),
    )
    tree: dict[str, Any] = {"tree_id": "tree", "level": 0}
    vector: dict[str, Any] = {"model_signature": TEXT, "vector": bytes(range(256)), "dim": 64}
    skipped: dict[str, Any] = {"model_signature": "model", "reason": TEXT, "skipped_at_ms": 1}
    insert_rows(
        database,
        SummaryRow(
            **tree,
            id="summary",
            tree_kind="source",
            content=TEXT,
            token_count=1,
            time_range_start_ms=0,
            time_range_end_ms=1,
            sealed_at_ms=2,
            score=0.1 + 0.2,
        ),
    )
    insert_rows(
        database,
        BufferRow(**tree, updated_at_ms=0),
        ChunkEmbeddingRow(**vector, chunk_id="chunk", created_at=5e-324),
        SummaryEmbeddingRow(**vector, summary_id="summary", created_at=1.7976931348623157e308),
        ChunkSkipRow(**skipped, chunk_id="chunk"),
        SummarySkipRow(**skipped, summary_id="summary"),
        ScoreRow(
            chunk_id="chunk",
            total=1 / 3,
            token_count_signal=-1.0,
            unique_words_signal=1e16,
            metadata_weight=1e-7,
            source_weight=1.0,
            interaction_weight=0.0,
            entity_density=123456789.123456789,
            computed_at_ms=1,
        ),
        EntityRow(
            entity_id="entity",
            node_id="chunk",
            node_kind="chunk",
            entity_kind="person",
            surface=TEXT,
            score=0.5,
            timestamp_ms=1,
        ),
        GateRow(name="llm", closed_until_ms=LARGEST),
        IngestedSourceRow(source_kind="chat", source_id=TEXT, ingested_at_ms=1),
    )


def path_of(url: str) -> Path:
    """Return the file of a SQLite URL."""
    return Path(url.removeprefix("sqlite:///"))


def write(url: str, statement: str, *values: object) -> None:
    """Write as another program would that asks neither us nor the foreign keys."""
    with closing(sqlite3.connect(path_of(url))) as connection, connection:
        connection.execute(statement, values)


def stored(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return every row of every table as the driver returns it, sorted."""
    database = Database(DatabaseSettings(url=url))
    try:
        with database.reading() as session:
            return {
                table.name: sorted((tuple(row) for row in session.execute(select(table))), key=repr)
                for table in Base.metadata.sorted_tables
            }
    finally:
        database.dispose()


def count_rows(url: str) -> int:
    """Count the rows of all tables of an upgraded database."""
    return sum(map(len, stored(url).values()))
