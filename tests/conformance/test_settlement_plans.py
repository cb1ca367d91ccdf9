"""A handler's plan: outcome, follow-ups and writes commit together (spec: Job outcomes; design §1.3, §5)."""

import errno
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from tinycortex import (
    Cortex,
    Defer,
    Done,
    Job,
    JobPlan,
    JobStatus,
    NewJob,
    Settings,
    StorageBusyError,
    StorageCorruptError,
    StorageFullError,
)
from tinycortex.config import DatabaseSettings
from tinycortex.models import ChunkRow
from tinycortex.testing import ChunkRowFactory, ManualClock, NewJobFactory

Plan = Callable[[], JobPlan | None]


class Note(BaseModel):
    text: str = ""


class WriteError(Exception):
    """What a handler's writes raise."""


def run(cortex: Cortex, plan: Plan) -> Job:
    """Run one job whose handler returns what ``plan`` gives, and return its row."""
    cortex.handler("note", payload=Note)(lambda _ctx, _payload: plan())
    job_id = cortex.enqueue(NewJob.of("note", Note(), dedupe_key="note"))
    assert cortex.run_once()
    return cortex.get_job(str(job_id))


def chunk_ids(cortex: Cortex) -> list[str]:
    with cortex.database.reading() as session:
        return list(session.scalars(select(ChunkRow.id)))


def others(cortex: Cortex) -> list[Job]:
    return [job for job in cortex.jobs.list_jobs() if job.kind != "note"]


def add_chunk(session: Session) -> None:
    session.add(ChunkRowFactory.build(id="written"))


def later(clock: ManualClock, **plan: Any) -> Defer:
    return Defer(until_ms=clock.now_ms() + 1_000, reason="later", **plan)


@pytest.mark.parametrize("returned", [None, Done()])
def test_done_or_nothing_settles_done(cortex: Cortex, returned: Done | None) -> None:
    """None stands for ``Done()``."""
    assert run(cortex, lambda: returned).status is JobStatus.DONE


def test_follow_ups_are_enqueued_with_the_settlement(cortex: Cortex) -> None:
    """Contract §4.4: the row is done and its follow-ups are ready."""
    follow_ups = [NewJobFactory.build(), NewJobFactory.build()]
    assert run(cortex, lambda: Done(follow_ups=follow_ups)).status is JobStatus.DONE
    assert sorted(str(job.dedupe_key) for job in others(cortex)) == sorted(str(job.dedupe_key) for job in follow_ups)


def test_a_follow_up_may_have_the_settled_jobs_own_key(cortex: Cortex) -> None:
    """A done row frees its key before its follow-ups are inserted, so a chain can go on under one key."""
    job = run(cortex, lambda: Done(follow_ups=[NewJob.of("note", Note(text="next"), dedupe_key="note")]))
    assert [row.status for row in cortex.jobs.list_jobs() if row.id != job.id] == [JobStatus.READY]


def test_a_follow_up_whose_key_is_active_is_left_out(cortex: Cortex) -> None:
    """A suppressed follow-up is no failure."""
    cortex.enqueue(NewJobFactory.build(dedupe_key="k", available_at_ms=2**60))
    assert run(cortex, lambda: Done(follow_ups=[NewJobFactory.build(dedupe_key="k")])).status is JobStatus.DONE
    assert len(others(cortex)) == 1


def test_writes_commit_with_the_settlement(cortex: Cortex) -> None:
    """What a handler hands over in ``writes`` is there when the row is done."""
    assert run(cortex, lambda: Done(writes=add_chunk)).status is JobStatus.DONE
    assert chunk_ids(cortex) == ["written"]


@pytest.mark.parametrize("extra", [{}, {"progress": True}])
def test_a_defer_carries_writes_and_follow_ups_too(cortex: Cortex, clock: ManualClock, extra: dict[str, bool]) -> None:
    """A batch that continues later keeps what it has done so far."""
    job = run(cortex, lambda: later(clock, writes=add_chunk, follow_ups=[NewJobFactory.build()], **extra))
    assert (job.status, job.attempts) == (JobStatus.READY, 0)
    assert chunk_ids(cortex) == ["written"]
    assert len(others(cortex)) == 1


