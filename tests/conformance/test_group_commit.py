"""What ends together is settled together, and each job gets its own result all the same."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TypeVar, cast

import pytest
from pydantic import BaseModel
from sqlalchemy import event, func, select
from sqlalchemy.orm import Session

from background import until, working
from tinycortex import Cortex, Database, Done, JobContext, JobFailure, JobStatus, NewJob
from tinycortex.group_commit import Batch, GroupCommit, Write
from tinycortex.models import JobRow
from tinycortex.testing import JobRowFactory, insert_rows

T = TypeVar("T")

TOGETHER = 8


class Note(BaseModel):
    number: int = 0


class Other(BaseModel):
    text: str


def refused_follow_up() -> Done:
    return Done(follow_ups=[NewJob(kind="other", payload_json="{}")])


def failing_writes() -> Done:
    def write(_session: Session) -> None:
        raise ValueError("no")

    return Done(writes=write)


def failure() -> Done:
    raise JobFailure.transient("busy")


def run_together(
    cortex: Cortex,
    bad: Callable[[], Done],
    *,
    each: Callable[[int], Done] = lambda _number: Done(),
    before_the_end: Callable[[list[str]], object] = lambda _ids: None,
) -> list[str]:
    """Have eight handlers end in one turn of the loop, the fourth of them as ``bad`` says; return the jobs' ids."""
    begun: list[int] = []
    all_begun: list[asyncio.Event] = []

    async def handler(_ctx: JobContext, payload: Note) -> Done:
        if not all_begun:
            all_begun.append(asyncio.Event())
        begun.append(payload.number)
        if len(begun) == TOGETHER:
            before_the_end(ids)
            all_begun[0].set()
        await all_begun[0].wait()
        return bad() if payload.number == 3 else each(payload.number)

    cortex.handler("other", payload=Other)(lambda _ctx, _payload: None)
    cortex.handler("note", payload=Note)(handler)
    new = [NewJob.of("note", Note(number=number)) for number in range(TOGETHER)]
    ids = [str(job_id) for job_id in cortex.enqueue_many(new)]
    with working(cortex):
        until(lambda: {cortex.get_job(job_id).status for job_id in ids}.isdisjoint({JobStatus.RUNNING}) and begun)
    return ids


@pytest.mark.parametrize("bad", [refused_follow_up, failing_writes, failure])
def test_one_bad_result_takes_no_neighbour_down(cortex: Cortex, bad: Callable[[], Done]) -> None:
    """Seven are done; the eighth is a failed attempt with its own reason."""
    jobs = [cortex.get_job(job_id) for job_id in run_together(cortex, bad)]
    assert [job.status for job in jobs] == [
        JobStatus.READY if number == 3 else JobStatus.DONE for number in range(TOGETHER)
    ]
    assert (jobs[3].attempts, jobs[3].last_error is None) == (1, False)


def _values(parameters: Mapping[str, object] | Sequence[object]) -> set[object]:
    """Return a statement's values, whichever way its driver takes them."""
    values = list(parameters.values() if isinstance(parameters, Mapping) else parameters)
    return {one for value in values for one in (value if isinstance(value, list) else [value])}


def test_what_ends_together_is_settled_together(cortex: Cortex) -> None:
    """Eight jobs cost no eight statements."""
    statements: list[tuple[str, set[object]]] = []
    event.listen(
        cortex.database.engine,
        "before_cursor_execute",
        lambda _c, _cursor, statement, parameters, *_r: statements.append((statement, _values(parameters))),
    )
    ids = set(run_together(cortex, Done))
    assert {cortex.get_job(job_id).status for job_id in ids} == {JobStatus.DONE}
    settled = [
        statement
        for statement, values in statements
        if "SET status = 'done'" in statement and not ids.isdisjoint(values)
    ]
    assert 1 <= len(settled) < TOGETHER


