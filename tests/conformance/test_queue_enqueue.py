"""Enqueue and the dedupe key (spec: Dedupe keys)."""

from collections.abc import Callable

import pytest
from pydantic import BaseModel

from tinycortex import (
    AppendBufferPayload,
    Cortex,
    InvalidInputError,
    JobStatus,
    LeafRef,
    NewJob,
    PayloadError,
    SealPayload,
    SourceTarget,
)
from tinycortex.domain.jobs import Job
from tinycortex.errors import TinycortexError
from tinycortex.models import JobRow
from tinycortex.testing import JobRowFactory, ManualClock, NewJobFactory, insert_rows

KEY = "extract:chunk-1"

SETTLED = ["done", "failed", "failed_transient", "cancelled"]
ACTIVE = ["ready", "delayed", "running", "expired", "deferred"]


class Note(BaseModel):
    text: str = ""


def active_rows(cortex: Cortex, key: str) -> list[Job]:
    return [job for job in cortex.jobs.list_jobs() if job.dedupe_key == key and not job.status.is_terminal]


def test_a_new_row_is_ready_and_due_at_once(cortex: Cortex, clock: ManualClock) -> None:
    """An enqueued job starts with no history: ready, due, no attempt, no lease, no failure."""
    job = cortex.get_job(str(cortex.enqueue(NewJobFactory.build(chunk_id="chunk-1"))))
    assert job == Job(
        id=job.id,
        kind="extract_chunk",
        payload_json='{"chunk_id":"chunk-1"}',
        dedupe_key=KEY,
        status=JobStatus.READY,
        attempts=0,
        max_attempts=5,
        available_at_ms=clock.now_ms(),
        locked_until_ms=None,
        last_error=None,
        created_at_ms=clock.now_ms(),
        started_at_ms=None,
        completed_at_ms=None,
        failure_reason=None,
        failure_class=None,
        claim_token=0,
        locked_by=None,
        deferred_since_ms=None,
        heals=0,
        rerun_payload_json=None,
        cancel_requested_at_ms=None,
        claimed_at_ms=None,
        trace_context=None,
    )


def test_ids_sort_by_insertion(cortex: Cortex) -> None:
    """Ids are ``job:`` and a UUIDv7, so ties in time are broken by the order of insertion."""
    ids = [str(cortex.enqueue(NewJobFactory.build())) for _ in range(50)]
    assert ids == sorted(ids)
    assert all(job_id.startswith("job:") and job_id[18] == "7" for job_id in ids)


@pytest.mark.parametrize("state", ACTIVE)
def test_an_active_twin_suppresses_a_duplicate(cortex: Cortex, state: str) -> None:
    """A ready or running row holds its key, whatever its due time and lease; the duplicate gives None."""
    insert_rows(cortex.database, JobRowFactory.build(dedupe_key=KEY, **({} if state == "ready" else {state: True})))
    assert cortex.enqueue(NewJobFactory.build(dedupe_key=KEY)) is None
    assert len(active_rows(cortex, KEY)) == 1


@pytest.mark.parametrize("state", SETTLED)
def test_a_settled_row_frees_its_key(cortex: Cortex, state: str) -> None:
    """A finished row never blocks a new one with its key."""
    insert_rows(cortex.database, JobRowFactory.build(dedupe_key=KEY, **{state: True}))
    assert cortex.enqueue(NewJobFactory.build(dedupe_key=KEY)) is not None


def test_settled_rows_with_one_key_coexist(cortex: Cortex) -> None:
    """The dedupe index is partial, so any number of settled rows may share a key."""
    states: list[dict[str, bool]] = [{"failed": True}, {"failed": True}, {"done": True}]
    insert_rows(cortex.database, *(JobRowFactory.build(dedupe_key=KEY, **state) for state in states))
    assert cortex.jobs.count_by_status()[JobStatus.FAILED] == 2