def test_writes_see_the_settled_row_and_run_once(cortex: Cortex) -> None:
    """``writes`` is called once, in the transaction in which the row has been settled already."""
    seen: list[str] = []
    statement = text("SELECT status FROM mem_tree_jobs WHERE kind = 'note'")
    run(cortex, lambda: Done(writes=lambda session: seen.append(session.execute(statement).scalar_one())))
    assert seen == ["done"]


def _raise_after_writing(session: Session) -> None:
    add_chunk(session)
    session.flush()
    raise WriteError("disk of the handler")


def _raise_system_exit(session: Session) -> None:
    add_chunk(session)
    session.flush()
    raise SystemExit(3)


async def _write_later(session: Session) -> None:
    add_chunk(session)


def _meet_a_full_disk_elsewhere(session: Session) -> None:
    add_chunk(session)
    raise OSError(errno.ENOSPC, "no space left for the handler's own file")


def _meet_a_busy_database_elsewhere(session: Session) -> None:
    add_chunk(session)
    raise StorageBusyError("another queue is locked")


def _meet_a_damaged_database_elsewhere(session: Session) -> None:
    add_chunk(session)
    raise StorageCorruptError("another queue is damaged", url="sqlite:///another.db")


def _meet_a_full_database_elsewhere(session: Session) -> None:
    add_chunk(session)
    raise RuntimeError("wrapped") from StorageFullError("another queue is full", url="sqlite:///another.db")


def _interrupt(session: Session) -> None:
    add_chunk(session)
    raise KeyboardInterrupt


def _write_what_the_schema_forbids(session: Session) -> None:
    add_chunk(session)
    session.execute(text("INSERT INTO mem_tree_chunks (id) VALUES ('no owner')"))


def _leave_what_cannot_be_flushed(session: Session) -> None:
    add_chunk(session)
    session.add(ChunkRow(id="no owner"))


def _commit(session: Session) -> None:
    add_chunk(session)
    session.commit()


def _commit_connection(session: Session) -> None:
    add_chunk(session)
    session.flush()
    session.connection().commit()


def _roll_back(session: Session) -> None:
    add_chunk(session)
    session.rollback()


def _close(session: Session) -> None:
    add_chunk(session)
    session.close()


def _end_by_statement(statement: str) -> Callable[[Session], None]:
    def writes(session: Session) -> None:
        add_chunk(session)
        session.flush()
        session.connection().exec_driver_sql(statement)

    writes.__name__ = statement.lower()
    return writes


def _end_by_driver(method: str) -> Callable[[Session], None]:
    def writes(session: Session) -> None:
        add_chunk(session)
        session.flush()
        getattr(session.connection().connection, method)()

    writes.__name__ = f"driver {method}"
    return writes


def _end_quietly(session: Session) -> None:
    """Commit, and take no notice of the refusal."""
    add_chunk(session)
    session.flush()
    with suppress(Exception):
        session.connection().connection.commit()


BAD_WRITES = [
    _end_by_statement("COMMIT"),
    _end_by_statement("ROLLBACK"),
    _end_by_driver("commit"),
    _end_by_driver("rollback"),
    _end_quietly,
    _raise_after_writing,
    _raise_system_exit,
    _write_later,
    _meet_a_full_disk_elsewhere,
    _meet_a_busy_database_elsewhere,
    _meet_a_damaged_database_elsewhere,
    _meet_a_full_database_elsewhere,
    _interrupt,
    _write_what_the_schema_forbids,
    _leave_what_cannot_be_flushed,
    _commit,
    _commit_connection,
    _roll_back,
    _close,
]


@pytest.mark.parametrize("writes", BAD_WRITES)
def test_bad_writes_undo_the_whole_plan_and_fail_the_attempt(
    cortex: Cortex, writes: Callable[[Session], object]
) -> None:
    """Writes that raise, break a constraint or end the transaction themselves keep nothing, follow-ups included."""
    job = run(cortex, lambda: Done(writes=writes, follow_ups=[NewJobFactory.build()]))
    assert (job.status, job.attempts, job.completed_at_ms) == (JobStatus.READY, 1, None)
    assert job.last_error
    assert chunk_ids(cortex) == []
    assert others(cortex) == []


