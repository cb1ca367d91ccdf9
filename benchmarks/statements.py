"""Our own statements on the bare driver, several jobs a transaction: what the database lets any worker reach."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Dialect, TextClause
from sqlalchemy.orm import Session

from benchmarks.backlogs import Backlog, url_of
from benchmarks.drains import KIND, Chunk, drain, fill, register
from benchmarks.figures import RATIO, Row, ratios
from benchmarks.plan import BenchmarkError, Contestant, Plan
from tinycortex import Cortex
from tinycortex.config import WorkerSettings
from tinycortex.repositories import job_sql
from tinycortex.repositories.execution import DriverSql, driver_sql
from tinycortex.writer import Writer

_BATCHES = (1, 8, 32, 64)

_WORKER = "default worker"

_RANDOM_KEYS = "settle 32, claim 32, commit: random keys"
_LARGE_PAGES = "settle 32, claim 32, commit: random keys, pages of 4 KiB, log of 4 MiB"
_LAYOUTS: dict[str, Mapping[str, int]] = {
    _RANDOM_KEYS: {},
    _LARGE_PAGES: {"page_size": 4096, "wal_autocheckpoint": 1000},
}
"""How the file is kept, where it is not as ours are: SQLite's own way."""

_THREADS = {
    "tinycortex-loop": "default worker: the loop, a job",
    "tinycortex-storage": "default worker: storage, a job",
}
"""The threads whose processor time is taken."""

_BARE = "an empty transaction, bare driver"
_OURS = "an empty transaction, ours"
_WORKERS = "an empty transaction, a worker's"


def run(plan: Plan) -> Iterator[Row]:
    """Yield the jobs/s of the statements by the size of the batch, and what a worker makes of them."""
    contestants: dict[str, Contestant] = {_name(batch): partial(_measure, plan, batch) for batch in _BATCHES}
    contestants |= {layout: partial(_measure_random_keys, plan, layout) for layout in _LAYOUTS}
    contestants[_WORKER] = partial(_measure_worker, plan)
    contestants["transactions"] = partial(_measure_transactions, plan)
    found = plan.interleave("statements", contestants)
    for name, values in found.items():
        yield Row(name, "µs" if name.startswith("an empty") or name in _THREADS.values() else "jobs/s", values)
    batch = max(size for size in _BATCHES if size <= WorkerSettings().concurrency)
    yield Row(f"{_OURS} ÷ bare driver", RATIO, ratios(found[_OURS], found[_BARE]))
    yield Row(f"{_WORKERS} ÷ bare driver", RATIO, ratios(found[_WORKERS], found[_BARE]))
    yield Row("small pages and a large log ÷ SQLite's own", RATIO, ratios(found[_RANDOM_KEYS], found[_LARGE_PAGES]))
    yield Row(f"{_WORKER} ÷ {_name(batch)}", RATIO, ratios(found[_WORKER], found[_name(batch)]))


def _name(batch: int) -> str:
    return f"settle {batch}, claim {batch}, commit"


class _Clocks:
    """Reads the processor time of the worker's threads at the start of its first job and of its last."""

    def __init__(self, jobs: int) -> None:
        self._left = jobs
        self._first: dict[str, float] = {}
        self.took_us: dict[str, float] = {}

    def __call__(self, _payload: Chunk) -> None:
        self._first = self._first or _read_clocks()
        self._left -= 1
        if self._left == 0:
            self.took_us = {name: (at_s - self._first[name]) * 1e6 for name, at_s in _read_clocks().items()}


def _read_clocks() -> dict[str, float]:
    return {
        _THREADS[thread.name]: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.name in _THREADS and thread.ident is not None
    }


def _measure_worker(plan: Plan) -> dict[str, float]:
    jobs = plan.sizes.drained
    path, clocks = plan.backlogs.copy(Backlog(kinds=(KIND,), ready=jobs)), _Clocks(jobs)
    rate = drain(path, jobs, limit_s=plan.sizes.limit_s, body=clocks)
    plan.backlogs.remove(path)
    return {_WORKER: rate} | {name: took_us / jobs for name, took_us in clocks.took_us.items()}


