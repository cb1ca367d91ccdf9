"""What a database looks like that another program made: contract columns only, with rows of every sort."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, create_engine, text

JOBS_TABLE = """
CREATE TABLE mem_tree_jobs (
  id TEXT PRIMARY KEY, kind TEXT NOT NULL, payload_json TEXT NOT NULL, dedupe_key TEXT,
  status TEXT NOT NULL DEFAULT 'ready', attempts INTEGER NOT NULL DEFAULT 0,
  max_attempts INTEGER NOT NULL DEFAULT 5, available_at_ms INTEGER NOT NULL, locked_until_ms INTEGER,
  last_error TEXT, created_at_ms INTEGER NOT NULL, started_at_ms INTEGER, completed_at_ms INTEGER,
  failure_reason TEXT, failure_class TEXT
)
"""

CHUNKS_TABLE = """
CREATE TABLE mem_tree_chunks (
  id TEXT PRIMARY KEY, source_kind TEXT NOT NULL, source_id TEXT NOT NULL, path_scope TEXT, source_ref TEXT,
  owner TEXT NOT NULL, timestamp_ms INTEGER NOT NULL, time_range_start_ms INTEGER NOT NULL,
  time_range_end_ms INTEGER NOT NULL, tags_json TEXT NOT NULL DEFAULT '[]', content TEXT NOT NULL,
  token_count INTEGER NOT NULL, seq_in_source INTEGER NOT NULL, created_at_ms INTEGER NOT NULL,
  lifecycle_status TEXT, parent_summary_id TEXT
)
"""

KINDS = [
    "extract_chunk",
    "append_buffer",
    "seal",
    "flush_stale",
    "reembed_backfill",
    "seal_document",
    "topic_route",
    "digest_daily",
    "from_the_future",
]
STATUSES = ["ready", "running", "done", "failed", "cancelled"]

INSERT_JOB = text(
    "INSERT INTO mem_tree_jobs (id, kind, payload_json, dedupe_key, status, attempts, available_at_ms,"
    " locked_until_ms, last_error, created_at_ms, failure_reason)"
    " VALUES (:id, :kind, :payload_json, :dedupe_key, :status, :attempts, :available_at_ms, :locked_until_ms,"
    " :last_error, :created_at_ms, :failure_reason)"
)

INSERT_CHUNK = text(
    "INSERT INTO mem_tree_chunks (id, source_kind, source_id, owner, timestamp_ms, time_range_start_ms,"
    " time_range_end_ms, content, token_count, seq_in_source, created_at_ms)"
    " VALUES ('chunk-1', 'chat', 'slack', 'me', -1, -1, 253402300799999, 'text', 1, 0, 1)"
)


def whole_number(url: str) -> str:
    """Return the type of a whole number on the engine of ``url`` (contract §1)."""
    return "INTEGER" if url.startswith("sqlite:") else "BIGINT"


@contextmanager
def connect(url: str) -> Iterator[Connection]:
    """Open a database as a program would that knows nothing of us; commit at the end."""
    engine = create_engine(url)
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def insert_job(connection: Connection, number: int, kind: str, status: str, key: str | None = None) -> None:
    """Insert one job, naming contract columns only."""
    values = {
        "id": f"job-{number:03}",
        "kind": kind,
        "payload_json": '{"chunk_id":"ü"}',
        "dedupe_key": key or f"key-{number}",
        "status": status,
        "attempts": number % 3,
        "available_at_ms": number,
        "locked_until_ms": 9 if status == "running" else None,
        "last_error": "é",
        "created_at_ms": number,
        "failure_reason": "why" if status == "failed" else None,
    }
    connection.execute(INSERT_JOB, values)


def fill(connection: Connection) -> None:
    """Insert a job of every kind in every status, and one chunk."""
    rows = [(kind, status) for kind in KINDS for status in STATUSES]
    for number, (kind, status) in enumerate(rows):
        insert_job(connection, number, kind, status)
    connection.execute(INSERT_CHUNK)


def make(url: str) -> None:
    """Make the contract's two main tables, without any index, full of rows."""
    with connect(url) as connection:
        for table in (JOBS_TABLE, CHUNKS_TABLE):
            connection.execute(text(table.replace("INTEGER", whole_number(url))))
        fill(connection)


def read_rows(url: str, table: str = "mem_tree_jobs") -> list[dict[str, Any]]:
    """Return all rows of one table, by id."""
    with connect(url) as connection:
        return [dict(row) for row in connection.execute(text(f"SELECT * FROM {table} ORDER BY id")).mappings()]


def shared(rows: list[dict[str, Any]], like: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``rows`` with the columns that the rows of ``like`` have."""
    return [{name: row[name] for name in like[0]} for row in rows]
