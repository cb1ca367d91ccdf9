"""A program that knows only the contract's columns works on the same file, and writes what we never would."""

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from pydantic import BaseModel

from background import until, working
from tinycortex import Cortex, JobStatus, NewJob, Settings
from tinycortex.config import WorkerSettings
from tinycortex.domain.clock import SystemClock
from tinycortex.testing import JobRowFactory, ManualClock, insert_rows

OpenCortex = Callable[..., Cortex]

HURRIED = Settings(worker=WorkerSettings(idle_ms=5, recover_ms=5))

RECOVER = "UPDATE mem_tree_jobs SET status = 'ready', locked_until_ms = NULL WHERE status = 'running'"
CLAIM = (
    "UPDATE mem_tree_jobs SET status = 'running', attempts = attempts + 1, started_at_ms = :now_ms, "
    "locked_until_ms = :now_ms + 300000 WHERE status = 'ready'"
)


class Note(BaseModel):
    text: str = ""


@pytest.fixture
def other(database_url: str) -> Iterator[sqlite3.Connection]:
    """The other program's connection."""
    with closing(sqlite3.connect(database_url.removeprefix("sqlite:///"), isolation_level=None)) as connection:
        yield connection


def enqueue_foreign(other: sqlite3.Connection, **columns: Any) -> None:
    values = {"id": "theirs", "kind": "note", "payload_json": "{}", "available_at_ms": 0, "created_at_ms": 0} | columns
    names, marks = ", ".join(values), ", ".join("?" * len(values))
    other.execute(f"INSERT INTO mem_tree_jobs ({names}) VALUES ({marks})", list(values.values()))


# Claims


def take_over(cortex: Cortex, other: sqlite3.Connection, clock: ManualClock) -> str:
    """Let our claim expire, and the other program recover and claim the row, under our word as it happens."""
    cortex.handler("note", payload=Note)(lambda _ctx, _payload: None)
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    assert cortex.jobs.claim_next(kinds=cortex.list_kinds(), worker_id="us") is not None
    clock.advance(300_001)
    other.execute(RECOVER)
    other.execute(CLAIM, {"now_ms": clock.now_ms()})
    assert cortex.get_job(job_id).locked_by == "us"
    return job_id


@pytest.mark.parametrize("free", ["release", "recover"])
def test_a_claim_of_another_program_is_not_ours_to_free(
    cortex: Cortex, other: sqlite3.Connection, clock: ManualClock, free: str
) -> None:
    """It leaves our word in the row, and is alive all the same: neither our release nor our death frees it."""
    job_id = take_over(cortex, other, clock)
    theirs = cortex.get_job(job_id)
    assert cortex.jobs.list_owners() == []
    frees: dict[str, Callable[[], int]] = {
        "release": lambda: cortex.jobs.release_running_locks("us"),
        "recover": lambda: cortex.jobs.recover_owned(["us"]),
    }
    assert frees[free]() == 0
    assert cortex.get_job(job_id) == theirs


def test_what_another_program_recovered_is_claimed_and_freed_as_ours_again(
    cortex: Cortex, other: sqlite3.Connection, clock: ManualClock
) -> None:
    """The mark of our claim is that of the last one."""
    job_id = take_over(cortex, other, clock)
    other.execute(RECOVER)
    clock.advance(1)
    assert cortex.jobs.claim_next(kinds=cortex.list_kinds(), worker_id="us") is not None
    assert cortex.jobs.release_running_locks("us") == 1
    assert cortex.get_job(job_id).status is JobStatus.READY


# Requests that it does not see


