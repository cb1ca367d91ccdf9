"""Events: what is told, in which order, and that only what was committed is."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import fields

import pytest
from pydantic import BaseModel
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from tinycortex import Cortex, Defer, Done, InvalidInputError, JobContext, JobFailure, JobPlan, NewJob, StorageBusyError
from tinycortex.telemetry import (
    Event,
    JobCancelled,
    JobClaimed,
    JobDeferred,
    JobDone,
    JobFailed,
    JobReleased,
    JobRetried,
    JobsEnqueued,
    JobSettled,
    LeasesRecovered,
    TickDone,
    WorkerPaused,
)
from tinycortex.testing import ManualClock
from tinycortex.worker.upkeep import Faults


class Note(BaseModel):
    """The payload of the kind of these tests."""

    text: str = "n"


@pytest.fixture
def told(cortex: Cortex) -> list[Event]:
    """What one subscriber of the test's queue has been told."""
    events: list[Event] = []
    cortex.subscribe(events.append)
    return events


def note(key: str | None = None) -> NewJob:
    return NewJob.of("note", Note(), dedupe_key=key)


def handle(cortex: Cortex, run: Callable[[], JobPlan | None], *, max_attempts: int = 5) -> None:
    """Let ``run`` be the handler of notes."""

    def handler(_context: JobContext, _payload: Note) -> JobPlan | None:
        return run()

    cortex.handler("note", payload=Note, max_attempts=max_attempts)(handler)


def fail(error: Exception) -> JobPlan | None:
    raise error


