"""Our own statements on the bare driver, several jobs a transaction: what the database lets any worker reach."""

import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Dialect, TextClause

from benchmarks.backlogs import Backlog, url_of
from benchmarks.drains import KIND, drain, register
from benchmarks.figures import RATIO, Row, ratios
from benchmarks.plan import BenchmarkError, Contestant, Plan
from tinycortex import Cortex
from tinycortex.config import WorkerSettings
from tinycortex.repositories import job_sql
from tinycortex.repositories.execution import DriverSql, driver_sql

_BATCHES = (1, 8, 32, 64)

_WORKER = "default worker"

_TRANSACTIONS = ("an empty transaction, bare driver", "an empty transaction, ours")


def run(plan: Plan) -> Iterator[Row]:
    """Yield the jobs/s of the statements by the size of the batch, and what a worker makes of them."""
    contestants: dict[str, Contestant] = {_name(batch): partial(_measure, plan, batch) for batch in _BATCHES}
    contestants[_WORKER] = partial(_measure_worker, plan)
    contestants["transactions"] = partial(_measure_transactions, plan)
    found = plan.interleave("statements", contestants)
    for name, values in found.items():
        yield Row(name, "µs" if name in _TRANSACTIONS else "jobs/s", values)
    batch = max(size for size in _BATCHES if size <= WorkerSettings().concurrency)
    yield Row(f"{_TRANSACTIONS[1]} ÷ bare driver", RATIO, ratios(*(found[name] for name in reversed(_TRANSACTIONS))))
    yield Row(f"{_WORKER} ÷ {_name(batch)}", RATIO, ratios(found[_WORKER], found[_name(batch)]))


def _name(batch: int) -> str:
    return f"settle {batch}, claim {batch}, commit"


def _measure_worker(plan: Plan) -> dict[str, float]:
    path = plan.backlogs.copy(Backlog(kinds=(KIND,), ready=plan.sizes.drained))
    rate = drain(path, plan.sizes.drained, limit_s=plan.sizes.limit_s)
    plan.backlogs.remove(path)
    return {_WORKER: rate}


def _measure_transactions(plan: Plan) -> dict[str, float]:
    """Return what beginning and committing takes when nothing is written in between (µs)."""
    path, times = plan.backlogs.copy(), plan.sizes.enqueued
    with Cortex.open(url_of(path)) as cortex:
        began = time.perf_counter()
        for _ in range(times):
            with cortex.database.transaction(durable=False) as session:
                session.connection()
        ours_s = time.perf_counter() - began
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        began = time.perf_counter()
        for _ in range(times):
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("COMMIT")
        bare_s = time.perf_counter() - began
    plan.backlogs.remove(path)
    return dict(zip(_TRANSACTIONS, (bare_s / times * 1e6, ours_s / times * 1e6), strict=True))


def _measure(plan: Plan, batch: int) -> dict[str, float]:
    jobs = plan.sizes.drained
    path = plan.backlogs.copy(Backlog(kinds=(KIND,), ready=jobs))
    with Cortex.open(url_of(path)) as cortex, cortex.database.engine.connect() as connection:
        register(cortex, lambda: None)
        dialect = connection.dialect
        claim = _prepare(job_sql.claim(cortex.registry.list_specs()), dialect)
        settle = _prepare(job_sql.mark_done_many(batch), dialect)
    rate = _drain(path, claim, settle, batch, limit_s=plan.sizes.limit_s)
    plan.backlogs.remove(path)
    return {_name(batch): rate}


def _prepare(statement: TextClause, dialect: Dialect) -> DriverSql:
    prepared = driver_sql(statement, dialect)
    if prepared is None:
        raise BenchmarkError("a statement of the hot path depends on its values")
    return prepared


def _drain(path: Path, claim: DriverSql, settle: DriverSql, batch: int, *, limit_s: float) -> float:
    done = 0
    rows: list[tuple[Any, ...]] = []
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
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