def _measure_transactions(plan: Plan) -> dict[str, float]:
    """Return what beginning and committing takes when nothing is written in between, layer by layer (µs)."""
    path, times = plan.backlogs.copy(), plan.sizes.enqueued
    with (
        Cortex.open(url_of(path)) as cortex,
        closing(sqlite3.connect(path, isolation_level=None)) as bare,
        closing(Writer(cortex.database)) as writer,
    ):
        engine = cortex.database.engine

        def on_the_driver() -> None:
            bare.execute("BEGIN IMMEDIATE")
            bare.execute("COMMIT")

        def with_the_pool() -> None:
            with closing(engine.raw_connection()) as pooled:
                driver: Any = pooled.dbapi_connection
                driver.execute("BEGIN IMMEDIATE")
                driver.execute("COMMIT")

        def with_core() -> None:
            with engine.begin():
                pass

        def with_a_session() -> None:
            with Session(engine) as session, session.begin():
                session.connection()

        def ours() -> None:
            with cortex.database.transaction() as session:
                session.connection()

        def a_workers() -> None:
            with writer.transaction() as session:
                session.connection()

        layers: dict[str, Callable[[], None]] = {
            _BARE: on_the_driver,
            "an empty transaction, with the pool": with_the_pool,
            "an empty transaction, with SQLAlchemy's Core": with_core,
            "an empty transaction, with a session": with_a_session,
            _OURS: ours,
            _WORKERS: a_workers,
        }
        took_us = {what: _time(layer, times) for what, layer in layers.items()}
    plan.backlogs.remove(path)
    return took_us


def _time(do: Callable[[], None], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        do()
    return (time.perf_counter() - began) / times * 1e6


def _measure(plan: Plan, batch: int) -> dict[str, float]:
    path = plan.backlogs.copy(Backlog(kinds=(KIND,), ready=plan.sizes.drained))
    return {_name(batch): _measure_drain(plan, path, batch)}


def _measure_random_keys(plan: Plan, layout: str) -> dict[str, float]:
    path, kept = plan.backlogs.copy(), _LAYOUTS[layout]
    fill(path, plan.sizes.drained)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        if "page_size" in kept:
            connection.execute("PRAGMA journal_mode=DELETE")
            connection.execute(f"PRAGMA page_size={kept['page_size']}")
        connection.execute("VACUUM")
    return {layout: _measure_drain(plan, path, 32, kept.get("wal_autocheckpoint"))}


def _measure_drain(plan: Plan, path: Path, batch: int, log_pages: int | None = None) -> float:
    """Return the jobs/s of the statements; ``log_pages`` tells when the log is copied, if not as the queue does it."""
    with Cortex.open(url_of(path)) as cortex, cortex.database.engine.connect() as connection:
        register(cortex, lambda: None)
        dialect = connection.dialect
        claim = _prepare(job_sql.claim(cortex.registry.list_specs()), dialect)
        settle = _prepare(job_sql.mark_done_many(batch), dialect)
        if log_pages is None:
            log_pages = int(connection.exec_driver_sql("PRAGMA wal_autocheckpoint").scalar_one())
    rate = _drain(path, claim, settle, batch, log_pages=log_pages, limit_s=plan.sizes.limit_s)
    plan.backlogs.remove(path)
    return rate


def _prepare(statement: TextClause, dialect: Dialect) -> DriverSql:
    prepared = driver_sql(statement, dialect)
    if prepared is None:
        raise BenchmarkError("a statement of the hot path depends on its values")
    return prepared


def _drain(path: Path, claim: DriverSql, settle: DriverSql, batch: int, *, log_pages: int, limit_s: float) -> float:
    done = 0
    rows: list[tuple[Any, ...]] = []
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint={log_pages}")
        began = time.perf_counter()
        while time.perf_counter() - began < limit_s:
            now_ms = time.time_ns() // 1_000_000
            connection.execute("BEGIN IMMEDIATE")
            if rows:
                connection.execute(settle.sql, _values(settle, {"now_ms": now_ms} | _claims_of(rows))).fetchall()
                done += len(rows)
            wanted = {"now_ms": now_ms, "lease_ms": 300_000, "worker_id": "statements", "limit": batch}
            rows = connection.execute(claim.sql, _values(claim, wanted)).fetchall()
            connection.execute("COMMIT")
            if len(rows) < batch:
                break
        return done / (time.perf_counter() - began)


def _claims_of(rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    places = [job_sql.JOB_FIELDS.index(field) for field in job_sql.CLAIM_FIELDS]
    values = [row[place] for row in rows for place in places]
    return dict(zip(job_sql.claim_parameters(len(rows)), values, strict=True))


def _values(statement: DriverSql, values: Mapping[str, Any]) -> tuple[Any, ...]:
    given = {**statement.constants, **values}
    return tuple(given[name] for name in statement.names)
