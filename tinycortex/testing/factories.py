# mypy: disable-error-code="no-untyped-call"
# (the declarations of factory-boy carry no types)
# ruff: noqa: D106 - Meta and Params are factory-boy's own words
"""Factories of rows whose columns agree with each other, whatever state they are in.

They need factory-boy, which ``pip install "tinycortex[test]"`` brings. A factory only builds;
:func:`insert_rows` puts what it built into a database.
"""

import factory

from tinycortex.db import Database
from tinycortex.domain.jobs import NewJob
from tinycortex.models import Base, ChunkRow, JobRow

NOW_MS = 1_700_000_000_000
"""The instant (ms, UTC) that factories build around; a :class:`ManualClock` starts there too."""

_LEASE_MS = 300_000
_RETRY_MS = 60_000
_REVISIT_MS = 750


class JobRowFactory(factory.Factory[JobRow]):
    """Builds a due ready row, or one in the state that a trait names.

    Traits: ``delayed``, ``running``, ``expired`` (running, its lease over), ``done``, ``failed``
    (unrecoverable), ``failed_transient`` (budget used up), ``deferred``, ``cancelled``. The parameter
    ``now_ms`` moves all of its times together.
    """

    class Meta:
        model = JobRow

    class Params:
        now_ms = NOW_MS
        delayed = factory.Trait(available_at_ms=factory.LazyAttribute(lambda row: row.now_ms + _RETRY_MS))
        running = factory.Trait(
            status="running",
            attempts=1,
            claim_token=1,
            locked_by="elsewhere:1:0",
            started_at_ms=factory.LazyAttribute(lambda row: row.now_ms),
            claimed_at_ms=factory.SelfAttribute("started_at_ms"),
            locked_until_ms=factory.LazyAttribute(lambda row: row.now_ms + _LEASE_MS),
        )
        expired = factory.Trait(
            running=True,
            started_at_ms=factory.LazyAttribute(lambda row: row.now_ms - _LEASE_MS - 1),
            locked_until_ms=factory.LazyAttribute(lambda row: row.now_ms - 1),
        )
        done = factory.Trait(
            status="done",
            attempts=1,
            claim_token=1,
            started_at_ms=factory.LazyAttribute(lambda row: row.now_ms),
            completed_at_ms=factory.LazyAttribute(lambda row: row.now_ms),
        )
        failed = factory.Trait(
            status="failed",
            attempts=1,
            claim_token=1,
            started_at_ms=factory.LazyAttribute(lambda row: row.now_ms),
            completed_at_ms=factory.LazyAttribute(lambda row: row.now_ms),
            failure_reason="rejected",
            failure_class="unrecoverable",
            last_error="JobFailure: rejected",
        )
        failed_transient = factory.Trait(
            failed=True,
            attempts=factory.SelfAttribute("max_attempts"),
            claim_token=factory.SelfAttribute("max_attempts"),
            failure_reason="timeout",
            failure_class="transient",
            last_error="JobFailure: timeout",
        )
        deferred = factory.Trait(
            claim_token=1,
            available_at_ms=factory.LazyAttribute(lambda row: row.now_ms + _REVISIT_MS),
            deferred_since_ms=factory.LazyAttribute(lambda row: row.now_ms),
            last_error="rate limited",
        )
        cancelled = factory.Trait(
            status="cancelled",
            completed_at_ms=factory.LazyAttribute(lambda row: row.now_ms),
            last_error="cancelled on request",
        )

    id = factory.Sequence(lambda number: f"job:{number:032x}")
    kind = "extract_chunk"
    payload_json = factory.Sequence(lambda number: f'{{"chunk_id":"chunk-{number}"}}')
    dedupe_key = None
    status = "ready"
    attempts = 0
    max_attempts = 5
    available_at_ms = factory.LazyAttribute(lambda row: row.now_ms)
    locked_until_ms = None
    last_error = None
    created_at_ms = factory.LazyAttribute(lambda row: row.now_ms)
    started_at_ms = None
    completed_at_ms = None
    failure_reason = None
    failure_class = None
    claim_token = 0
    locked_by = None
    deferred_since_ms = None
    heals = 0
    rerun_payload_json = None
    cancel_requested_at_ms = None
    claimed_at_ms = None
    trace_context = None
    llm_bound = None


class ChunkRowFactory(factory.Factory[ChunkRow]):
    """Builds a chunk that waits for its extraction, or one as far as a trait says.

    Traits: ``admitted``, ``buffered``, ``sealed``, ``dropped``. Each chunk is the next of its source.
    """

    class Meta:
        model = ChunkRow

    class Params:
        now_ms = NOW_MS
        admitted = factory.Trait(lifecycle_status="admitted")
        buffered = factory.Trait(lifecycle_status="buffered")
        sealed = factory.Trait(lifecycle_status="sealed", parent_summary_id="summary-1")
        dropped = factory.Trait(lifecycle_status="dropped")

    id = factory.Sequence(lambda number: f"chunk-{number}")
    source_kind = "chat"
    source_id = "slack:#eng"
    path_scope = None
    source_ref = None
    owner = "owner@example.com"
    timestamp_ms = factory.LazyAttribute(lambda row: row.now_ms)
    time_range_start_ms = factory.LazyAttribute(lambda row: row.timestamp_ms)
    time_range_end_ms = factory.LazyAttribute(lambda row: row.timestamp_ms)
    tags_json = "[]"
    content = factory.Sequence(lambda number: f"Chunk {number}: the deploy went out on Tuesday.")
    token_count = factory.LazyAttribute(lambda row: len(row.content.split()))
    seq_in_source = factory.Sequence(int)
    created_at_ms = factory.LazyAttribute(lambda row: row.now_ms)
    lifecycle_status = "pending_extraction"
    parent_summary_id = None


class NewJobFactory(factory.Factory[NewJob]):
    """Builds requests to score one chunk each, every one with a key of its own."""

    class Meta:
        model = NewJob

    class Params:
        chunk_id = factory.Sequence(lambda number: f"chunk-{number}")

    kind = "extract_chunk"
    payload_json = factory.LazyAttribute(lambda job: f'{{"chunk_id":"{job.chunk_id}"}}')
    dedupe_key = factory.LazyAttribute(lambda job: f"extract:{job.chunk_id}")
    max_attempts = None
    available_at_ms = None


def insert_rows(database: Database, *rows: Base) -> None:
    """Insert rows, as a factory built them, in one transaction."""
    with database.transaction() as session:
        session.add_all(rows)