def test_a_suppressed_duplicate_changes_nothing(cortex: Cortex, clock: ManualClock) -> None:
    """The row that was there first keeps its payload, its budget and its due time."""
    first = cortex.get_job(str(cortex.enqueue(NewJobFactory.build(dedupe_key=KEY))))
    clock.advance(1)
    cortex.enqueue(NewJobFactory.build(dedupe_key=KEY, max_attempts=1, available_at_ms=0))
    assert cortex.get_job(first.id) == first


def test_jobs_without_a_key_are_never_duplicates(cortex: Cortex) -> None:
    """No key, no limit."""
    jobs = [NewJobFactory.build(dedupe_key=None) for _ in range(3)]
    assert None not in cortex.enqueue_many(jobs)


def test_keys_differing_only_in_case_are_different(cortex: Cortex) -> None:
    """Keys are compared byte for byte."""
    assert cortex.enqueue(NewJobFactory.build(dedupe_key="a")) is not None
    assert cortex.enqueue(NewJobFactory.build(dedupe_key="A")) is not None


@pytest.mark.parametrize(
    "build",
    [
        lambda: NewJob(kind=None, payload_json="{}"),  # type: ignore[arg-type]
        lambda: NewJob(kind="", payload_json="{}"),
        lambda: NewJob(kind="two words", payload_json="{}"),
        lambda: NewJob(kind="digest_daily", payload_json="{}"),
        lambda: NewJob(kind="note", payload_json={}),  # type: ignore[arg-type]
        lambda: NewJob(kind="note", payload_json="{"),
        lambda: NewJob(kind="note", payload_json='{"a": NaN}'),
        lambda: NewJob(kind="note", payload_json='"\x00"'),
        lambda: NewJob(kind="note", payload_json='"\ud800"'),
        lambda: NewJob(kind="note", payload_json="{}", max_attempts=-1),
        lambda: NewJob(kind="note", payload_json="{}", max_attempts=0),
        lambda: NewJob(kind="note", payload_json="{}", max_attempts=True),
        lambda: NewJob(kind="note", payload_json="{}", dedupe_key=""),
        lambda: NewJob(kind="note", payload_json="{}", dedupe_key="a\x00b"),
        lambda: NewJob(kind="note", payload_json="{}", available_at_ms=1.5),  # type: ignore[arg-type]
        lambda: NewJob(kind="note", payload_json="{}", available_at_ms=2**63),
    ],
)
def test_what_no_row_can_hold_is_refused_aloud(build: Callable[[], NewJob]) -> None:
    """A bad value raises one of our errors; it is never taken for a suppressed duplicate."""
    with pytest.raises(TinycortexError):
        build()


def test_a_violated_constraint_is_no_duplicate(cortex: Cortex) -> None:
    """Only an active twin may suppress; a NOT NULL that is broken behind our back raises."""
    job = NewJobFactory.build()
    object.__setattr__(job, "kind", None)
    with pytest.raises(Exception, match=r"NOT NULL|null value"):
        cortex.jobs.enqueue(job)
    assert cortex.jobs.list_jobs() == []


def test_enqueue_takes_nothing_but_jobs(cortex: Cortex) -> None:
    """A wrong argument is named in the error."""
    with pytest.raises(InvalidInputError, match="dict"):
        cortex.enqueue({"kind": "seal"})  # type: ignore[call-overload]


def test_a_payload_that_the_handler_would_refuse_is_refused_at_once(cortex: Cortex) -> None:
    """The producer learns of a malformed payload, not the worker at night."""
    with pytest.raises(PayloadError, match="chunk_id"):
        cortex.enqueue(NewJob(kind="extract_chunk", payload_json='{"chunk": 1}'))


def test_a_kind_without_a_handler_here_is_let_through(cortex: Cortex) -> None:
    """Another process may run it; this one leaves it waiting and says so."""
    assert cortex.enqueue(NewJob(kind="elsewhere", payload_json="[]")) is not None
    assert cortex.status().unhandled == {"elsewhere": 1}