def test_a_write_that_closes_its_transaction_is_its_last(database: Database) -> None:
    """What comes after it, of another caller too, is written in the same order, and in a transaction of its own."""
    transactions: list[object] = []

    def note(session: Session | None) -> None:
        assert session is not None
        transactions.append(session.connection().get_transaction())

    def batch(*, closes: bool) -> Batch[None]:
        yield [Write(note), Write(note, closes=closes)]

    storage, begun = GroupCommit("storage", database), threading.Event()
    holding = storage.submit(begun.wait)  # so that both wait together
    written = [storage.submit_batch(batch(closes=closes)) for closes in (True, False)]
    begun.set()
    assert holding.result()
    for future in written:
        future.result()
    storage.close()
    first, second, third, fourth = transactions
    assert (first is second, second is third, third is fourth) == (True, False, True)


class StorageThread:
    """A storage thread that writes one thing after another."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._commits = GroupCommit("storage", database)
        self.close = self._commits.close
        self.written_alone = 0
        """How many were made again, in a transaction of their own."""

    def write(self, make: Callable[[Session], T]) -> T:
        """Return what the write returns, or raise what it raises."""

        def made(session: Session | None) -> T:
            self.written_alone += session is None
            with self._database.within(session) as tx:
                return make(tx)

        def batch() -> Batch[T]:
            (outcome,) = yield [Write(made)]
            if isinstance(outcome, Exception):
                raise outcome
            return cast("T", outcome)

        return self._commits.submit_batch(batch()).result()


@pytest.fixture
def storage(database: Database) -> Iterator[StorageThread]:
    """A storage thread of the test's own."""
    with closing(StorageThread(database)) as storage:
        yield storage


def driver_connection(session: Session) -> object:
    return session.connection().connection.dbapi_connection


def test_the_storage_thread_keeps_its_connection(database: Database, storage: StorageThread) -> None:
    """From one transaction to the next, unless the engine was disposed of meanwhile."""
    first, second = storage.write(driver_connection), storage.write(driver_connection)
    database.dispose()
    assert (first is second, second is storage.write(driver_connection)) == (True, False)


def test_the_storage_thread_remembers_no_row(database: Database, storage: StorageThread) -> None:
    """What one transaction has read, and its caller still holds, is read anew in the next."""
    insert_rows(database, JobRowFactory.build(id="one"))

    def read(session: Session) -> JobRow:
        return session.get_one(JobRow, "one")

    kept = storage.write(read)
    with database.transaction() as session:
        session.get_one(JobRow, "one").attempts = 7
    assert (kept.attempts, storage.write(read).attempts) == (0, 7)


def count_rows(session: Session) -> int:
    return session.scalar(select(func.count()).select_from(JobRow)) or 0


def test_the_storage_thread_writes_what_was_only_added(storage: StorageThread) -> None:
    """It flushes the session, as any commit does."""
    storage.write(lambda session: session.add(JobRowFactory.build()))
    assert storage.write(count_rows) == 1


def test_the_storage_thread_goes_on_after_an_error(storage: StorageThread) -> None:
    """What was undone is not met again, in the database or in the session."""

    def fail(session: Session) -> None:
        session.add(JobRowFactory.build())
        session.flush()
        session.add(JobRowFactory.build())
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        storage.write(fail)
    assert (storage.write(count_rows), storage.written_alone) == (0, 1)


def test_one_that_was_asked_to_stop_ends_cancelled_among_others(cortex: Cortex) -> None:
    """The others are done, and what was asked of a row while it ran is passed on by its own."""
    ids = run_together(cortex, Done, before_the_end=lambda ids: cortex.cancel(ids[3]))
    statuses = [cortex.get_job(job_id).status for job_id in ids]
    assert statuses == [JobStatus.CANCELLED if number == 3 else JobStatus.DONE for number in range(TOGETHER)]


def test_follow_ups_of_many_are_enqueued_with_them(cortex: Cortex) -> None:
    """Each job's own, in one transaction with it; the fourth has none."""
    seen: list[str] = []
    cortex.handler("next", payload=Other)(lambda _ctx, payload: seen.append(payload.text))
    run_together(cortex, Done, each=lambda number: Done(follow_ups=[NewJob.of("next", Other(text=str(number)))]))
    cortex.drain_until_idle()
    assert sorted(seen) == [str(number) for number in range(TOGETHER) if number != 3]