def names(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def last(events: list[Event]) -> Event:
    return events[-1]


def test_the_life_of_one_job_is_told_in_its_order(cortex: Cortex, clock: ManualClock, told: list[Event]) -> None:
    """Enqueued, claimed and done, with ids, waiting time and durations."""
    handle(cortex, lambda: None)
    job_id = cortex.enqueue(note())
    clock.advance(250)
    cortex.run_once()
    enqueued, claimed, done = told
    assert enqueued == JobsEnqueued(ids=(str(job_id),), kinds=("note",))
    assert isinstance(claimed, JobClaimed)
    assert (claimed.job.id, claimed.job.attempts, claimed.waited_ms) == (job_id, 1, 250)
    assert claimed.claim_ms > 0
    assert isinstance(done, JobDone)
    assert (done.job, done.reason) == (claimed.job, None)
    assert done.handler_ms is not None
    assert done.handler_ms >= 0


def test_an_event_is_told_after_its_commit(cortex: Cortex) -> None:
    """Whoever is told of a row finds it as told, and may write."""
    seen: list[tuple[str, str]] = []

    def look(event: Event) -> None:
        if isinstance(event, JobDone):
            seen.append((type(event).__name__, cortex.get_job(event.job.id).status))
            cortex.cancel(str(cortex.enqueue(NewJob.of("other", Note()))))

    cortex.subscribe(look)
    handle(cortex, lambda: None)
    cortex.enqueue(note())
    cortex.run_once()
    assert seen == [("JobDone", "done")]


def test_follow_ups_are_told_after_the_settlement_that_made_them(cortex: Cortex, told: list[Event]) -> None:
    """A plan's jobs commit with its row, and are told behind it."""
    handle(cortex, lambda: Done(follow_ups=[NewJob.of("other", Note())]))
    cortex.enqueue(note())
    cortex.run_once()
    assert names(told) == ["JobsEnqueued", "JobClaimed", "JobDone", "JobsEnqueued"]


def test_a_defer_tells_when_and_why(cortex: Cortex, clock: ManualClock, told: list[Event]) -> None:
    """The reason is the handler's."""
    until_ms = clock.now_ms() + 5_000
    handle(cortex, lambda: Defer(until_ms=until_ms, reason="not yet"))
    cortex.enqueue(note())
    cortex.run_once()
    event = last(told)
    assert isinstance(event, JobDeferred)
    assert (event.until_ms, event.reason) == (until_ms, "not yet")


def test_a_failure_is_told_as_retried_while_attempts_are_left(cortex: Cortex, told: list[Event]) -> None:
    """The last attempt's failure is the one that fails the job."""
    handle(cortex, lambda: fail(ValueError("broke")), max_attempts=1)
    cortex.enqueue(note())
    cortex.enqueue(NewJob.of("note", Note(), max_attempts=2))
    cortex.drain_until_idle()
    ends = [event for event in told if isinstance(event, JobSettled)]
    assert names(list(ends)) == ["JobFailed", "JobRetried"]
    assert [event.reason for event in ends] == ["ValueError: broke"] * 2
    retried = ends[1]
    assert isinstance(retried, JobRetried)
    assert retried.until_ms == cortex.get_job(retried.job.id).available_at_ms


def test_a_typed_failure_is_told_with_its_code(cortex: Cortex, told: list[Event]) -> None:
    """A code groups better than a message does."""
    handle(cortex, lambda: fail(JobFailure.unrecoverable("no_such_page", "page 7")))
    cortex.enqueue(note())
    cortex.run_once()
    event = last(told)
    assert isinstance(event, JobFailed)
    assert (event.reason, event.failure_class) == ("no_such_page", "unrecoverable")


def test_a_ready_job_that_is_cancelled_is_told_without_a_run(cortex: Cortex, told: list[Event]) -> None:
    """It settles, and no handler ran."""
    job_id = str(cortex.enqueue(note()))
    cortex.cancel(job_id)
    event = last(told)
    assert isinstance(event, JobCancelled)
    assert (event.job.id, event.handler_ms) == (job_id, None)


def test_a_running_job_that_is_cancelled_is_told_at_its_end(cortex: Cortex, told: list[Event]) -> None:
    """A request is no end yet."""
    job_id = str(cortex.enqueue(note()))

    def run() -> None:
        cortex.cancel(job_id)

    handle(cortex, run)
    cortex.run_once()
    assert names(told) == ["JobsEnqueued", "JobClaimed", "JobCancelled"]


def test_a_stale_holder_tells_nothing(cortex: Cortex, clock: ManualClock, told: list[Event]) -> None:
    """What did not take effect is no event; the recovery before it is one."""
    handle(cortex, lambda: None)
    cortex.enqueue(note())
    job = cortex.jobs.claim_next(1_000, kinds=cortex.list_kinds())
    assert job is not None
    clock.advance(2_000)
    cortex.recover_stale_locks()
    assert not cortex.jobs.mark_done(job)
    assert told[-1:] == [LeasesRecovered(count=1, failed=0, cancelled=0)]


def test_a_recovery_tells_how_many_had_no_attempt_left(cortex: Cortex, clock: ManualClock, told: list[Event]) -> None:
    """Rows that fail by a recovery are counted."""
    handle(cortex, lambda: None, max_attempts=1)
    cortex.enqueue(note())
    cortex.jobs.claim_next(1_000, kinds=cortex.list_kinds())
    clock.advance(2_000)
    cortex.recover_stale_locks()
    assert last(told) == LeasesRecovered(count=1, failed=1, cancelled=0)


def test_a_claim_that_is_given_back_is_told_as_released(cortex: Cortex, told: list[Event]) -> None:
    """It is no settlement: the job will run."""
    handle(cortex, lambda: None)
    cortex.enqueue(note())
    job = cortex.jobs.claim_next(kinds=cortex.list_kinds())
    assert job is not None
    cortex.jobs.release(job)
    assert last(told) == JobReleased(job=job)


def test_a_rerun_is_told_as_the_new_job_it_is(cortex: Cortex, told: list[Event]) -> None:
    """A request that was kept with the running row becomes a row at its end."""

    @cortex.handler("note", payload=Note, on_duplicate="rerun")
    def handler(_context: JobContext, _payload: Note) -> None:
        if len(told) == 2:
            cortex.enqueue(note("k"))

    cortex.enqueue(note("k"))
    cortex.run_once()
    assert names(told) == ["JobsEnqueued", "JobClaimed", "JobDone", "JobsEnqueued"]


def test_a_tick_tells_what_it_did(cortex: Cortex, told: list[Event]) -> None:
    """The report's figures, and how long it took."""
    report = cortex.tick()
    event = last(told)
    assert isinstance(event, TickDone)
    assert (event.recovered, event.flush_job_id, event.healed, event.purged) == (0, report.flush_job_id, 0, 0)


def test_a_pause_is_told_with_the_faults_class(cortex: Cortex, told: list[Event]) -> None:
    """A storage fault that a worker waits out."""
    faults = Faults(cortex.settings.worker, cortex.emitter)
    pause_s = faults.pause_after(StorageBusyError("busy", url="sqlite://"))
    assert told == [WorkerPaused(error="StorageBusyError", pause_ms=round(pause_s * 1000))]


def test_a_suppressed_duplicate_tells_nothing(cortex: Cortex, told: list[Event]) -> None:
    """Only new rows are told, in the order in which they were asked for."""
    ids = cortex.enqueue_many([note("b"), note("a"), note("b")])
    cortex.enqueue(note("a"))
    assert told == [JobsEnqueued(ids=(str(ids[0]), str(ids[1])), kinds=("note", "note"))]


def test_a_settlement_that_is_undone_tells_only_the_failure(cortex: Cortex, told: list[Event]) -> None:
    """Writes that raise take the end and the follow-ups with them."""
    handle(cortex, lambda: Done(follow_ups=[NewJob.of("other", Note())], writes=lambda _session: fail(ValueError("w"))))
    cortex.enqueue(note())
    cortex.run_once()
    assert names(told) == ["JobsEnqueued", "JobClaimed", "JobRetried"]


@pytest.mark.parametrize("own", [True, False])
def test_only_the_outermost_commit_tells(cortex: Cortex, database_url: str, told: list[Event], own: bool) -> None:
    """Savepoints: what is rolled back is never told, what is released waits for the commit around it."""
    engine = create_engine(database_url)
    with cortex.transaction() if own else Session(engine) as session:
        first = cortex.enqueue(note(), session=session)
        with session.begin_nested():
            second = cortex.enqueue(note(), session=session)
            with session.begin_nested() as inner:
                cortex.enqueue(note(), session=session)
                inner.rollback()
        outer = session.begin_nested()
        with session.begin_nested():
            cortex.enqueue(note(), session=session)
        outer.rollback()
        third = cortex.enqueue(note(), session=session)
        assert told == []
        if not own:
            session.commit()
    engine.dispose()
    assert told == [JobsEnqueued(ids=(str(job_id),), kinds=("note",)) for job_id in (first, second, third)]


@pytest.mark.parametrize("end", ["rollback", "close"])
def test_a_hosts_session_that_is_not_committed_tells_nothing(
    cortex: Cortex, database_url: str, told: list[Event], end: str
) -> None:
    """Neither then nor at a later commit of the same session."""
    engine = create_engine(database_url)
    with Session(engine) as session:
        cortex.enqueue(note(), session=session)
        getattr(session, end)()
        kept = cortex.enqueue(note(), session=session)
        session.commit()
        session.commit()
    engine.dispose()
    assert told == [JobsEnqueued(ids=(str(kept),), kinds=("note",))]


def test_a_session_inside_its_connections_transaction_tells_nothing(
    cortex: Cortex, database_url: str, told: list[Event]
) -> None:
    """Its commit keeps nothing yet, and the connection's own is nothing that a session knows of."""
    engine = create_engine(database_url)
    with engine.connect() as connection, connection.begin() as outer:
        with Session(connection) as session:
            cortex.enqueue(note(), session=session)
            session.commit()
        outer.rollback()
    engine.dispose()
    assert (told, cortex.jobs.list_jobs()) == ([], [])


@pytest.mark.parametrize("commit", [True, False])
def test_an_async_session_tells_at_its_commit(
    cortex: Cortex, database_url: str, told: list[Event], commit: bool
) -> None:
    """The same for a session of an event loop, savepoints included."""

    async def produce() -> None:
        engine = create_async_engine(database_url.replace("sqlite:", "sqlite+aiosqlite:"))
        async with AsyncSession(engine) as session:
            await cortex.enqueue(note(), session=session)
            savepoint = await session.begin_nested()
            await cortex.enqueue(note(), session=session)
            await savepoint.rollback()
            assert told == []
            await (session.commit() if commit else session.rollback())
        await engine.dispose()

    asyncio.run(produce())
    assert names(told) == (["JobsEnqueued"] if commit else [])


@pytest.mark.parametrize("error", [ValueError("token=hunter2"), SystemExit(3)])
def test_a_subscriber_that_raises_harms_nobody(
    cortex: Cortex, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """It is logged once and called again; producer, worker and the next subscriber notice nothing."""
    called: list[Event] = []

    def broken(event: Event) -> None:
        called.append(event)
        raise error

    cortex.subscribe(broken)
    told: list[Event] = []
    cortex.subscribe(told.append)
    handle(cortex, lambda: None)
    with caplog.at_level(logging.WARNING):
        cortex.enqueue(note())
        assert cortex.run_once()
    assert names(told) == names(called) == ["JobsEnqueued", "JobClaimed", "JobDone"]
    assert len(caplog.records) == 1
    assert "hunter2" not in caplog.text


def test_an_interrupt_reaches_whoever_is_interrupted(cortex: Cortex) -> None:
    """A Ctrl-C that arrives in a subscriber is no fault of it; what was committed stays."""

    def interrupted(_event: Event) -> None:
        raise KeyboardInterrupt

    cortex.subscribe(interrupted)
    with pytest.raises(KeyboardInterrupt):
        cortex.enqueue(note())
    assert len(cortex.jobs.list_jobs()) == 1


def test_who_unsubscribes_hears_no_more(cortex: Cortex) -> None:
    """Each subscription ends by itself, also of one callback that subscribed twice, and twice is no harm."""
    told: list[Event] = []
    first, _second = cortex.subscribe(told.append), cortex.subscribe(told.append)
    first()
    first()
    cortex.enqueue(note())
    assert len(told) == 1


def test_queues_do_not_hear_each_other(open_cortex: Callable[[], Cortex], told: list[Event]) -> None:
    """A subscription belongs to one Cortex, and tells what was done through it."""
    open_cortex().enqueue(note())
    assert told == []


@pytest.mark.parametrize("callback", [None, "print"])
def test_what_cannot_be_called_is_refused(cortex: Cortex, callback: object) -> None:
    """It is said at once, not at the first event."""
    with pytest.raises(InvalidInputError):
        cortex.subscribe(callback)  # type: ignore[arg-type]


def test_an_asynchronous_subscriber_is_refused(cortex: Cortex) -> None:
    """Nobody would await it."""

    async def hear(_event: Event) -> None: ...

    with pytest.raises(InvalidInputError, match="await"):
        cortex.subscribe(hear)


def test_an_event_is_a_value(told: list[Event], cortex: Cortex) -> None:
    """Frozen, with named fields, and without a dict of its own."""
    cortex.enqueue(note())
    (event,) = told
    with pytest.raises(AttributeError):
        event.ids = ()  # type: ignore[attr-defined]
    assert [field.name for field in fields(event)] == ["ids", "kinds"]
