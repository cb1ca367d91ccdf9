"""Several repositories on one database do, step for step, what the plain rules of the model say.

Two thousand examples by default; ``--simulations 50000`` runs as many as wanted, ``--simulation-seed`` others. A server
is given a quarter of them: each step there is a dozen journeys to it.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pydantic import BaseModel

from queue_model import QueueModel
from tinycortex import Database, Job, JobFailure, JobRepository, JobStatus, NewJob
from tinycortex.config import DatabaseSettings
from tinycortex.domain.jobs import TERMINAL_STATUSES
from tinycortex.domain.kinds import BUILTIN_KINDS, KindSpec
from tinycortex.errors import InvalidInputError
from tinycortex.testing import ManualClock

SHARES = {"sqlite": 1, "postgresql": 4}
"""Of how many examples each engine is given one."""

PARTS = 4
"""Runs that can go side by side, each with its own seed and its share of the examples."""

LEASE_MS = 300_000
STALE_FROM = 7
START_MS = 1_700_000_000_000


class Anything(BaseModel):
    """A payload with room for whatever the test wants to tell apart."""

    number: int = 0
    force_now_ms: int | None = None


def _like(kind: str, **changes: Any) -> KindSpec:
    """Return a built-in kind's rules on the test's payload."""
    fields = {name: getattr(BUILTIN_KINDS[kind], name) for name in KindSpec.__dataclass_fields__}
    return KindSpec(**(fields | {"payload": Anything} | changes))


SPECS = {
    spec.kind: spec
    for spec in (
        _like("seal", max_attempts=2, outranks=lambda payload: payload.force_now_ms is not None),
        _like("flush_stale", max_attempts=1),
        _like("reembed_backfill"),
        _like("extract_chunk", max_attempts=3),
        KindSpec(kind="newest_wins", payload=Anything, rank=0, on_duplicate="replace", lease_ms=1_000),
    )
}
KINDS = tuple(SPECS.values())

repositories = st.integers(0, 2)
claims = st.integers(0, 9)
delays_ms = st.sampled_from([0, 0, 0, 1, 1_000, 60_000])
times_ms = st.sampled_from([0, 1, 999, 1_000, 1_001, 60_000, 299_999, 300_001, 3_600_000, 11_000_000, 90_000_000])
statuses = st.sets(st.sampled_from(TERMINAL_STATUSES), min_size=1)
failures = st.sampled_from([None, JobFailure.transient("limited"), JobFailure.unrecoverable("hopeless")])


class UndoneError(Exception):
    """Rolls a transaction back."""


class QueueMachine(RuleBasedStateMachine):
    """Does everything to rows and model at once.

    Claims are kept for ever, so that most settlements are those of stale holders.
    """

    def __init__(self, databases: list[Database]) -> None:
        super().__init__()
        self.clock = ManualClock(START_MS)
        self.databases = databases
        self.repositories = [
            JobRepository(database, self.clock, find_spec=SPECS.get, retry_jitter=0) for database in databases
        ]
        self.model = QueueModel(SPECS, START_MS)
        self.claims: list[Job] = []
        self.made = 0

    def jobs(self, number: int) -> JobRepository:
        self.model.now_ms = self.clock.now_ms()
        return self.repositories[number]

    def new_job(self, kind: str, key: int, delay_ms: int, *, forced: bool) -> NewJob:
        self.made += 1
        payload = Anything(number=self.made, force_now_ms=self.made if forced else None)
        return NewJob(
            kind=kind,
            payload_json=payload.model_dump_json(),
            dedupe_key=[None, f"{kind}:1", f"{kind}:2", "shared"][key],
            available_at_ms=self.clock.now_ms() + delay_ms if delay_ms else None,
        )

    def any_is(self, *statuses: JobStatus) -> bool:
        return any(row.status in statuses for row in self.model.rows.values())

    wanted = st.tuples(st.sampled_from(sorted(SPECS)), st.integers(0, 3), delays_ms, st.booleans())

    @initialize(wanted=st.lists(wanted, min_size=3, max_size=6), claimed=st.integers(0, 3))
    def begin(self, wanted: list[tuple[str, int, int, bool]], claimed: int) -> None:
        with self.databases[0].transaction() as session:
            session.connection().exec_driver_sql("DELETE FROM mem_tree_jobs")
        for job in wanted:
            self.enqueue(0, job)
        for number in range(claimed):
            self.claim_of(number % 3, KINDS, LEASE_MS)

    @rule(number=repositories, wanted=wanted)
    def enqueue(self, number: int, wanted: tuple[str, int, int, bool]) -> None:
        kind, key, delay_ms, forced = wanted
        job = self.new_job(kind, key, delay_ms, forced=forced)
        job_id = self.jobs(number).enqueue(job)
        assert self.model.enqueue(job, job_id or "suppressed") == (job_id is not None)

    @rule(number=repositories, wanted=st.lists(wanted, max_size=5))
    def enqueue_many(self, number: int, wanted: list[tuple[str, int, int, bool]]) -> None:
        jobs = [self.new_job(kind, key, delay_ms, forced=forced) for kind, key, delay_ms, forced in wanted]
        ids = self.jobs(number).enqueue_many(jobs)
        # In the order of the keys; kinds that only ignore their duplicates come first.
        plain_first = sorted(
            zip(jobs, ids, strict=True),
            key=lambda pair: (
                pair[0].dedupe_key is not None and SPECS[pair[0].kind].on_duplicate != "ignore",
                pair[0].dedupe_key or "",
            ),
        )
        for job, job_id in plain_first:
            assert self.model.enqueue(job, job_id or "suppressed") == (job_id is not None)

    @precondition(lambda self: self.any_is(JobStatus.READY))
    @rule(number=repositories, kinds=st.sets(st.sampled_from(sorted(SPECS)), min_size=1), lease_ms=times_ms)
    def claim(self, number: int, kinds: set[str], lease_ms: int) -> None:
        self.claim_of(number, [SPECS[kind] for kind in sorted(kinds)], lease_ms or LEASE_MS)

    @precondition(lambda self: self.any_is(JobStatus.READY))
    @rule(number=repositories, later_ms=delays_ms)
    def claim_anything(self, number: int, later_ms: int) -> None:
        self.clock.advance(later_ms)
        self.claim_of(number, KINDS, LEASE_MS)

    def claim_of(self, number: int, kinds: Any, lease_ms: int) -> None:
        job = self.jobs(number).claim_next(lease_ms, kinds=kinds, worker_id=f"worker-{number}")
        assert job == self.model.claim(kinds, lease_ms, f"worker-{number}")
        if job is not None:
            self.claims.append(job)

    def claimed(self, back: int) -> Job:
        """Return a claim that holds, in most cases and where there is one; else any that was ever made."""
        held = [job for job in self.claims if self.model.watch([job])]
        candidates = held if held and back < STALE_FROM else self.claims
        return candidates[-1 - back % len(candidates)]

    @precondition(lambda self: self.any_is(JobStatus.RUNNING))
    @rule(number=repositories, back=claims)
    def done(self, number: int, back: int) -> None:
        job = self.claimed(back)
        assert self.jobs(number).mark_done(job) == self.model.done(job)

    @precondition(lambda self: self.any_is(JobStatus.RUNNING))
    @rule(number=repositories, back=claims, failure=failures)
    def fail(self, number: int, back: int, failure: JobFailure | None) -> None:
        job = self.claimed(back)
        assert self.jobs(number).mark_failed_typed(job, "broke", failure) == self.model.fail(job, "broke", failure)

    @precondition(lambda self: self.any_is(JobStatus.RUNNING))
    @rule(number=repositories, back=claims, delay_ms=times_ms, progress=st.booleans())
    def defer(self, number: int, back: int, delay_ms: int, progress: bool) -> None:
        job, until_ms = self.claimed(back), self.clock.now_ms() + delay_ms
        held = self.jobs(number).mark_deferred(job, until_ms, "later", progress=progress)
        assert held == self.model.defer(job, until_ms, "later", progress=progress)

    @precondition(lambda self: self.any_is(JobStatus.RUNNING))
    @rule(number=repositories, back=claims)
    def release(self, number: int, back: int) -> None:
        job = self.claimed(back)
        assert self.jobs(number).release(job) == self.model.release(job)

    @precondition(lambda self: self.any_is(JobStatus.RUNNING))
    @rule(number=repositories, back=claims, lease_ms=times_ms)
    def renew(self, number: int, back: int, lease_ms: int) -> None:
        job, lease_ms = self.claimed(back), lease_ms or LEASE_MS
        assert self.jobs(number).renew(job, lease_ms) == self.model.renew(job, lease_ms)

    @precondition(lambda self: self.any_is(JobStatus.RUNNING))
    @rule(number=repositories, later_ms=times_ms)
    def recover_stale(self, number: int, later_ms: int) -> None:
        self.clock.advance(later_ms)
        assert self.jobs(number).recover_stale_locks() == self.model.recover_stale()

    @precondition(lambda self: self.any_is(JobStatus.RUNNING))
    @rule(number=repositories, dead=repositories)
    def recover_owned(self, number: int, dead: int) -> None:
        assert self.jobs(number).recover_owned([f"worker-{dead}"]) == self.model.recover_owned(f"worker-{dead}")

    @precondition(lambda self: self.any_is(JobStatus.RUNNING))
    @rule(number=repositories)
    def release_own(self, number: int) -> None:
        assert self.jobs(number).release_running_locks(f"worker-{number}") == self.model.release_own(f"worker-{number}")

    @precondition(lambda self: self.any_is(JobStatus.FAILED))
    @rule(number=repositories, how=st.sampled_from(["all", "transient", "heal"]))
    def requeue(self, number: int, how: str) -> None:
        jobs = self.jobs(number)
        ways = {"all": jobs.requeue_failed, "transient": jobs.requeue_transient_failed, "heal": jobs.self_heal}
        done = ways[how]()
        expected = self.model.requeue(transient=how != "all", heal=how == "heal")
        assert (done.revived, done.superseded, done.blocked) == expected

    @precondition(lambda self: self.any_is(JobStatus.READY, JobStatus.RUNNING))
    @rule(number=repositories, which=st.integers(0, 30))
    def cancel(self, number: int, which: int) -> None:
        job_id = sorted(self.model.rows)[which % len(self.model.rows)]
        expected = self.model.cancel(job_id)
        if expected is not None:
            assert self.jobs(number).cancel(job_id) is expected
        else:
            with pytest.raises(InvalidInputError):
                self.jobs(number).cancel(job_id)

    @precondition(lambda self: self.any_is(*TERMINAL_STATUSES))
    @rule(number=repositories, later_ms=times_ms, older_than_ms=times_ms, wanted=statuses)
    def purge(self, number: int, later_ms: int, older_than_ms: int, wanted: set[JobStatus]) -> None:
        self.clock.advance(later_ms)
        purged = self.jobs(number).purge(older_than_ms, wanted, kinds=KINDS)
        assert purged == self.model.purge(older_than_ms, wanted)

    @rule(number=repositories, wanted=wanted, back=claims)
    def roll_back(self, number: int, wanted: tuple[str, int, int, bool], back: int) -> None:
        jobs = self.jobs(number)
        kind, key, delay_ms, forced = wanted
        with suppress(UndoneError), self.databases[number].transaction() as session:
            jobs.claim_next(kinds=KINDS, session=session)
            jobs.enqueue(self.new_job(kind, key, delay_ms, forced=forced), session=session)
            if self.claims:
                jobs.mark_done(self.claimed(back), session=session)
            jobs.recover_stale_locks(session=session)
            jobs.requeue_failed(session=session)
            raise UndoneError

    @rule(ms=times_ms)
    def clock_steps_on(self, ms: int) -> None:
        self.clock.advance(ms)

    @rule(ms=times_ms)
    def clock_is_set_back(self, ms: int) -> None:
        self.clock.advance(-ms)

    @invariant()
    def the_rows_are_the_model_s(self) -> None:
        jobs = self.jobs(0)
        rows = {row.id: row for row in jobs.list_jobs(limit=1_000)}
        self.adopt_ids(rows)
        assert rows == self.model.rows
        assert jobs.watch(self.claims) == self.model.watch(self.claims)

    def adopt_ids(self, rows: dict[str, Job]) -> None:
        """Give the model's rows the ids that the repository has minted inside an operation."""
        strangers = {row.dedupe_key: row for row in rows.values() if row.id not in self.model.rows}
        for row in self.model.pending:
            self.model.adopt(row, strangers[row.dedupe_key].id)
        self.model.pending.clear()


@pytest.fixture
def databases(database_url: str) -> Iterator[list[Database]]:
    opened = [Database(DatabaseSettings(url=database_url)) for _ in range(3)]
    yield opened
    for database in opened:
        database.dispose()


@pytest.mark.parametrize("part", range(PARTS))
def test_the_repositories_do_what_the_rules_say(
    databases: list[Database], engine_name: str, part: int, pytestconfig: pytest.Config
) -> None:
    """No order of operations, stale holders, lost leases, moving clocks or rolled back transactions differs."""
    examples = pytestconfig.getoption("--simulations") // PARTS // SHARES[engine_name]

    compared = Counter[str]()

    @seed(pytestconfig.getoption("--simulation-seed") * PARTS + part)
    class Part(QueueMachine):
        def __init__(self) -> None:
            super().__init__(databases)

        def teardown(self) -> None:
            compared["examples"] += 1
            compared["rows"] += len(self.model.rows)

    run_state_machine_as_test(
        Part,
        settings=settings(
            max_examples=max(examples, 1),
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        ),
    )
    assert compared["examples"] >= examples
    assert compared["rows"] > examples  # each step compares all of them, and there were some
