"""Deleting settled rows by their age."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import Connection, event

from tinycortex import Cortex, InvalidInputError, JobStatus, NewJob, Settings
from tinycortex.config import SchedulerSettings
from tinycortex.domain.jobs import TERMINAL_STATUSES
from tinycortex.repositories import jobs as job_repository
from tinycortex.testing import JobRowFactory, ManualClock, insert_rows

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
TRAIT = {JobStatus.DONE: "done", JobStatus.FAILED: "failed", JobStatus.CANCELLED: "cancelled"}


class Note(BaseModel):
    text: str = ""


def ids(cortex: Cortex) -> set[str]:
    return {job.id for job in cortex.jobs.list_jobs(limit=10_000)}


def settled(cortex: Cortex, number: int, **state: Any) -> list[str]:
    """Insert that many settled rows and return their ids."""
    rows = JobRowFactory.build_batch(number, **state)
    names = [row.id for row in rows]
    insert_rows(cortex.database, *rows)
    return names


@pytest.mark.parametrize("status", TERMINAL_STATUSES)
def test_a_row_is_purged_by_the_age_of_its_end(cortex: Cortex, clock: ManualClock, status: JobStatus) -> None:
    """Older than asked goes, exactly as old stays; when the row was made does not matter."""
    trait = {TRAIT[status]: True}
    now = clock.now_ms()
    insert_rows(
        cortex.database,
        JobRowFactory.build(id="older", completed_at_ms=now - 1_001, available_at_ms=now - 5_000, **trait),
        JobRowFactory.build(id="as old", completed_at_ms=now - 1_000, available_at_ms=now - 5_000, **trait),
        JobRowFactory.build(id="made long ago", now_ms=now - DAY_MS, completed_at_ms=now, **trait),
    )
    assert cortex.purge(1_000, [status]) == 1
    assert ids(cortex) == {"as old", "made long ago"}


def test_only_the_statuses_asked_for_are_purged(cortex: Cortex, clock: ManualClock) -> None:
    """Each status has its own age, so a purge of one leaves the others."""
    for status, trait in TRAIT.items():
        insert_rows(cortex.database, JobRowFactory.build(id=status.value, **{trait: True}))
    clock.advance(1)
    assert cortex.purge(0, [JobStatus.FAILED]) == 1
    assert ids(cortex) == {"done", "cancelled"}
    assert cortex.purge(0) == 2
    assert ids(cortex) == set()


@pytest.mark.parametrize("state", [{}, {"delayed": True}, {"deferred": True}, {"running": True}, {"expired": True}])
def test_what_waits_or_runs_is_never_purged(cortex: Cortex, clock: ManualClock, state: dict[str, bool]) -> None:
    """A job is never lost, however old, and even if another program left a time of completion in its row."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", completed_at_ms=1, **state))
    clock.advance(3_650 * DAY_MS)
    assert cortex.purge(0) == 0
    assert ids(cortex) == {"j"}


def test_a_row_cancelled_before_it_was_due_is_purged(cortex: Cortex, clock: ManualClock) -> None:
    """Its age counts from the cancel, though it would have been due only next year."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", available_at_ms=clock.now_ms() + 365 * DAY_MS))
    cortex.cancel("j")
    clock.advance(1_001)
    assert cortex.purge(1_000) == 1


@contextmanager
def commits(cortex: Cortex) -> Iterator[list[object]]:
    """Collect the commits of transactions that deleted rows."""
    deleted: set[int] = set()
    seen: list[object] = []

    def note(connection: Connection, _cursor: Any, statement: str, *_rest: Any) -> None:
        if "DELETE FROM" in statement:
            deleted.add(id(connection))

    def commit(connection: Connection) -> None:
        if id(connection) in deleted:
            deleted.discard(id(connection))
            seen.append(connection)

    event.listen(cortex.database.engine, "before_cursor_execute", note)
    event.listen(cortex.database.engine, "commit", commit)
    yield seen
    event.remove(cortex.database.engine, "before_cursor_execute", note)
    event.remove(cortex.database.engine, "commit", commit)


def test_a_large_purge_is_several_transactions(
    cortex: Cortex, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No writer waits for all of it; every row is deleted all the same."""
    monkeypatch.setattr(job_repository, "_PURGE_BATCH", 10)
    settled(cortex, 25, done=True)
    clock.advance(1)
    with commits(cortex) as transactions:
        assert cortex.purge(0) == 25
    assert len(transactions) == 3
    assert ids(cortex) == set()


@contextmanager
def just_before_the_delete(cortex: Cortex, change: str) -> Iterator[None]:
    """Run ``change`` once between the search and the delete, as another process might."""
    waiting = [change]

    def interfere(connection: Connection, _cursor: Any, statement: str, *_rest: Any) -> None:
        if "DELETE FROM" in statement and waiting:
            connection.exec_driver_sql(waiting.pop())

    event.listen(cortex.database.engine, "before_cursor_execute", interfere)
    yield
    event.remove(cortex.database.engine, "before_cursor_execute", interfere)
    assert not waiting


