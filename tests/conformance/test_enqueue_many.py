"""Many jobs in one call: one transaction, keys in order, memory that grows with the jobs alone."""

import re
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError

from tinycortex import Cortex, InvalidInputError, JobStatus, NewJob, PayloadError, SealPayload
from tinycortex.testing import JobRowFactory, NewJobFactory, insert_rows

KEY = re.compile(r"k\d{7}")

BOUND_S = 20
"""Longer than anything here takes; only a hang reaches it."""


class Note(BaseModel):
    text: str = ""


def note(key: str | None, text: str = "") -> NewJob:
    return NewJob.of("note", Note(text=text), dedupe_key=key)


def many(number: int, prefix: str = "k") -> Iterator[NewJob]:
    """Yield jobs whose keys come in no order."""
    for count in range(number):
        yield NewJob(kind="note", payload_json="{}", dedupe_key=f"{prefix}{count * 7919 % number:07d}")


@contextmanager
def keys_on_the_wire(cortex: Cortex) -> Iterator[list[str]]:
    """Collect the keys in the order in which the database is given them."""
    seen: list[str] = []

    def collect(_connection: Any, _cursor: Any, statement: str, *rest: Any) -> None:
        if "INSERT INTO mem_tree_jobs" in statement:
            parameters, *_rest = rest
            values = parameters.values() if isinstance(parameters, dict) else parameters
            seen.extend(value for value in values if isinstance(value, str) and KEY.fullmatch(value))

    event.listen(cortex.database.engine, "before_cursor_execute", collect)
    yield seen
    event.remove(cortex.database.engine, "before_cursor_execute", collect)


def test_a_hundred_thousand_jobs_in_one_call(cortex: Cortex) -> None:
    """A generator is taken as it comes; every job has its row and its id."""
    ids = cortex.enqueue_many(many(100_000))
    assert len(set(ids)) == 100_000
    assert None not in ids
    assert cortex.jobs.count_by_status()[JobStatus.READY] == 100_000


def test_memory_grows_with_the_jobs_alone(cortex: Cortex) -> None:
    """Beside the jobs, which must be sorted before the first is written, little is held for each."""
    cortex.enqueue_many(many(1_000, "warm"))

    def peak_per_job(number: int) -> float:
        tracemalloc.start()
        try:
            cortex.enqueue_many(many(number, f"{number}-"))
            return tracemalloc.get_traced_memory()[1] / number
        finally:
            tracemalloc.stop()

    few, more = peak_per_job(5_000), peak_per_job(20_000)
    assert more < few * 1.2
    assert more < 600  # bytes, of which the job itself and its id take some 300


@pytest.mark.parametrize("mode", ["ignore", "rerun", "replace"])
def test_keys_reach_the_database_in_order(cortex: Cortex, engine_name: str, mode: Any) -> None:
    """Two callers with overlapping keys meet them in the same order, so neither can hold what the other needs.

    A database of one writer at a time gets them as given: what is claimed in turn then lies side by side.
    """
    cortex.handler("note", payload=Note, on_duplicate=mode)(lambda _ctx, _payload: None)
    jobs = list(many(450))
    given = [job.dedupe_key for job in jobs]
    assert given != sorted(map(str, given))
    with keys_on_the_wire(cortex) as keys:
        cortex.enqueue_many(jobs)
    assert keys == (given if engine_name == "sqlite" else sorted(map(str, given)))


def test_ids_follow_the_order_given(cortex: Cortex) -> None:
    """Rows of one instant run in the order in which they were asked for, whatever their keys."""
    ids = cortex.enqueue_many(note(key) for key in ("c", "a", None, "b"))
    assert ids == sorted(str(job_id) for job_id in ids)


