"""What a worker does all day costs SQLite the same whatever waits, or has been done, in the table.

Two measures: the plan of each statement as it reaches the driver, which may neither read the table from end to end
nor sort what it reads of it; and the steps of SQLite's own machine, which do not grow with the rows.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import event, insert, make_url

from tinycortex import Cortex, Job, JobStatus, NewJob
from tinycortex.domain.kinds import BUILTIN_KINDS, KindSpec
from tinycortex.models import JobRow
from tinycortex.testing import JobRowFactory, ManualClock, insert_rows

HOUR_MS = 3_600_000
FEW, MANY = 25, 500
KINDS = tuple(BUILTIN_KINDS.values())
STATES: dict[str, dict[str, Any]] = {"due": {}, "delayed": {"delayed": True}, "done": {"done": True}}


class Note(BaseModel):
    text: str = ""


NOTE = KindSpec(kind="note", payload=Note)


def fill(cortex: Cortex, rows: int) -> None:
    """Insert ``rows`` of each kind in each state: due, to come, done; of the kind "note" only such as are to come."""
    templates = [
        (state, vars(JobRowFactory.build(kind=kind, **trait)))
        for kind in (*BUILTIN_KINDS, NOTE.kind)
        for state, trait in STATES.items()
        if kind != NOTE.kind or state != "due"
    ]
    columns = JobRow.__table__.columns.keys()
    with cortex.transaction() as session:
        session.execute(
            insert(JobRow),
            [
                {name: row.get(name) for name in columns} | {"id": f"{key}:{state}", "dedupe_key": f"{key}:{state}"}
                for state, row in templates
                for key in (f"{row['kind']}:{rows}:{number}" for number in range(rows))
            ],
        )


def held(cortex: Cortex, _clock: ManualClock) -> Job | None:
    return cortex.jobs.claim_next(worker_id="me")


def held_many(cortex: Cortex, _clock: ManualClock) -> list[Job]:
    return cortex.jobs.claim_many(21)


def expire(cortex: Cortex, clock: ManualClock) -> None:
    cortex.jobs.claim_many(5)
    clock.advance(HOUR_MS)


def age(cortex: Cortex, clock: ManualClock) -> None:
    past: dict[str, Any] = {"now_ms": clock.now_ms() - HOUR_MS}
    insert_rows(
        cortex.database, *(JobRowFactory.build(**past, **{state: True}) for state in ("done", "failed", "cancelled"))
    )


Prepare = Callable[[Cortex, ManualClock], Any]
Do = Callable[[Cortex, Any], object]

OPERATIONS: dict[str, tuple[Prepare | None, Do]] = {
    "claim one": (None, lambda cortex, _: cortex.jobs.claim_next()),
    "claim one of some kinds": (None, lambda cortex, _: cortex.jobs.claim_next(kinds=KINDS[2:4])),
    "claim none of many to come": (None, lambda cortex, _: cortex.jobs.claim_next(kinds=[NOTE])),
    "claim many": (None, lambda cortex, _: cortex.jobs.claim_many(20)),
    "claim many, few of them LLM-bound": (None, lambda cortex, _: cortex.jobs.claim_many(20, llm_limit=3)),
    "look at the shared gate": (held, lambda cortex, _: cortex.jobs.shared_gate.look()),
    "settle done": (held, lambda cortex, job: cortex.jobs.mark_done(job)),
    "settle many done": (held_many, lambda cortex, jobs: cortex.jobs.mark_done_many(jobs)),
    "settle failed": (held, lambda cortex, job: cortex.jobs.mark_failed(job, "no")),
    "settle deferred": (held, lambda cortex, job: cortex.jobs.mark_deferred(job, 5, "later")),
    "release": (held, lambda cortex, job: cortex.jobs.release(job)),
    "release all of a worker": (held, lambda cortex, _: cortex.jobs.release_running_locks("me")),
    "renew": (held, lambda cortex, job: cortex.jobs.renew(job)),
    "note an error": (held, lambda cortex, job: cortex.jobs.note_error(job, "no")),
    "watch": (held, lambda cortex, job: cortex.jobs.watch([job])),
    "get": (held, lambda cortex, job: cortex.jobs.get_job(job.id)),
    "cancel": (held, lambda cortex, job: cortex.jobs.cancel(job.id)),
    "recover": (expire, lambda cortex, _: cortex.jobs.recover_stale_locks()),
    "recover the dead": (held, lambda cortex, _: cortex.jobs.recover_owned(["me"])),
    "pass on left requests": (None, lambda cortex, _: cortex.jobs.pass_on_left_requests()),
    "find what comes due next": (None, lambda cortex, _: cortex.jobs.find_next_ready_at([*BUILTIN_KINDS, "note"])),
    "find the oldest": (None, lambda cortex, _: cortex.jobs.find_oldest_ready_at()),
    "list the owners": (held, lambda cortex, _: cortex.jobs.list_owners()),
    "count the expired": (held, lambda cortex, _: cortex.jobs.count_expired(5)),
    "enqueue": (None, lambda cortex, _: cortex.enqueue(note("new"))),
    "enqueue a duplicate": (None, lambda cortex, _: cortex.enqueue(note(f"note:{FEW}:0:delayed"))),
    "purge": (age, lambda cortex, _: cortex.jobs.purge(HOUR_MS // 2, [JobStatus.DONE, JobStatus.FAILED])),
    "purge the cancelled": (age, lambda cortex, _: cortex.jobs.purge(HOUR_MS // 2, [JobStatus.CANCELLED])),
    "purge the retired": (None, lambda cortex, _: cortex.jobs.purge_retired_jobs()),
}


def note(key: str) -> NewJob:
    return NewJob.of("note", Note(), dedupe_key=key)


def run(cortex: Cortex, clock: ManualClock, operation: str, around: Any) -> Any:
    """Prepare one operation, do it within ``around``, and return what that yields."""
    prepare, do = OPERATIONS[operation]
    prepared = None if prepare is None else prepare(cortex, clock)
    with around(cortex) as seen:
        do(cortex, prepared)
    return seen


@contextmanager
def statements(cortex: Cortex) -> Iterator[list[tuple[str, Any]]]:
    """Collect the statements about jobs as the driver is given them."""
    seen: list[tuple[str, Any]] = []

    def collect(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
        if "mem_tree_jobs" in statement:
            seen.append((statement, parameters))

    event.listen(cortex.database.engine, "before_cursor_execute", collect)
    yield seen
    event.remove(cortex.database.engine, "before_cursor_execute", collect)


@contextmanager
def machine_steps(cortex: Cortex) -> Iterator[list[int]]:
    """Count the instructions that SQLite carries out."""
    seen = [0]

    def count() -> int:
        seen[0] += 1
        return 0

    def start(connection: sqlite3.Connection, *_rest: Any) -> None:
        connection.set_progress_handler(count, 1)

    def stop(connection: sqlite3.Connection, *_rest: Any) -> None:
        connection.set_progress_handler(None, 1)

    for name, listener in (("checkout", start), ("checkin", stop)):
        event.listen(cortex.database.engine, name, listener)
    yield seen
    for name, listener in (("checkout", start), ("checkin", stop)):
        event.remove(cortex.database.engine, name, listener)


def faults(plan: list[tuple[int, int, int, str]]) -> list[str]:
    """Return the lines that read the whole table, or sort what the same part of the statement reads of it."""
    read = {parent for _id, parent, _unused, what in plan if what.startswith(("SEARCH mem_tree_jobs", "SCAN mem_t"))}
    return [
        what
        for _id, parent, _unused, what in plan
        if what.startswith("SCAN mem_tree_jobs") or (what == "USE TEMP B-TREE FOR ORDER BY" and parent in read)
    ]


@pytest.mark.parametrize("analyzed", [False, True], ids=["fresh", "analyzed"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_plan_reads_the_table_or_sorts_it(
    cortex: Cortex, clock: ManualClock, database_url: str, operation: str, analyzed: bool
) -> None:
    """Whether or not somebody has told the planner about the rows with ANALYZE."""
    fill(cortex, FEW)
    with closing(sqlite3.connect(str(make_url(database_url).database))) as connection:
        if analyzed:
            connection.execute("ANALYZE")
            cortex.database.engine.dispose()
        seen = run(cortex, clock, operation, statements)
        assert seen
        for statement, parameters in seen:
            plan = connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters).fetchall()
            assert faults(plan) == [], statement


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("SELECT id FROM mem_tree_jobs ORDER BY kind || status", ["SCAN", "USE TEMP B-TREE"]),
        ("SELECT id FROM mem_tree_jobs WHERE kind = 'a' ORDER BY payload_json LIMIT 1", ["USE TEMP B-TREE"]),
        ("SELECT COUNT(*) FROM mem_tree_jobs", ["SCAN"]),
    ],
)
def test_a_plan_at_fault_would_be_found(cortex: Cortex, statement: str, found: list[str]) -> None:
    """The rule sees a scan and a sort where there are some."""
    with cortex.database.reading() as session:
        plan: Any = session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}").all()
    assert [what.partition(" mem_tree_jobs")[0].partition(" FOR ")[0] for what in faults(plan)] == found


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_cost_grows_with_the_backlog(cortex: Cortex, clock: ManualClock, operation: str) -> None:
    """Twenty times as many rows, due, to come and done, are the same number of steps."""
    fill(cortex, FEW)
    (few,) = run(cortex, clock, operation, machine_steps)
    fill(cortex, MANY)
    (many,) = run(cortex, clock, operation, machine_steps)
    assert 0 < many <= few * 1.1 + 20
