"""The bare driver: the queue's protocol on the standard library's sqlite3, the yardstick of what we add to it.

One connection, WAL, one committed transaction for each enqueue, claim and settlement. The claim probes one
partial index once per kind, so that its cost does not depend on the backlog.
"""

import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from benchmarks.figures import Row
from benchmarks.plan import BenchmarkError, Contestant, Plan

Synchronous = Literal["NORMAL", "FULL"]

_DDL = """
CREATE TABLE mem_tree_jobs (
  id TEXT PRIMARY KEY, kind TEXT NOT NULL, payload_json TEXT NOT NULL, dedupe_key TEXT,
  status TEXT NOT NULL DEFAULT 'ready', attempts INTEGER NOT NULL DEFAULT 0, max_attempts INTEGER NOT NULL DEFAULT 5,
  available_at_ms INTEGER NOT NULL, locked_until_ms INTEGER, last_error TEXT, created_at_ms INTEGER NOT NULL,
  started_at_ms INTEGER, completed_at_ms INTEGER, failure_reason TEXT, failure_class TEXT);
CREATE INDEX ix_status ON mem_tree_jobs(status, available_at_ms);
CREATE INDEX ix_kind ON mem_tree_jobs(kind);
CREATE UNIQUE INDEX ux_dedupe ON mem_tree_jobs(dedupe_key)
  WHERE dedupe_key IS NOT NULL AND status IN ('ready','running');
CREATE INDEX ix_ready ON mem_tree_jobs(kind, available_at_ms, id) WHERE status = 'ready';
"""

_RANKS = {
    "seal": 1,
    "flush_stale": 2,
    "append_buffer": 3,
    "extract_chunk": 4,
    "reembed_backfill": 4,
    "seal_document": 4,
}

_KINDS = tuple(_RANKS)

_PROBES = " UNION ALL ".join(
    f"SELECT * FROM (SELECT {rank} AS r, available_at_ms AS a, id FROM mem_tree_jobs "  # noqa: S608 - constants
    f"WHERE status='ready' AND kind='{kind}' AND available_at_ms<=:now ORDER BY available_at_ms, id LIMIT 1)"
    for kind, rank in _RANKS.items()
)

_CLAIM = (
    "UPDATE mem_tree_jobs SET status='running', attempts=attempts+1, started_at_ms=:now, "  # noqa: S608 - constants
    "locked_until_ms=:now+300000, last_error=NULL "
    f"WHERE id=(SELECT id FROM ({_PROBES}) ORDER BY r, a, id LIMIT 1) RETURNING *"
)

_ENQUEUE = (
    "INSERT INTO mem_tree_jobs (id,kind,payload_json,dedupe_key,available_at_ms,created_at_ms) VALUES (?,?,?,?,?,?) "
    "ON CONFLICT (dedupe_key) WHERE dedupe_key IS NOT NULL AND status IN ('ready','running') DO NOTHING"
)

_SETTLE = (
    "UPDATE mem_tree_jobs SET status='done', completed_at_ms=?, locked_until_ms=NULL, last_error=NULL "
    "WHERE id=? AND attempts=? AND started_at_ms IS ?"
)


@contextmanager
def open_queue(path: Path, synchronous: Synchronous) -> Iterator[sqlite3.Connection]:
    """Make a queue in a new file at ``path`` and hand out its connection."""
    with closing(sqlite3.connect(path, isolation_level=None, cached_statements=256)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.executescript(_DDL)
        yield connection


def enqueue(connection: sqlite3.Connection, number: int) -> None:
    """Enqueue one job; ``number`` says which, and with it its kind."""
    key, now = uuid.uuid4(), _now_ms()
    payload = '{"chunk_id":"c-%d"}' % number  # noqa: UP031 - as in the protocol, and braces stay readable
    connection.execute(_ENQUEUE, (f"job:{key}", _KINDS[number % len(_KINDS)], payload, f"k:{key}", now, now))


def measure(path: Path, jobs: int, synchronous: Synchronous) -> tuple[float, float]:
    """Return how many jobs are enqueued, and how many claimed and settled, in a new file at ``path`` (jobs/s)."""
    with open_queue(path, synchronous) as connection:
        began = time.perf_counter()
        for number in range(jobs):
            enqueue(connection, number)
        enqueued = time.perf_counter()
        done = 0
        while row := connection.execute(_CLAIM, {"now": _now_ms()}).fetchone():
            connection.execute(_SETTLE, (_now_ms(), row[0], row[5], row[11]))
            done += 1
        drained = time.perf_counter()
    if done != jobs:
        raise BenchmarkError(f"the bare driver enqueued {jobs} jobs and settled {done}")
    return jobs / (enqueued - began), jobs / (drained - enqueued)


def measure_drain(plan: Plan) -> float:
    """Return how many jobs are claimed and settled at NORMAL (jobs/s)."""
    path = plan.backlogs.new_path()
    _enqueued, drained = measure(path, plan.sizes.raw_jobs, "NORMAL")
    plan.backlogs.remove(path)
    return drained


def run(plan: Plan) -> Iterator[Row]:
    """Yield what the bare driver does, by how durable its commits are."""
    sizes: dict[Synchronous, int] = {"NORMAL": plan.sizes.raw_jobs, "FULL": plan.sizes.raw_full_jobs}
    contestants: dict[str, Contestant] = {one: partial(_measure, plan, one, jobs) for one, jobs in sizes.items()}
    for name, values in plan.interleave("raw", contestants).items():
        yield Row(name, "jobs/s", values)


def _measure(plan: Plan, synchronous: Synchronous, jobs: int) -> dict[str, float]:
    path = plan.backlogs.new_path()
    enqueued, drained = measure(path, jobs, synchronous)
    plan.backlogs.remove(path)
    name = f"bare driver, {synchronous}"
    return {f"{name}: enqueue": enqueued, f"{name}: claim + settle": drained}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
