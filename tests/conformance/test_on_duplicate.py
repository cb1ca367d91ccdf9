"""What an enqueue makes of the active row that already has its key: ignore, rerun, replace."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from sqlalchemy import event

from tinycortex import Cortex, Done, Job, JobContext, JobFailure, JobStatus, NewJob
from tinycortex.testing import JobRowFactory, ManualClock, insert_rows

Mode = Literal["ignore", "rerun", "replace"]
MODES: list[Mode] = ["ignore", "rerun", "replace"]
KEPT = '{"text":"kept"}'
OWN = '{"text":"own"}'
NEWEST = '{"text":"newest"}'


class Note(BaseModel):
    text: str = ""


def register(cortex: Cortex, mode: Mode, handler: Callable[[JobContext, Note], Done | None] | None = None) -> None:
    cortex.handler("note", payload=Note, on_duplicate=mode, max_attempts=3)(handler or (lambda _ctx, _payload: None))


def ask(cortex: Cortex, text: str = "newest", kind: str = "note") -> str | None:
    return cortex.enqueue(NewJob.of(kind, Note(text=text), dedupe_key="k"))


def claim(cortex: Cortex) -> Job:
    job = cortex.jobs.claim_next(kinds=cortex.list_kinds(), worker_id="me")
    assert job is not None
    return job


def twin(cortex: Cortex, **state: Any) -> None:
    insert_rows(
        cortex.database,
        JobRowFactory.build(id="twin", kind="note", dedupe_key="k", payload_json=OWN, max_attempts=3, **state),
    )


# Every state of the twin


@pytest.mark.parametrize(
    ("mode", "state", "payload", "kept"),
    [
        ("ignore", {}, OWN, None),
        ("ignore", {"running": True}, OWN, None),
        ("ignore", {"running": True, "rerun_payload_json": KEPT}, OWN, KEPT),
        ("rerun", {}, OWN, None),
        ("rerun", {"delayed": True}, OWN, None),
        ("rerun", {"running": True}, OWN, NEWEST),
        ("rerun", {"expired": True}, OWN, NEWEST),
        ("rerun", {"running": True, "rerun_payload_json": KEPT}, OWN, NEWEST),
        ("replace", {}, NEWEST, None),
        ("replace", {"deferred": True}, NEWEST, None),
        ("replace", {"running": True}, OWN, None),
        ("replace", {"running": True, "rerun_payload_json": KEPT}, OWN, KEPT),
    ],
)
def test_an_active_twin_takes_the_request_as_its_kind_says(
    cortex: Cortex, mode: Mode, state: dict[str, Any], payload: str, kept: str | None
) -> None:
    """The caller gets None in every case, and nothing but the payload or the kept request changes."""
    register(cortex, mode)
    twin(cortex, **state)
    before = cortex.get_job("twin")
    assert ask(cortex) is None
    after = cortex.get_job("twin")
    assert (after.payload_json, after.rerun_payload_json) == (payload, kept)
    assert (after.status, after.attempts, after.available_at_ms, after.locked_until_ms, after.claim_token) == (
        before.status,
        before.attempts,
        before.available_at_ms,
        before.locked_until_ms,
        before.claim_token,
    )
    assert len(cortex.jobs.list_jobs()) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("state", ["done", "failed", "failed_transient", "cancelled"])
def test_a_settled_twin_takes_no_request(cortex: Cortex, mode: Mode, state: str) -> None:
    """A row that has ended is left as it is, and the request becomes a job of its own."""
    register(cortex, mode)
    twin(cortex, **{state: True})
    before = cortex.get_job("twin")
    job_id = ask(cortex)
    assert cortex.get_job(str(job_id)).payload_json == NEWEST
    assert cortex.get_job("twin") == before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("state", [{}, {"running": True}])
def test_a_twin_of_another_kind_is_never_overwritten(cortex: Cortex, mode: Mode, state: dict[str, Any]) -> None:
    """Two kinds that share a key suppress each other, but one's payload never lands in the other's row."""
    register(cortex, "ignore")
    cortex.handler("other", payload=Note, on_duplicate=mode)(lambda _ctx, _payload: None)
    twin(cortex, **state)
    before = cortex.get_job("twin")
    assert ask(cortex, kind="other") is None
    assert [job for job in cortex.jobs.list_jobs() if job != before] == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("state", [None, {}, {"running": True}])
def test_an_enqueue_is_one_statement(cortex: Cortex, mode: Mode, state: dict[str, Any] | None) -> None:
    """Between a look and a write the twin could settle, and the request would be lost with it."""
    register(cortex, mode)
    if state is not None:
        twin(cortex, **state)
    statements: list[str] = []

    @event.listens_for(cortex.database.engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if "mem_tree_jobs" in statement:
            statements.append(statement)

    ask(cortex)
    assert len(statements) == 1


# The request that was kept


def _die_without_budget(cortex: Cortex, clock: ManualClock, job: Job) -> object:
    with cortex.transaction() as session:
        session.connection().exec_driver_sql("UPDATE mem_tree_jobs SET max_attempts = attempts")
    assert job.locked_until_ms is not None
    clock.set(job.locked_until_ms + 1)
    return cortex.recover_stale_locks()


def _outlive_the_lease(cortex: Cortex, clock: ManualClock, job: Job) -> object:
    assert job.locked_until_ms is not None
    clock.set(job.locked_until_ms + 1)
    return cortex.recover_stale_locks()


End = Callable[[Cortex, ManualClock, Job], object]

ENDS: dict[str, tuple[End, JobStatus]] = {
    "done": (lambda cortex, _clock, job: cortex.jobs.mark_done(job), JobStatus.DONE),
    "unrecoverable": (
        lambda cortex, _clock, job: cortex.jobs.mark_failed_typed(job, "no", JobFailure.unrecoverable("bad")),
        JobStatus.FAILED,
    ),
    "dead without budget": (_die_without_budget, JobStatus.FAILED),
}

RETURNS: dict[str, End] = {
    "retry": lambda cortex, _clock, job: cortex.jobs.mark_failed(job, "no"),
    "defer": lambda cortex, clock, job: cortex.jobs.mark_deferred(job, clock.now_ms(), "later"),
    "release": lambda cortex, _clock, job: cortex.jobs.release(job),
    "shutdown": lambda cortex, _clock, _job: cortex.jobs.release_running_locks("me"),
    "recovery": _outlive_the_lease,
    "proof of death": lambda cortex, _clock, _job: cortex.jobs.recover_owned(["me"]),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_row_that_ends_leaves_the_kept_request_as_a_job(cortex: Cortex, clock: ManualClock, end: str) -> None:
    """Whether it was done or failed for good: the newest request runs, with the row's key and budget, at once."""
    register(cortex, "rerun")
    twin(cortex)
    job = claim(cortex)
    assert (ask(cortex, "first"), ask(cortex)) == (None, None)
    settle, status = ENDS[end]
    assert settle(cortex, clock, job)
    assert cortex.get_job("twin").status is status
    (rerun,) = cortex.jobs.list_jobs(status=JobStatus.READY)
    assert (rerun.kind, rerun.dedupe_key, rerun.payload_json) == ("note", "k", NEWEST)
    assert (rerun.attempts, rerun.max_attempts) == (0, cortex.get_job("twin").max_attempts)
    assert (rerun.available_at_ms, rerun.rerun_payload_json) == (clock.now_ms(), None)