@pytest.mark.parametrize(
    ("job", "attempts"),
    [
        (NewJobFactory.build(), 5),
        (NewJob(kind="reembed_backfill", payload_json='{"signature":"s"}'), 3),
        (NewJob(kind="note", payload_json="{}"), 7),
        (NewJob(kind="note", payload_json="{}", max_attempts=2), 2),
        (NewJob(kind="elsewhere", payload_json="{}"), 5),
    ],
)
def test_the_budget_is_the_jobs_or_else_the_kinds(cortex: Cortex, job: NewJob, attempts: int) -> None:
    """The default budget is 5, of re-embedding 3, of a custom kind its own; a job may name another."""
    cortex.handler("note", payload=Note, max_attempts=7)(lambda _ctx, _payload: None)
    assert cortex.get_job(str(cortex.enqueue(job))).max_attempts == attempts


def test_many_jobs_report_each_in_the_order_given(cortex: Cortex) -> None:
    """Rows are written in the order of their keys, and reported in the order of the call."""
    cortex.enqueue(NewJobFactory.build(dedupe_key="b"))
    keys = ["c", "b", "a", "c"]
    ids = cortex.enqueue_many(NewJobFactory.build(dedupe_key=key) for key in keys)
    assert [None if job_id is None else cortex.get_job(job_id).dedupe_key for job_id in ids] == ["c", None, "a", None]


def test_many_jobs_are_written_together_or_not_at_all(cortex: Cortex) -> None:
    """One job that cannot be written leaves none of its call behind."""
    with pytest.raises(PayloadError):
        cortex.enqueue_many([NewJobFactory.build(), NewJob(kind="seal", payload_json="{}")])
    assert cortex.jobs.list_jobs() == []


def test_more_jobs_than_one_statement_takes(cortex: Cortex) -> None:
    """A call may hold more rows than one INSERT does."""
    ids = cortex.enqueue_many(NewJobFactory.build() for _ in range(450))
    assert len(set(ids)) == 450
    assert cortex.jobs.count_by_status()[JobStatus.READY] == 450


def test_none_means_that_an_active_twin_exists(cortex: Cortex, clock: ManualClock) -> None:
    """Whenever enqueue gives None, a ready or running row has the key."""
    suppressed = 0
    for step in range(60):
        key = f"key-{step % 5}"
        if cortex.enqueue(NewJobFactory.build(dedupe_key=key)) is None:
            suppressed += 1
            assert len(active_rows(cortex, key)) == 1
        if step % 3 == 0 and (job := cortex.jobs.claim_next()) is not None:
            settle = cortex.jobs.mark_done if step % 2 else cortex.jobs.mark_deferred
            if settle == cortex.jobs.mark_done:
                cortex.jobs.mark_done(job)
            else:
                cortex.jobs.mark_deferred(job, clock.now_ms(), "later")
    assert suppressed > 0


@pytest.mark.parametrize(
    "job",
    [
        NewJob.append_buffer(
            AppendBufferPayload(node=LeafRef(chunk_id="c1"), target=SourceTarget(source_id="slack:#eng"))
        ),
        NewJob.seal(SealPayload(tree_id="tree-ä", level=3)),
    ],
)
def test_payload_and_key_come_back_unchanged(cortex: Cortex, job: NewJob) -> None:
    """What a constructor wrote is what a worker reads, byte for byte."""
    stored = cortex.get_job(str(cortex.enqueue(job)))
    assert (stored.payload_json, stored.dedupe_key) == (job.payload_json, job.dedupe_key)


def test_a_row_by_another_program_is_a_job_like_any_other(cortex: Cortex, clock: ManualClock) -> None:
    """Contract §1: an insert that names only contract columns makes a claimable row."""
    with cortex.transaction() as session:
        row = JobRow(id="foreign", kind="flush_stale", payload_json='{"max_age_secs":60,"extra":1}')
        row.available_at_ms = row.created_at_ms = clock.now_ms()
        session.add(row)
    assert cortex.run_once()
    assert cortex.get_job("foreign").status is JobStatus.DONE