@pytest.mark.parametrize("status", ["done", "failed", "cancelled"])
def test_a_rerun_outlives_a_settlement_of_another_program(
    cortex: Cortex, other: sqlite3.Connection, status: str
) -> None:
    """What was asked of the row while it ran becomes a job at the next recovery, once."""
    cortex.handler("note", payload=Note, on_duplicate="rerun")(lambda _ctx, _payload: None)
    job_id = str(cortex.enqueue(NewJob.of("note", Note(text="first"), dedupe_key="k")))
    assert cortex.jobs.claim_next(kinds=cortex.list_kinds()) is not None
    assert cortex.enqueue(NewJob.of("note", Note(text="second"), dedupe_key="k")) is None
    other.execute("UPDATE mem_tree_jobs SET status = ?, locked_until_ms = NULL", [status])
    for _ in range(2):
        cortex.recover_stale_locks()
    rerun, settled = cortex.jobs.list_jobs()
    assert (rerun.status, rerun.payload_json, rerun.dedupe_key) == (JobStatus.READY, '{"text":"second"}', "k")
    assert (settled.id, settled.status, settled.rerun_payload_json) == (job_id, status, None)


def test_a_rerun_that_an_active_twin_serves_is_no_second_job(cortex: Cortex) -> None:
    """A job that was enqueued after the settlement does what was asked."""
    cortex.handler("note", payload=Note, on_duplicate="rerun")(lambda _ctx, _payload: None)
    insert_rows(
        cortex.database,
        JobRowFactory.build(kind="note", done=True, dedupe_key="k", rerun_payload_json='{"text":"late"}'),
        JobRowFactory.build(kind="note", payload_json="{}", dedupe_key="k"),
    )
    cortex.recover_stale_locks()
    assert [job.rerun_payload_json for job in cortex.jobs.list_jobs()] == [None, None]


# Rows that no call of ours would make


@pytest.mark.parametrize(
    "payload",
    [b'{"text":"\xff\xfe"}', b"\xff", b'{"text":"\xc3("}', b"\x00", 7, 1.5],
    ids=["in a string", "alone", "half a character", "NUL", "a number", "a fraction"],
)
def test_a_payload_that_is_no_text_fails_its_job_and_no_other(
    cortex: Cortex, other: sqlite3.Connection, payload: object
) -> None:
    """It will never read differently, and the worker goes on."""
    enqueue_foreign(other)
    if isinstance(payload, bytes):
        other.execute("UPDATE mem_tree_jobs SET payload_json = CAST(? AS TEXT)", [payload])
    else:
        other.execute("UPDATE mem_tree_jobs SET payload_json = ?", [payload])
    cortex.handler("note", payload=Note)(lambda _ctx, _payload: None)
    ours = str(cortex.enqueue(NewJob.of("note", Note())))
    assert cortex.drain_until_idle() == 2
    theirs = cortex.get_job("theirs")
    assert (theirs.status, theirs.failure_reason) == (JobStatus.FAILED, "malformed_payload")
    assert cortex.get_job(ours).status is JobStatus.DONE


def test_a_payload_of_bytes_that_are_json_is_read(cortex: Cortex, other: sqlite3.Connection) -> None:
    """A blob in the column is the same payload."""
    enqueue_foreign(other, payload_json=b'{"text":"blob"}')
    seen: list[str] = []
    cortex.handler("note", payload=Note)(lambda _ctx, payload: seen.append(payload.text))
    assert cortex.drain_until_idle() == 1
    assert (cortex.get_job("theirs").status, seen) == (JobStatus.DONE, ["blob"])


