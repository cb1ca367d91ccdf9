"""Writers that meet the same keys in another order: whoever is undone tries again, and each key has one row."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import event

from background import BOUND_S, until, working
from tinycortex import Cortex, Done, JobContext, JobStatus, NewJob, StorageBusyError

TOGETHER = 8


class Note(BaseModel):
    text: str = ""


def note(key: str, kind: str = "note") -> NewJob:
    return NewJob.of(kind, Note(), dedupe_key=key)


def in_two_threads(*work: Callable[[], object]) -> list[BaseException | None]:
    """Do both at a time; return what each raised."""
    raised: list[BaseException | None] = [None] * len(work)

    def do(number: int) -> None:
        try:
            work[number]()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            raised[number] = error

    threads = [threading.Thread(target=do, args=(number,)) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    return raised


def test_of_two_transactions_that_lock_each_other_out_one_goes_on(cortex: Cortex) -> None:
    """The other one is told so, with an error that says that trying again is safe; then it is."""
    barrier = threading.Barrier(2)

    def enqueue(keys: list[str], *, at: threading.Barrier | None) -> None:
        with cortex.transaction() as session:
            for key in keys:
                cortex.enqueue(note(key), session=session)
                if at is not None and key == keys[0]:
                    at.wait(BOUND_S)

    orders = [["k1", "k2"], ["k2", "k1"]]
    raised = in_two_threads(*(lambda keys=keys: enqueue(keys, at=barrier) for keys in orders))
    (undone,) = [number for number, error in enumerate(raised) if error is not None]
    assert isinstance(raised[undone], StorageBusyError)
    enqueue(orders[undone], at=None)
    assert sorted(str(job.dedupe_key) for job in cortex.jobs.list_jobs()) == ["k1", "k2"]


@pytest.mark.parametrize("mode", ["ignore", "rerun", "replace"])
def test_bulk_enqueues_meet_mixed_kinds_in_one_order(cortex: Cortex, open_cortex: Any, mode: Any) -> None:
    """A producer that knows nothing of a kind, and one that has it replaced, do not lock each other out."""
    other = open_cortex()
    other.handler("later", payload=Note, on_duplicate=mode)(lambda _ctx, _payload: None)
    first, second = note("k1", "later"), note("k2")
    faults: list[object] = []
    for queue in (cortex, other):
        event.listen(queue.database.engine, "handle_error", faults.append)
    barrier = threading.Barrier(2)
    jobs = [first, second] * 20
    raised = in_two_threads(
        *(lambda queue=queue: (barrier.wait(BOUND_S), queue.enqueue_many(jobs)) for queue in (cortex, other))
    )
    assert (raised, faults) == ([None, None], [])
    assert sorted(str(job.dedupe_key) for job in cortex.jobs.list_jobs()) == ["k1", "k2"]


def test_a_bulk_enqueue_that_is_undone_is_made_again(cortex: Cortex, open_cortex: Any) -> None:
    """Somebody's own transaction has taken the keys in another order; the caller does not notice."""
    holder = open_cortex()
    statements: list[str] = []
    holding, waiting = threading.Event(), threading.Event()

    def look(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if "INSERT INTO mem_tree_jobs" in statement:
            statements.append(statement)
            if len(statements) == 2:  # the first key is written, the second one is held
                waiting.set()

    def bulk() -> None:
        assert holding.wait(BOUND_S)
        cortex.enqueue_many([note("k1", "plain"), note("k2", "later")])

    def hold() -> None:
        with holder.transaction() as session:
            session.connection().exec_driver_sql("SET LOCAL deadlock_timeout = '60s'")  # so that the bulk is undone
            holder.enqueue(note("k2", "later"), session=session)
            holding.set()
            assert waiting.wait(BOUND_S)
            holder.enqueue(note("k1", "plain"), session=session)

    cortex.handler("later", payload=Note, on_duplicate="rerun")(lambda _ctx, _payload: None)
    event.listen(cortex.database.engine, "before_cursor_execute", look)
    assert in_two_threads(bulk, hold) == [None, None]
    assert len(statements) > 2
    assert sorted(str(job.dedupe_key) for job in cortex.jobs.list_jobs()) == ["k1", "k2"]


def test_a_result_that_waits_in_vain_is_written_later(hurried: Cortex, open_hurried: Any, database_url: str) -> None:
    """Eight end together while somebody holds the row of one for too long: each is done, once."""
    others = open_hurried(database_url)
    ran: list[str] = []
    all_run, may_end = threading.Event(), threading.Event()

    def run(_ctx: JobContext, payload: Note) -> Done:
        ran.append(payload.text)
        if len(ran) == TOGETHER:
            all_run.set()
        assert may_end.wait(BOUND_S)
        return Done()

    keys = [f"k{number}" for number in range(TOGETHER)]
    for queue in (hurried, others):
        queue.handler("note", payload=Note, on_duplicate="rerun")(run)
    hurried.enqueue_many(NewJob.of("note", Note(text=key), dedupe_key=key) for key in keys)
    met: list[object] = []
    event.listen(hurried.database.engine, "handle_error", met.append)
    with working(hurried):
        assert all_run.wait(BOUND_S)
        with others.transaction() as session:
            others.enqueue(NewJob.of("note", Note(text="again"), dedupe_key=keys[-1]), session=session)
            may_end.set()
            until(lambda: met)
        until(lambda: hurried.jobs.count_by_kind_and_status().get(("note", "done")) == TOGETHER + 1)
    assert sorted(ran) == sorted([*keys, "again"])
    assert {(job.status, job.attempts) for job in hurried.jobs.list_jobs()} == {(JobStatus.DONE, 1)}


@pytest.mark.parametrize("blocked", [1, 3])
def test_a_result_that_waits_for_somebody_holds_up_no_neighbour(hurried: Cortex, cortex: Cortex, blocked: int) -> None:
    """Eight end together; the follow-ups of some meet a key that an open transaction holds, and the others are done."""
    begun: list[str] = []
    all_begun: list[asyncio.Event] = []
    numbers = [str(number) for number in range(TOGETHER)]

    async def run(_ctx: JobContext, payload: Note) -> Done:
        begun.append(payload.text)
        all_begun.append(asyncio.Event())
        if len(begun) == TOGETHER:
            all_begun[0].set()
        await all_begun[0].wait()
        return Done(follow_ups=[note("held" if payload.text in numbers[:blocked] else payload.text, "then")])

    def count_done() -> int:
        return cortex.jobs.count_by_kind_and_status().get(("note", "done"), 0)

    hurried.handler("note", payload=Note)(run)
    hurried.enqueue_many(NewJob.of("note", Note(text=number)) for number in numbers)
    with working(hurried):
        with cortex.transaction() as session:
            assert cortex.enqueue(note("held", "then"), session=session) is not None
            until(lambda: count_done() == TOGETHER - blocked)
        until(lambda: count_done() == TOGETHER)
    assert sorted(begun) == numbers
    assert {job.attempts for job in cortex.jobs.list_jobs(kind="note")} == {1}
    assert {job.dedupe_key for job in cortex.jobs.list_jobs(kind="then")} == {"held", *numbers[blocked:]}
