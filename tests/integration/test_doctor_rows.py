"""``Cortex.diagnose`` on the rows: each fault is found as a program leaves it, and sound rows are left in peace."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from background import BOUND_S, program
from tinycortex import Cortex, FindingCode, JobStatus, NewJob, Severity, SystemClock
from tinycortex.testing import JobRowFactory, insert_rows
from tinycortex.testing.factories import NOW_MS

OpenCortex = Callable[..., Cortex]

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS

CLAIM_AND_DIE = """
import os, sys
from pydantic import BaseModel
from tinycortex import Cortex, NewJob

class Nothing(BaseModel):
    pass

cortex = Cortex.open(sys.argv[1])
cortex.handler("fatal", payload=Nothing)(lambda ctx, payload: os._exit(9))
cortex.enqueue(NewJob.of("fatal", Nothing()))
cortex.run_once()
"""


class Nothing(BaseModel):
    """What a job that needs nothing carries."""


def diagnose(cortex: Cortex) -> list[str]:
    """Return the codes of what is found; none of the faults of rows makes a queue unhealthy."""
    findings = cortex.diagnose()
    assert all(finding.severity is Severity.WARNING for finding in findings)
    assert all(finding.found and finding.advice for finding in findings)
    return [finding.code for finding in findings]


def change(database_url: str, statement: str) -> None:
    """Write as another program would that knows only the contract's columns."""
    with closing(sqlite3.connect(Path(database_url.removeprefix("sqlite:///")))) as connection, connection:
        connection.execute(statement)


FAULTS: list[tuple[str, list[dict[str, Any]]]] = [
    ("lease_over", [{"expired": True}]),
    ("lease_over", [{"running": True, "locked_until_ms": None}]),
    ("key_blocked", [{"failed": True, "dedupe_key": "k"}, {"dedupe_key": "k"}]),
    ("key_blocked", [{"failed_transient": True, "dedupe_key": "k"}, {"running": True, "dedupe_key": "k"}]),
    ("kind_unhandled", [{"kind": "from_the_future"}]),
    ("kind_retired", [{"kind": "topic_route"}]),
    ("kind_retired", [{"kind": "digest_daily", "done": True}]),
    ("status_unknown", [{"status": "lost"}]),
    ("clock_ahead", [{"created_at_ms": NOW_MS + HOUR_MS + 1}]),
    ("clock_ahead", [{"running": True, "started_at_ms": NOW_MS + HOUR_MS + 1}]),
    ("clock_ahead", [{"running": True, "locked_until_ms": NOW_MS + DAY_MS + HOUR_MS + 1}]),
]

SOUND: list[list[dict[str, Any]]] = [
    [{}, {"delayed": True}, {"running": True}, {"done": True}, {"failed": True}, {"deferred": True}],
    [{"cancelled": True}, {"failed_transient": True}, {"available_at_ms": NOW_MS + 365 * DAY_MS}],
    [{"running": True, "locked_until_ms": NOW_MS}],
    [{"failed": True, "dedupe_key": "k"}, {"done": True, "dedupe_key": "k"}, {"dedupe_key": "other"}],
    [{"kind": "from_the_future", "done": True}, {"kind": "from_the_future", "running": True}],
    [{"created_at_ms": NOW_MS + HOUR_MS}, {"running": True, "locked_until_ms": NOW_MS + DAY_MS + HOUR_MS}],
]


@pytest.mark.parametrize(("code", "rows"), FAULTS)
def test_a_fault_of_rows_is_found_and_left(cortex: Cortex, code: str, rows: list[dict[str, Any]]) -> None:
    """Once, by its code; the rows stay as they are."""
    insert_rows(cortex.database, *(JobRowFactory.build(**row) for row in rows))
    before = cortex.jobs.list_jobs()
    assert diagnose(cortex) == [code]
    assert cortex.jobs.list_jobs() == before


@pytest.mark.parametrize("rows", SOUND)
def test_sound_rows_are_no_finding(cortex: Cortex, rows: list[dict[str, Any]]) -> None:
    """Nobody is alarmed by a job that only waits, runs or has ended."""
    insert_rows(cortex.database, *(JobRowFactory.build(**row) for row in rows))
    assert diagnose(cortex) == []


def test_a_finding_counts_and_gives_an_example(cortex: Cortex) -> None:
    """One line for many rows."""
    insert_rows(cortex.database, *(JobRowFactory.build(id=f"job:{number}", expired=True) for number in range(3)))
    (finding,) = cortex.diagnose()
    assert finding.code is FindingCode.LEASE_OVER
    assert "3" in finding.found
    assert "job:0" in finding.found


def test_a_dead_workers_rows_are_found_before_their_lease_ends(open_cortex: OpenCortex, database_url: str) -> None:
    """Its process has ended, whatever its lease says; looking twice leaves the proof for whoever recovers."""
    with program(CLAIM_AND_DIE, database_url) as killed:
        assert killed.wait(BOUND_S) == 9
    cortex = open_cortex(clock=SystemClock())
    assert diagnose(cortex) == ["worker_dead"]
    assert diagnose(cortex) == ["worker_dead"]
    (job,) = cortex.jobs.list_jobs()
    assert job.status is JobStatus.RUNNING
    assert cortex.recover_stale_locks() == 1
    assert diagnose(cortex) == ["kind_unhandled"]


def test_a_live_workers_rows_are_sound(cortex: Cortex) -> None:
    """A handler may ask how the queue is doing while it runs."""
    seen: list[list[str]] = []
    cortex.handler("ask", payload=Nothing)(lambda _ctx, _payload: seen.append(diagnose(cortex)))
    cortex.enqueue(NewJob.of("ask", Nothing()))
    assert cortex.run_once()
    assert seen == [[]]


def test_a_kind_with_a_long_lease_of_its_own_is_not_ahead(cortex: Cortex) -> None:
    """Only what no lease of this process explains is the clock's."""
    cortex.handler("long", payload=Nothing, lease_ms=10 * DAY_MS)(lambda _ctx, _payload: None)
    insert_rows(cortex.database, JobRowFactory.build(kind="long", running=True, locked_until_ms=NOW_MS + 10 * DAY_MS))
    assert diagnose(cortex) == []


def test_the_rows_are_looked_at_beside_a_missing_index(cortex: Cortex, database_url: str) -> None:
    """Errors come first, and one fault does not hide the others."""
    insert_rows(cortex.database, JobRowFactory.build(expired=True))
    change(database_url, "DROP INDEX idx_mem_tree_jobs_kind")
    assert [finding.code for finding in cortex.diagnose()] == [FindingCode.SCHEMA_ALTERED, FindingCode.LEASE_OVER]


def test_text_that_is_no_utf_8_hides_no_fault(cortex: Cortex, database_url: str) -> None:
    """Another program's row is read, and told as any other, whatever its bytes are."""
    change(
        database_url,
        "INSERT INTO mem_tree_jobs (id, kind, payload_json, available_at_ms, created_at_ms, status) "
        "VALUES (CAST(x'6a6f623aff' AS TEXT), 'topic_route', '{}', 0, 0, 'done')",
    )
    assert diagnose(cortex) == ["kind_retired"]