@pytest.mark.parametrize("end", ["settle", "recover"])
@pytest.mark.parametrize("odd", ["no attempts", "outranks raises"])
def test_one_odd_row_with_a_request_stops_nobody(
    cortex: Cortex, other: sqlite3.Connection, clock: ManualClock, odd: str, end: str
) -> None:
    """Whatever its columns and its kind's own function make of it, it is settled, and recovery frees the others."""

    def outranks(_payload: Note) -> bool:
        raise KeyError("an application's mistake")

    cortex.handler("note", payload=Note, on_duplicate="rerun", outranks=outranks if odd == "outranks raises" else None)(
        lambda _ctx, _payload: None
    )
    insert_rows(
        cortex.database,
        JobRowFactory.build(kind="note", payload_json="{}", dedupe_key="k", rerun_payload_json='{"text":"later"}'),
        JobRowFactory.build(id="bystander", expired=True),
    )
    if odd == "no attempts":
        other.execute("UPDATE mem_tree_jobs SET max_attempts = 0 WHERE kind = 'note'")
    job = cortex.jobs.claim_next(kinds=cortex.list_kinds())
    assert job is not None
    if end == "settle":
        cortex.jobs.mark_failed(job, "no")
    else:
        clock.advance(300_001)
    assert cortex.bootstrap().recovered >= 1
    assert cortex.get_job("bystander").status is JobStatus.READY
    ready = [job for job in cortex.jobs.list_jobs(kind="note") if job.status is JobStatus.READY]
    assert [(job.payload_json, job.rerun_payload_json) for job in ready] == [('{"text":"later"}', None)]


ODD = ["text", b"blob", "7 apples", -1, 2**62]


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize(
    "column", ["available_at_ms", "max_attempts", "locked_by", "locked_until_ms", "attempts", "started_at_ms"]
)
@pytest.mark.parametrize("status", ["ready", "running", "done"])
def test_a_column_that_holds_no_number_stops_no_worker(
    open_cortex: OpenCortex, other: sqlite3.Connection, status: str, column: str, value: object
) -> None:
    """SQLite keeps whatever it is given; the odd row is run, failed or left, and the others are done."""
    cortex = open_cortex(HURRIED, clock=SystemClock())

    def fail(_ctx: object, _payload: Note) -> None:
        raise ValueError("no")

    cortex.handler("odd", payload=Note, on_duplicate="rerun")(fail)
    cortex.handler("note", payload=Note)(lambda _ctx, _payload: None)
    enqueue_foreign(
        other,
        **{"kind": "odd", "status": status, "dedupe_key": "k", "rerun_payload_json": "{}", "claim_token": 1}
        | {"started_at_ms": 5, "claimed_at_ms": 5, "locked_by": "us", column: value},
    )
    ours = str(cortex.enqueue(NewJob.of("note", Note())))
    with working(cortex):
        until(lambda: cortex.get_job(ours).status is JobStatus.DONE)
    cortex.tick()
    assert (cortex.get_job(ours).status, cortex.get_job(ours).attempts) == (JobStatus.DONE, 1)
    odd = cortex.jobs.list_jobs(kind="odd")
    assert odd, "the odd row is gone"
    assert sum(cortex.status().by_status.values()) == len(cortex.jobs.list_jobs())


@pytest.mark.parametrize("value", ["text", b"blob"])
def test_a_lease_that_is_no_number_is_over(cortex: Cortex, other: sqlite3.Connection, value: object) -> None:
    """Else its row would run for ever."""
    enqueue_foreign(other, status="running", attempts=1, locked_until_ms=value)
    assert cortex.recover_stale_locks() == 1
    assert cortex.get_job("theirs").status is JobStatus.READY


# Text


def test_a_nul_in_a_row_of_another_program_is_seen_and_harms_nothing(
    cortex: Cortex, other: sqlite3.Connection, database_url: str, run: Callable[..., tuple[int, str, str]]
) -> None:
    """The payload is shown whole, refused for good, and the next job runs; what we store has no NUL."""
    cortex.handler("note", payload=Note)(lambda _ctx, _payload: None)
    enqueue_foreign(other, payload_json='{"text": "before\x00after"}')
    next_id = str(cortex.enqueue(NewJob.of("note", Note())))
    assert cortex.drain_until_idle() == 2
    job = cortex.get_job("theirs")
    assert (job.status, job.failure_reason) == (JobStatus.FAILED, "malformed_payload")
    assert "\x00" not in str(job.last_error)
    assert cortex.get_job(next_id).status is JobStatus.DONE
    _code, out, _err = run("--database-url", database_url, "jobs", "show", "theirs", "--json")
    assert json.loads(out)["payload_json"] == '{"text": "before\x00after"}'
