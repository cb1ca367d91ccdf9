"""Claiming and ordering (spec: Claiming and ordering, Retired kinds; contract §4.3)."""

import random
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import text

from tinycortex import RETIRED_JOB_KINDS, Cortex, InvalidInputError, JobStatus, KindSpec
from tinycortex.domain.kinds import BUILTIN_KINDS
from tinycortex.telemetry import Event, JobClaimed
from tinycortex.testing import JobRowFactory, ManualClock, NewJobFactory, insert_rows

KINDS = tuple(BUILTIN_KINDS.values())


class Note(BaseModel):
    text: str = ""


def test_a_claim_sets_what_the_contract_says_and_nothing_else(cortex: Cortex, clock: ManualClock) -> None:
    """Contract §4.3: one attempt more, started, leased from now, last_error cleared, running, a new token."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", last_error="earlier", attempts=2, claim_token=7))
    before = cortex.get_job("j")
    clock.advance(5)
    claimed = cortex.jobs.claim_next(1_000, worker_id="me")
    assert claimed == replace(
        before,
        status=JobStatus.RUNNING,
        attempts=3,
        claim_token=8,
        locked_by="me",
        started_at_ms=clock.now_ms(),
        claimed_at_ms=clock.now_ms(),
        locked_until_ms=clock.now_ms() + 1_000,
        last_error=None,
    )
    assert cortex.get_job("j") == claimed


def test_the_lease_is_five_minutes(cortex: Cortex, clock: ManualClock) -> None:
    """Contract §3: without another figure a lease lasts 300,000 ms."""
    cortex.enqueue(NewJobFactory.build())
    job = cortex.jobs.claim_next()
    assert job is not None
    assert job.locked_until_ms == clock.now_ms() + 300_000


def test_a_kind_may_have_a_lease_of_its_own(cortex: Cortex, clock: ManualClock) -> None:
    """``lease_ms`` of a kind wins over the worker's."""
    insert_rows(cortex.database, JobRowFactory.build(kind="note"))
    job = cortex.jobs.claim_next(1_000, kinds=[KindSpec(kind="note", payload=Note, lease_ms=77)])
    assert job is not None
    assert job.locked_until_ms == clock.now_ms() + 77


def test_every_claim_of_a_row_has_a_token_of_its_own(cortex: Cortex, clock: ManualClock) -> None:
    """Neither a defer nor a requeue nor a frozen clock makes a token come back."""
    cortex.enqueue(NewJobFactory.build())
    tokens = []
    for _ in range(5):
        job = cortex.jobs.claim_next()
        assert job is not None
        tokens.append(job.claim_token)
        cortex.jobs.mark_deferred(job, clock.now_ms(), "again")
    assert tokens == [1, 2, 3, 4, 5]


def test_nothing_is_claimed_before_it_is_due(cortex: Cortex, clock: ManualClock) -> None:
    """A delayed row is claimed at its instant, not a millisecond earlier."""
    cortex.enqueue(NewJobFactory.build(available_at_ms=clock.now_ms() + 10))
    clock.advance(9)
    assert cortex.jobs.claim_next() is None
    clock.advance(1)
    assert cortex.jobs.claim_next() is not None