@pytest.mark.parametrize(
    "change",
    [
        "status = 'ready', completed_at_ms = NULL",
        "status = 'running'",
        "completed_at_ms = 1700000000001",
    ],
)
def test_a_row_requeued_after_the_search_stays(cortex: Cortex, clock: ManualClock, change: str) -> None:
    """Whether it still waits, runs, or has failed anew by now: it is not the old row that was found."""
    settled(cortex, 3, failed=True)
    insert_rows(cortex.database, JobRowFactory.build(id="requeued", failed=True))
    clock.advance(1)
    with just_before_the_delete(cortex, f"UPDATE mem_tree_jobs SET {change} WHERE id = 'requeued'"):
        assert cortex.purge(0) == 3
    assert ids(cortex) == {"requeued"}


# Rows whose key has something to say yet


def test_the_flush_of_a_block_is_remembered_through_it(cortex: Cortex, clock: ManualClock) -> None:
    """A purge of everything would otherwise let the block be flushed a second time."""
    clock.set(clock.now_ms() // (3 * HOUR_MS) * 3 * HOUR_MS)  # the block's first instant
    job_id = cortex.enqueue_flush_stale()
    assert cortex.drain_until_idle() == 1
    clock.advance(3 * HOUR_MS - 1)
    assert cortex.purge(0) == 0
    assert cortex.enqueue_flush_stale() is None
    clock.advance(2)
    assert cortex.purge(0) == 1
    assert job_id not in ids(cortex)


def test_a_kind_of_ones_own_may_be_remembered(cortex: Cortex, clock: ManualClock) -> None:
    """``remember_ms`` keeps the settled rows of its kind at least so long, and no others; a longer age rules."""
    cortex.handler("note", payload=Note, remember_ms=1_000)(lambda _ctx, _payload: None)
    insert_rows(
        cortex.database,
        JobRowFactory.build(id="note", kind="note", done=True),
        JobRowFactory.build(id="other", done=True),
    )
    clock.advance(1_000)
    assert cortex.purge(10) == 1
    assert ids(cortex) == {"note"}
    clock.advance(1)
    assert cortex.purge(1_001) == 0
    assert cortex.purge(10) == 1


# The tick


@pytest.mark.parametrize(("status", "days"), [("done", 7), ("failed", 30), ("cancelled", 30)])
def test_a_tick_purges_what_has_been_kept_long_enough(
    cortex: Cortex, clock: ManualClock, status: str, days: int
) -> None:
    """Without other settings a done row is kept for a week, a failed or cancelled one for thirty days."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", **{status: True}))
    clock.advance(days * DAY_MS)
    assert cortex.tick().purged == 0
    assert "j" in ids(cortex)
    clock.advance(1)
    assert cortex.tick().purged == 1
    assert "j" not in ids(cortex)


def test_how_long_rows_are_kept_is_a_setting(open_cortex: Callable[..., Cortex], clock: ManualClock) -> None:
    """``scheduler.keep_done_s`` and ``scheduler.keep_failed_s`` say how long."""
    cortex = open_cortex(Settings(scheduler=SchedulerSettings(keep_done_s=2, keep_failed_s=1)))
    for status, trait in TRAIT.items():
        insert_rows(cortex.database, JobRowFactory.build(id=status.value, **{trait: True}))
    clock.advance(1_001)
    assert cortex.tick().purged == 2
    assert "done" in ids(cortex)
    clock.advance(1_000)
    assert cortex.tick().purged == 1


# Arguments


@pytest.mark.parametrize("age", [-1, 1.5, True, "1000", None, 2**63])
def test_an_age_is_whole_milliseconds(cortex: Cortex, clock: ManualClock, age: Any) -> None:
    """A wrong age is refused, and nothing is deleted."""
    settled(cortex, 1, done=True)
    clock.advance(DAY_MS)
    with pytest.raises(InvalidInputError, match="older_than_ms"):
        cortex.purge(age)
    assert len(ids(cortex)) == 1


def test_the_longest_age_keeps_everything(cortex: Cortex) -> None:
    """An age beyond any row is no error."""
    settled(cortex, 1, done=True)
    assert cortex.purge(2**63 - 1) == 0


@pytest.mark.parametrize("statuses", [["ready"], ["done", "running"], ["donne"], "done", [None]])
def test_only_settled_statuses_can_be_named(cortex: Cortex, clock: ManualClock, statuses: Any) -> None:
    """A status that is not terminal, or is none at all, is refused before anything is deleted."""
    settled(cortex, 1, done=True)
    cortex.enqueue(NewJob(kind="extract_chunk", payload_json='{"chunk_id":"c"}'))
    clock.advance(1)
    with pytest.raises(InvalidInputError):
        cortex.purge(0, statuses)
    assert len(ids(cortex)) == 2


def test_a_list_of_no_status_at_all(cortex: Cortex) -> None:
    """The listing names a mistyped status the same way."""
    with pytest.raises(InvalidInputError, match="donne"):
        cortex.jobs.list_jobs(status="donne")  # type: ignore[arg-type]  # what a caller may mistype