def test_each_job_is_reported_beside_rows_that_are_there(cortex: Cortex) -> None:
    """An active twin gives None, a settled one does not, wherever the job stands in the call."""
    insert_rows(
        cortex.database,
        JobRowFactory.build(kind="note", dedupe_key="k0000001"),
        JobRowFactory.build(kind="note", dedupe_key="k0000250", running=True),
        JobRowFactory.build(kind="note", dedupe_key="k0000003", done=True),
        JobRowFactory.build(kind="other", dedupe_key="k0000399", delayed=True),
    )
    jobs = list(many(400))
    ids = cortex.enqueue_many(jobs)
    suppressed = {job.dedupe_key for job, job_id in zip(jobs, ids, strict=True) if job_id is None}
    assert suppressed == {"k0000001", "k0000250", "k0000399"}
    for job, job_id in zip(jobs, ids, strict=True):
        if job_id is not None:
            assert cortex.get_job(job_id).dedupe_key == job.dedupe_key


@pytest.mark.parametrize("others", [0, 199])
def test_an_earlier_job_of_the_call_suppresses_a_later_one(cortex: Cortex, others: int) -> None:
    """The first one given is kept, even where the two fall into different statements."""
    jobs = [note(f"a{number}") for number in range(others)]
    ids = cortex.enqueue_many([note("twin", "first"), *jobs, note("twin", "second"), note("twin", "third")])
    assert [job_id is None for job_id in ids] == [False, *[False] * others, True, True]
    assert cortex.get_job(str(ids[0])).payload_json == '{"text":"first"}'


def test_a_later_job_of_the_call_may_replace_an_earlier_one(cortex: Cortex) -> None:
    """Jobs of one call meet each other as they would in calls of their own; kinds may be mixed."""
    forced = SealPayload(tree_id="t", level=0, force_now_ms=5)
    ids = cortex.enqueue_many(
        [
            NewJob.seal(SealPayload(tree_id="t", level=0)),
            NewJobFactory.build(),
            NewJob.seal(forced),
            NewJob.seal(SealPayload(tree_id="t", level=0)),
        ]
    )
    assert [job_id is None for job_id in ids] == [False, False, True, True]
    assert SealPayload.model_validate_json(cortex.get_job(str(ids[0])).payload_json) == forced


class SupplyError(Exception):
    """What a caller's own generator may raise."""


def _breaks_off() -> Iterator[NewJob]:
    yield from many(300)
    raise SupplyError


def _has_a_stranger() -> Iterator[Any]:
    yield from many(300)
    yield {"kind": "note"}
    yield from many(300, "later")


def _has_a_bad_payload() -> Iterator[NewJob]:
    yield from many(300)
    yield NewJob(kind="extract_chunk", payload_json='{"id":1}', dedupe_key="z")
    yield from many(300, "later")


def _has_what_no_row_can_hold() -> Iterator[NewJob]:
    yield from many(300)
    job = note("z")
    object.__setattr__(job, "payload_json", None)  # as a program that goes behind our back would
    yield job


@pytest.mark.parametrize(
    ("jobs", "error"),
    [
        (_breaks_off, SupplyError),
        (_has_a_stranger, InvalidInputError),
        (_has_a_bad_payload, PayloadError),
        (_has_what_no_row_can_hold, IntegrityError),
    ],
)
def test_one_job_that_fails_leaves_none(cortex: Cortex, jobs: Any, error: type[Exception]) -> None:
    """Wherever it stands, and whether it is refused here or by the database, nothing of the call is written."""
    with pytest.raises(error):
        cortex.enqueue_many(jobs())
    assert cortex.jobs.list_jobs() == []


def test_no_jobs_are_no_work(cortex: Cortex) -> None:
    """An empty call is no error."""
    assert cortex.enqueue_many([]) == []


def test_two_callers_with_the_same_keys_both_succeed(cortex: Cortex) -> None:
    """Overlapping calls in opposite orders neither fail nor lock each other out, and each key has one row."""
    jobs = list(many(500))
    barrier = threading.Barrier(2)
    results: list[list[str | None]] = []

    def work(mine: list[NewJob]) -> None:
        barrier.wait(BOUND_S)
        results.append(cortex.enqueue_many(mine))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in (jobs, jobs[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert sorted(job_id is None for ids in results for job_id in ids) == [False] * 500 + [True] * 500
    assert cortex.jobs.count_by_status()[JobStatus.READY] == 500