@pytest.mark.parametrize("state", ["running", "expired", "done", "failed", "failed_transient", "cancelled"])
def test_only_ready_rows_are_claimed(cortex: Cortex, state: str) -> None:
    """Whatever is not ready is left alone, an expired lease too: recovery frees it, never a claim."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", **{state: True}))
    before = cortex.get_job("j")
    assert cortex.jobs.claim_next() is None
    assert cortex.get_job("j") == before


def test_downstream_kinds_come_first(cortex: Cortex, clock: ManualClock) -> None:
    """The order drains forward: seal, flush_stale, append_buffer, then the rest by due time."""
    ages = {
        "extract_chunk": 40,
        "reembed_backfill": 60,
        "seal_document": 50,
        "append_buffer": 30,
        "flush_stale": 20,
        "seal": 10,
    }
    insert_rows(
        cortex.database,
        *(JobRowFactory.build(kind=kind, available_at_ms=clock.now_ms() - age) for kind, age in ages.items()),
    )
    claimed = [job.kind for _ in ages if (job := cortex.jobs.claim_next()) is not None]
    assert claimed == ["seal", "flush_stale", "append_buffer", "reembed_backfill", "seal_document", "extract_chunk"]


def test_equal_times_are_served_in_order_of_insertion(cortex: Cortex) -> None:
    """Ties are broken by id, which grows with every insertion."""
    ids = [cortex.enqueue(NewJobFactory.build()) for _ in range(10)]
    claimed = [job.id for _ in ids if (job := cortex.jobs.claim_next()) is not None]
    assert claimed == ids


@pytest.mark.parametrize("kind", sorted(RETIRED_JOB_KINDS))
def test_a_retired_kind_is_never_claimed(cortex: Cortex, kind: str) -> None:
    """A leftover row of a removed kind reaches no worker, which could not parse it."""
    insert_rows(cortex.database, JobRowFactory.build(id="old", kind=kind, available_at_ms=0))
    before = cortex.get_job("old")
    assert cortex.drain_until_idle() == 0
    assert cortex.get_job("old") == before


def test_a_kind_from_the_future_waits_untouched(cortex: Cortex) -> None:
    """Known jobs run, the unknown one is not touched, and runs once a worker has its handler."""
    insert_rows(cortex.database, JobRowFactory.build(id="new", kind="from_the_future", available_at_ms=0))
    before = cortex.get_job("new")
    cortex.enqueue_many(NewJobFactory.build() for _ in range(3))
    assert cortex.drain_until_idle() == 3
    assert cortex.get_job("new") == before
    cortex.handler("from_the_future", payload=Note)(lambda _ctx, _payload: None)
    assert cortex.run_once()
    assert cortex.get_job("new").status is JobStatus.DONE


def test_kinds_left_out_are_not_claimed(cortex: Cortex) -> None:
    """A claim takes only the kinds that it names."""
    insert_rows(cortex.database, JobRowFactory.build(kind="seal"), JobRowFactory.build(kind="append_buffer"))
    job = cortex.jobs.claim_next(kinds=[spec for spec in KINDS if not spec.llm_bound])
    assert job is not None
    assert job.kind == "append_buffer"


def test_a_claim_of_no_kind_takes_nothing(cortex: Cortex) -> None:
    """With every kind left out there is nothing to lease."""
    cortex.enqueue(NewJobFactory.build())
    assert cortex.jobs.claim_next(kinds=()) is None


@pytest.mark.parametrize("lease_ms", [0, -1, True, 1.5, None])
def test_a_lease_is_whole_milliseconds_above_zero(cortex: Cortex, lease_ms: int) -> None:
    """A lease that is over before it began would hand the row out twice."""
    cortex.enqueue(NewJobFactory.build())
    with pytest.raises(InvalidInputError):
        cortex.jobs.claim_next(lease_ms)
    assert cortex.jobs.list_jobs()[0].status is JobStatus.READY


def test_a_claim_in_a_rolled_back_transaction_never_happened(cortex: Cortex) -> None:
    """A claim can be part of the caller's transaction."""
    cortex.enqueue(NewJobFactory.build())
    with cortex.transaction() as session:
        assert cortex.jobs.claim_next(session=session) is not None
        session.rollback()
    assert cortex.jobs.list_jobs()[0].attempts == 0


def plain_order(cortex: Cortex, now_ms: int, specs: list[KindSpec]) -> str | None:
    """Return the id that the specification's own statement would claim; ties by id."""
    if not specs:
        return None
    ranks = " ".join(f"WHEN '{spec.kind}' THEN {spec.rank}" for spec in specs)
    wanted = ", ".join(f"'{spec.kind}'" for spec in specs)
    with cortex.database.reading() as session:
        found: str | None = session.execute(
            text(
                "SELECT id FROM mem_tree_jobs WHERE status = 'ready' AND available_at_ms <= :now "
                f"AND kind NOT IN ('topic_route', 'digest_daily') AND kind IN ({wanted}) "
                f"ORDER BY CASE kind {ranks} END, available_at_ms, id LIMIT 1"
            ),
            {"now": now_ms},
        ).scalar()
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_order_is_that_of_the_plain_statement(cortex: Cortex, clock: ManualClock, seed: int) -> None:
    """Whatever is due, left out or custom, the probes find the row that ``ORDER BY CASE kind`` would."""
    chance = random.Random(seed)  # noqa: S311 - a test needs it the same every time
    custom = [KindSpec(kind=f"custom_{rank}", payload=Note, rank=rank) for rank in (-1, 2, 4, 9)]
    specs = [*KINDS, *custom]
    words = [*(spec.kind for spec in specs), *RETIRED_JOB_KINDS, "unknown"]
    claims = 0
    for _ in range(150):
        if chance.random() < 0.6:
            due = clock.now_ms() + chance.choice([-2, -1, 0, 0, 1, 2])
            insert_rows(
                cortex.database,
                *(
                    JobRowFactory.build(id=f"job:{chance.random()}", kind=chance.choice(words), available_at_ms=due)
                    for _ in range(chance.randint(1, 3))
                ),
            )
        wanted = chance.sample(specs, chance.randint(0, len(specs)))
        expected = plain_order(cortex, clock.now_ms(), wanted)
        job = cortex.jobs.claim_next(kinds=wanted)
        assert (None if job is None else job.id) == expected
        claims += job is not None
        clock.advance(chance.choice([0, 0, 1]))
    assert claims > 50


