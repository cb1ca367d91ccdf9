"""Seals that meet their twin: a forced one is never lost behind an unforced one."""

from collections.abc import Callable

import pytest

from tinycortex import Cortex, Job, NewJob, SealPayload
from tinycortex.testing import JobRowFactory, ManualClock, insert_rows

UNFORCED = SealPayload(tree_id="t", level=0)
FORCED = SealPayload(tree_id="t", level=0, force_now_ms=1)
FORCED_LATER = SealPayload(tree_id="t", level=0, force_now_ms=2)


def ask(cortex: Cortex, payload: SealPayload) -> str | None:
    return cortex.enqueue(NewJob.seal(payload))


def claim(cortex: Cortex) -> Job:
    job = cortex.jobs.claim_next(worker_id="me")
    assert job is not None
    return job


def payload_of(text: str | None) -> SealPayload | None:
    return None if text is None else SealPayload.model_validate_json(text)


@pytest.mark.parametrize(
    ("waiting", "asked", "stays"),
    [
        (UNFORCED, UNFORCED, UNFORCED),
        (UNFORCED, FORCED, FORCED),
        (FORCED, UNFORCED, FORCED),
        (FORCED, FORCED_LATER, FORCED_LATER),
    ],
)
def test_a_waiting_seal_is_replaced_by_a_forced_one_only(
    cortex: Cortex, waiting: SealPayload, asked: SealPayload, stays: SealPayload
) -> None:
    """An unforced seal would find its gate unmet, so it must not take a forced one's place."""
    job_id = ask(cortex, waiting)
    assert ask(cortex, asked) is None
    (row,) = cortex.jobs.list_jobs()
    assert (row.id, payload_of(row.payload_json), row.rerun_payload_json) == (job_id, stays, None)


@pytest.mark.parametrize(
    ("kept", "asked", "stays"),
    [
        (UNFORCED, UNFORCED, UNFORCED),
        (UNFORCED, FORCED, FORCED),
        (FORCED, UNFORCED, FORCED),
        (FORCED, FORCED_LATER, FORCED_LATER),
    ],
)
def test_a_kept_seal_is_replaced_by_a_forced_one_only(
    cortex: Cortex, kept: SealPayload, asked: SealPayload, stays: SealPayload
) -> None:
    """The same holds for the request that a running seal keeps; its own payload is not touched."""
    ask(cortex, UNFORCED)
    job = claim(cortex)
    assert (ask(cortex, kept), ask(cortex, asked)) == (None, None)
    row = cortex.get_job(job.id)
    assert (payload_of(row.payload_json), payload_of(row.rerun_payload_json)) == (UNFORCED, stays)


def _expire(cortex: Cortex, clock: ManualClock, job: Job) -> object:
    assert job.locked_until_ms is not None
    clock.set(job.locked_until_ms + 1)
    return cortex.recover_stale_locks()


RETURNS: dict[str, Callable[[Cortex, ManualClock, Job], object]] = {
    "retry": lambda cortex, _clock, job: cortex.jobs.mark_failed(job, "no"),
    "defer": lambda cortex, clock, job: cortex.jobs.mark_deferred(job, clock.now_ms(), "later"),
    "release": lambda cortex, _clock, job: cortex.jobs.release(job),
    "shutdown": lambda cortex, _clock, _job: cortex.jobs.release_running_locks("me"),
    "recovery": _expire,
}


@pytest.mark.parametrize("way", RETURNS)
@pytest.mark.parametrize(
    "seals",
    [(FORCED, UNFORCED, FORCED), (UNFORCED, FORCED, FORCED), (FORCED, FORCED_LATER, FORCED_LATER)],
)
def test_a_seal_that_runs_again_stays_forced(
    cortex: Cortex, clock: ManualClock, way: str, seals: tuple[SealPayload, SealPayload, SealPayload]
) -> None:
    """A forced seal whose first try failed is not weakened by an unforced one that was asked for meanwhile."""
    running, kept, runs_next = seals
    ask(cortex, running)
    job = claim(cortex)
    assert ask(cortex, kept) is None
    assert RETURNS[way](cortex, clock, job)
    (row,) = cortex.jobs.list_jobs()
    assert (payload_of(row.payload_json), row.rerun_payload_json) == (runs_next, None)


def test_a_forced_seal_asked_for_during_a_run_follows_it(cortex: Cortex) -> None:
    """The run that is under way may have looked already, so the forced one gets a run of its own."""
    ask(cortex, UNFORCED)
    job = claim(cortex)
    ask(cortex, FORCED)
    assert cortex.jobs.mark_done(job)
    assert payload_of(claim(cortex).payload_json) == FORCED


def test_a_seal_that_another_program_wrote_badly_gives_way(cortex: Cortex) -> None:
    """A payload that cannot be read does not stop its row from being given back; the readable one runs."""
    insert_rows(
        cortex.database,
        JobRowFactory.build(id="bad", kind="seal", payload_json='{"tree":1}', dedupe_key=UNFORCED.dedupe_key),
    )
    job = claim(cortex)
    ask(cortex, UNFORCED)
    assert cortex.jobs.release(job)
    assert payload_of(cortex.get_job("bad").payload_json) == UNFORCED