@pytest.mark.parametrize("writes", BAD_WRITES)
def test_bad_writes_of_a_defer_fail_the_attempt_too(
    cortex: Cortex, clock: ManualClock, writes: Callable[[Session], None]
) -> None:
    """A defer whose writes fail is no defer: the attempt is burnt, or it would come back for ever."""
    job = run(cortex, lambda: later(clock, writes=writes))
    assert (job.status, job.attempts) == (JobStatus.READY, 1)
    assert chunk_ids(cortex) == []


def test_the_error_of_failing_writes_is_kept(cortex: Cortex) -> None:
    """``last_error`` says what the writes raised."""
    assert "WriteError: disk of the handler" in str(run(cortex, lambda: Done(writes=_raise_after_writing)).last_error)


def test_writes_that_commit_are_told_what_is_wrong(cortex: Cortex) -> None:
    """A commit inside ``writes`` would save half a settlement, so it is refused with a message that says so."""
    assert "must not commit" in str(run(cortex, lambda: Done(writes=_commit)).last_error)


@pytest.mark.parametrize("through", ["this queue", "another one"])
def test_writes_that_wait_for_their_own_settlement_fail_the_attempt(
    cortex: Cortex, open_cortex: Callable[..., Cortex], through: str
) -> None:
    """They could wait for ever, and the worker with them."""
    impatient = Settings(database=DatabaseSettings(busy_timeout_ms=20))
    queue = cortex if through == "this queue" else open_cortex(impatient)

    def cancel_oneself(_session: Session) -> None:
        [own] = cortex.jobs.list_jobs()
        queue.cancel(own.id)

    job = run(cortex, lambda: Done(writes=cancel_oneself))
    assert (job.status, job.attempts) == (JobStatus.READY, 1)
    assert "session" in str(job.last_error)


def test_writes_may_use_savepoints(cortex: Cortex) -> None:
    """A savepoint that is released keeps its rows, one that is rolled back takes its own away."""

    def writes(session: Session) -> None:
        with session.begin_nested():
            add_chunk(session)
        with session.begin_nested() as savepoint:
            session.add(ChunkRowFactory.build(id="undone"))
            savepoint.rollback()

    assert run(cortex, lambda: Done(writes=writes)).status is JobStatus.DONE
    assert chunk_ids(cortex) == ["written"]


def test_a_follow_up_that_cannot_be_written_undoes_the_whole_plan(cortex: Cortex) -> None:
    """A follow-up with a payload that its handler would refuse fails the attempt, and the writes go too."""
    job = run(
        cortex, lambda: Done(writes=add_chunk, follow_ups=[NewJob(kind="extract_chunk", payload_json='{"id":1}')])
    )
    assert (job.status, job.attempts) == (JobStatus.READY, 1)
    assert "PayloadError" in str(job.last_error)
    assert chunk_ids(cortex) == []


def test_a_stale_holders_plan_is_not_carried_out(cortex: Cortex, clock: ManualClock) -> None:
    """Contract §4.9: who lost the claim writes nothing, enqueues nothing, and its ``writes`` is not even called."""
    called: list[str] = []

    def lose_the_claim() -> Done:
        clock.advance(300_001)
        assert cortex.jobs.recover_stale_locks() == 1
        assert cortex.jobs.claim_next(kinds=cortex.list_kinds()) is not None
        return Done(writes=lambda _session: called.append("writes"), follow_ups=[NewJobFactory.build()])

    job = run(cortex, lose_the_claim)
    assert (job.status, job.attempts) == (JobStatus.RUNNING, 2)
    assert called == []
    assert others(cortex) == []


def test_a_stale_holders_failure_is_not_booked(cortex: Cortex, clock: ManualClock) -> None:
    """Contract §4.9 for a handler that raises: the new holder's row keeps its state."""

    def lose_the_claim() -> Done:
        clock.advance(300_001)
        assert cortex.jobs.recover_stale_locks() == 1
        assert cortex.jobs.claim_next(kinds=cortex.list_kinds()) is not None
        raise WriteError("too late")

    job = run(cortex, lose_the_claim)
    assert (job.status, job.attempts, job.last_error) == (JobStatus.RUNNING, 2, None)