def claim_ids(cortex: Cortex, limit: int, **options: Any) -> list[str]:
    return [job.id for job in cortex.jobs.claim_many(limit, **options)]


def test_a_claim_of_many_takes_what_one_after_another_would(cortex: Cortex, clock: ManualClock) -> None:
    """Best rank first, then due time, then insertion, whatever order the database updates them in."""
    ages = {"z": ("seal", 1), "y": ("seal", 2), "m": ("append_buffer", 9), "b": ("extract_chunk", 9)}
    insert_rows(
        cortex.database,
        *(
            JobRowFactory.build(id=job_id, kind=kind, available_at_ms=clock.now_ms() - age)
            for job_id, (kind, age) in ages.items()
        ),
        JobRowFactory.build(id="a", kind="seal_document", available_at_ms=clock.now_ms() - 9),
        JobRowFactory.build(id="later", kind="seal", available_at_ms=clock.now_ms() + 1),
    )
    assert claim_ids(cortex, 4) == ["y", "z", "m", "a"]
    assert claim_ids(cortex, 4) == ["b"]
    assert claim_ids(cortex, 4) == []


def test_each_row_of_a_claim_of_many_is_a_claim(cortex: Cortex, clock: ManualClock) -> None:
    """One attempt more, a lease of its kind's length and a token each, as claimed alone; what is stored is returned."""
    note = KindSpec(kind="note", payload=Note, lease_ms=77)
    insert_rows(
        cortex.database,
        JobRowFactory.build(id="j", last_error="earlier", attempts=2, claim_token=7),
        JobRowFactory.build(id="n", kind="note"),
    )
    before = [cortex.get_job(job_id) for job_id in "jn"]
    claimed = cortex.jobs.claim_many(5, 1_000, kinds=[*KINDS, note], worker_id="me")
    assert claimed == [
        replace(
            row,
            status=JobStatus.RUNNING,
            attempts=row.attempts + 1,
            claim_token=row.claim_token + 1,
            locked_by="me",
            started_at_ms=clock.now_ms(),
            claimed_at_ms=clock.now_ms(),
            locked_until_ms=clock.now_ms() + lease_ms,
            last_error=None,
        )
        for row, lease_ms in zip(before, (1_000, 77), strict=True)
    ]
    assert [cortex.get_job(job_id) for job_id in "jn"] == claimed
    assert all(cortex.jobs.mark_done(job) for job in claimed)


def test_a_claim_of_many_passes_over_llm_bound_rows_beyond_their_limit(cortex: Cortex) -> None:
    """The rows behind those left out come instead, as if the permits had run out between single claims."""
    insert_rows(
        cortex.database,
        *(JobRowFactory.build(id=f"{kind}:{n}", kind=kind) for kind in ("seal", "extract_chunk") for n in range(2)),
        *(JobRowFactory.build(id=f"append_buffer:{n}", kind="append_buffer") for n in range(3)),
    )
    assert claim_ids(cortex, 3, llm_limit=1) == ["seal:0", "append_buffer:0", "append_buffer:1"]
    assert claim_ids(cortex, 3, llm_limit=0) == ["append_buffer:2"]
    assert claim_ids(cortex, 3, llm_limit=2) == ["seal:1", "extract_chunk:0"]
    assert claim_ids(cortex, 3, llm_limit=None) == ["extract_chunk:1"]


def test_a_kind_named_twice_counts_once(cortex: Cortex) -> None:
    """It takes up no second place in the batch."""
    cortex.enqueue_many(NewJobFactory.build() for _ in range(3))
    assert len(cortex.jobs.claim_many(3, kinds=[*KINDS, *KINDS])) == 3


@pytest.mark.parametrize(
    "limits", [*({"limit": limit} for limit in (0, -1, True, 1.5, None)), {"llm_limit": -1}, {"llm_limit": True}]
)
def test_a_claim_of_many_is_limited(cortex: Cortex, limits: dict[str, Any]) -> None:
    """No slip in counting leases the whole queue."""
    cortex.enqueue(NewJobFactory.build())
    with pytest.raises(InvalidInputError, match=next(iter(limits))):
        cortex.jobs.claim_many(**({"limit": 1} | limits))
    assert cortex.jobs.list_jobs()[0].status is JobStatus.READY


def test_each_job_of_a_claim_of_many_is_told(cortex: Cortex) -> None:
    """After the commit there is one event for each, in their order; none for a claim that was undone."""
    events: list[Event] = []
    cortex.subscribe(events.append)
    insert_rows(cortex.database, *(JobRowFactory.build() for _ in range(3)))
    with cortex.transaction() as session:
        cortex.jobs.claim_many(3, session=session)
        session.rollback()
    assert events == []
    claimed = cortex.jobs.claim_many(3)
    assert [event.job for event in events if isinstance(event, JobClaimed)] == claimed
