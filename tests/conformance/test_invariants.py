"""Whatever happens in whatever order, the rows keep their invariants (design §1, §5)."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinycortex import Cortex, Job, JobFailure, JobStatus, NewJob, SealPayload
from tinycortex.domain.kinds import BUILTIN_KINDS
from tinycortex.testing import ManualClock, NewJobFactory

KEYS = ["K1", "K2", None]
KINDS = tuple(BUILTIN_KINDS.values())

Step = tuple[str, int]

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "enqueue",
                "enqueue",
                "enqueue later",
                "enqueue seal",
                "claim",
                "claim",
                "claim",
                "done",
                "fail",
                "fail for good",
                "defer",
                "release",
                "renew",
                "recover",
                "requeue all",
                "requeue transient",
                "heal",
                "cancel",
                "clock",
                "clock back",
            ]
        ),
        st.integers(min_value=0, max_value=5),
    ),
    min_size=15,
    max_size=50,
)


class Queue:
    """Drives one queue, step by step, and knows every claim that was ever made."""

    def __init__(self, cortex: Cortex, clock: ManualClock) -> None:
        self.cortex, self.jobs, self.clock = cortex, cortex.jobs, clock
        self.claims: list[Job] = []
        self.tokens: set[tuple[str, int]] = set()

    def step(self, word: str, number: int) -> None:
        steps: dict[str, Callable[[int], object]] = {
            "enqueue": lambda n: self.enqueue(n, 0),
            "enqueue later": lambda n: self.enqueue(n, 60_000),
            "enqueue seal": lambda n: self.jobs.enqueue(NewJob.seal(SealPayload(tree_id="t", level=n % 2))),
            "claim": lambda _n: self.claim(),
            "done": lambda n: self.settle(n, self.jobs.mark_done),
            "fail": lambda n: self.settle(n, lambda job: self.jobs.mark_failed(job, "broke")),
            "fail for good": lambda n: self.settle(
                n, lambda job: self.jobs.mark_failed_typed(job, "broke", JobFailure.unrecoverable("bad"))
            ),
            "defer": lambda n: self.settle(
                n, lambda job: self.jobs.mark_deferred(job, self.clock.now_ms() + n * 1_000, "later")
            ),
            "release": lambda n: self.settle(n, self.jobs.release),
            "renew": lambda n: self.settle(n, self.jobs.renew),
            "recover": lambda _n: self.cortex.recover_stale_locks(),
            "requeue all": lambda _n: self.cortex.requeue_failed(),
            "requeue transient": lambda _n: self.cortex.requeue_transient_failed(),
            "heal": lambda _n: self.cortex.self_heal(),
            "cancel": self.cancel,
            "clock": lambda n: self.clock.advance(n * 70_000),
            "clock back": lambda n: self.clock.advance(-n * 1_000),
        }
        steps[word](number)

    def enqueue(self, number: int, delay_ms: int) -> None:
        key = KEYS[number % len(KEYS)]
        job = NewJobFactory.build(
            dedupe_key=key, max_attempts=1 + number % 2, available_at_ms=self.clock.now_ms() + delay_ms
        )
        if self.jobs.enqueue(job) is None:
            assert any(row.dedupe_key == key and not row.status.is_terminal for row in self.rows())

    def claim(self) -> None:
        before = {row.id: row for row in self.rows()}
        job = self.jobs.claim_next(kinds=KINDS)
        if job is None:
            return
        assert before[job.id].status is JobStatus.READY
        assert before[job.id].available_at_ms <= self.clock.now_ms()
        assert (job.id, job.claim_token) not in self.tokens
        self.tokens.add((job.id, job.claim_token))
        self.claims.append(job)

    def settle(self, number: int, how: Callable[[Job], bool]) -> None:
        """Settle one of the claims ever made: only the one that the row is under now may take effect."""
        if not self.claims:
            return
        claim = self.claims[-1 - number % len(self.claims)]
        before = self.jobs.find_job(claim.id)
        held = before is not None and (before.status, before.claim_token) == (JobStatus.RUNNING, claim.claim_token)
        took_effect = how(claim)
        assert not took_effect or held
        if not held:
            assert self.jobs.find_job(claim.id) == before

    def cancel(self, number: int) -> None:
        alive = [row for row in self.rows() if not row.status.is_terminal]
        if alive:
            self.jobs.cancel(alive[number % len(alive)].id)

    def rows(self) -> list[Job]:
        return self.jobs.list_jobs(limit=1_000)

    def check(self) -> None:
        rows = self.rows()
        active = Counter(row.dedupe_key for row in rows if row.dedupe_key and not row.status.is_terminal)
        assert all(count == 1 for count in active.values())
        for row in rows:
            assert (row.completed_at_ms is not None) == row.status.is_terminal
            assert (row.locked_until_ms is not None) == (row.status is JobStatus.RUNNING)
            assert row.attempts >= 0
            if row.status is JobStatus.READY:
                assert row.attempts < row.max_attempts
                assert row.rerun_payload_json is None
            if row.status is JobStatus.RUNNING:
                assert 1 <= row.attempts <= row.max_attempts
                assert row.started_at_ms is not None
            else:
                assert row.locked_by is None
                assert row.cancel_requested_at_ms is None
            if row.status is not JobStatus.FAILED and row.failure_reason is not None:
                assert (row.status, row.failure_reason) == (JobStatus.CANCELLED, "superseded")


@pytest.fixture
def queue(cortex: Cortex, clock: ManualClock) -> Queue:
    return Queue(cortex, clock)


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS)
def test_rows_keep_their_invariants(queue: Queue, steps: list[Step]) -> None:
    """One active row per key, budgets kept, terminal rows complete, claims only of what is due, tokens unique."""
    with queue.cortex.transaction() as session:
        session.connection().exec_driver_sql("DELETE FROM mem_tree_jobs")
    queue.claims.clear()
    queue.tokens.clear()
    for word, number in steps:
        queue.step(word, number)
        queue.check()