@pytest.mark.parametrize("way", RETURNS)
def test_a_row_that_runs_again_takes_the_kept_request_itself(cortex: Cortex, clock: ManualClock, way: str) -> None:
    """One more run serves both, so there is no second row, and the request is not served twice."""
    register(cortex, "rerun")
    twin(cortex)
    job = claim(cortex)
    assert ask(cortex) is None
    assert RETURNS[way](cortex, clock, job)
    (row,) = cortex.jobs.list_jobs()
    assert (row.id, row.status) == ("twin", JobStatus.READY)
    assert (row.payload_json, row.rerun_payload_json) == (NEWEST, None)


@pytest.mark.parametrize("way", RETURNS)
def test_a_row_without_a_request_keeps_its_payload(cortex: Cortex, clock: ManualClock, way: str) -> None:
    """Nobody asked, so the same work is tried again."""
    register(cortex, "rerun")
    twin(cortex)
    assert RETURNS[way](cortex, clock, claim(cortex))
    assert cortex.get_job("twin").payload_json == OWN


def test_the_rerun_commits_with_its_settlement(cortex: Cortex) -> None:
    """Rolled back, the row still runs, and the request is still kept with it."""
    register(cortex, "rerun")
    twin(cortex)
    job = claim(cortex)
    ask(cortex)
    before = cortex.get_job("twin")
    with cortex.transaction() as session:
        assert cortex.jobs.mark_done(job, session=session)
        assert len(cortex.jobs.list_jobs(session=session)) == 2
        session.rollback()
    assert cortex.jobs.list_jobs() == [before]


def test_a_request_during_the_run_runs_it_once_more(cortex: Cortex) -> None:
    """However many asked, there is one more run, with the newest payload, and then the queue is idle."""
    ran: list[str] = []

    def handler(_ctx: JobContext, payload: Note) -> None:
        ran.append(payload.text)
        if payload.text == "own":
            for text in ("first", "second", "newest"):
                assert ask(cortex, text) is None

    register(cortex, "rerun", handler)
    ask(cortex, "own")
    assert cortex.drain_until_idle() == 2
    assert ran == ["own", "newest"]
    assert cortex.jobs.count_by_status()[JobStatus.DONE] == 2


def test_a_stale_holder_starts_no_rerun(cortex: Cortex, clock: ManualClock) -> None:
    """A request is served by the settlement of whoever holds the row, and by nobody else's."""
    register(cortex, "rerun")
    twin(cortex)
    stale = claim(cortex)
    _outlive_the_lease(cortex, clock, stale)
    holder = claim(cortex)
    ask(cortex)
    assert not cortex.jobs.mark_done(stale)
    assert len(cortex.jobs.list_jobs()) == 1
    assert cortex.jobs.mark_done(holder)
    assert len(cortex.jobs.list_jobs()) == 2
