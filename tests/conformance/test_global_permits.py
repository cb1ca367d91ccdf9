"""All processes of one database share one provider: so many LLM-bound jobs at a time, and its cooldowns.

Each queue that a test opens stands for a process of its own.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import event

from background import BOUND_S, until, working
from tinycortex import Cortex, Defer, Job, JobFailure, JobStatus, NewJob, Settings
from tinycortex.config import QueueSettings, WorkerSettings
from tinycortex.domain.clock import SystemClock
from tinycortex.domain.policy import MAX_COOLDOWN_MS
from tinycortex.testing import ManualClock

OpenCortex = Callable[..., Cortex]
Run = Callable[..., tuple[int, str, str]]

LEASE_MS = 300_000
LONG_S = 3_600
LONG_MS = LONG_S * 1000


class Note(BaseModel):
    text: str = ""


def shared(permits: int | None, *, idle_ms: int = 250) -> Settings:
    """Return settings under which only the shared limit is felt."""
    return Settings(
        queue=QueueSettings(llm_permits=100, llm_permits_global=permits), worker=WorkerSettings(idle_ms=idle_ms)
    )


def register(cortex: Cortex, llm: Callable[..., Any] = lambda _ctx, _payload: None) -> Cortex:
    """Register a kind that is LLM-bound, and one that is not."""
    cortex.handler("llm", payload=Note, llm_bound=True, rank=0)(llm)
    cortex.handler("plain", payload=Note)(lambda _ctx, _payload: None)
    return cortex


def enqueue(cortex: Cortex, kind: str = "llm", jobs: int = 1) -> list[str]:
    return [str(job_id) for job_id in cortex.enqueue_many(NewJob.of(kind, Note()) for _ in range(jobs))]


def status_of(cortex: Cortex, job_id: str) -> JobStatus | str:
    return cortex.get_job(job_id).status


def claim(cortex: Cortex, limit: int = 1) -> int:
    """Lease LLM-bound rows as a process that is killed right after it; return how many."""
    return len(cortex.jobs.claim_many(limit, LEASE_MS, kinds=cortex.list_kinds()))


@contextmanager
def statements(cortex: Cortex) -> Iterator[list[str]]:
    """Collect the statements of this thread that reach the driver, less those that begin and end transactions."""
    seen: list[str] = []
    here = threading.get_ident()

    def collect(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        if threading.get_ident() == here and not statement.startswith(
            ("BEGIN", "PRAGMA", "SELECT floor(extract(epoch")
        ):
            seen.append(statement)

    event.listen(cortex.database.engine, "before_cursor_execute", collect)
    yield seen
    event.remove(cortex.database.engine, "before_cursor_execute", collect)


def test_no_more_run_than_there_are_permits_whoever_runs_them(open_cortex: OpenCortex) -> None:
    """Forty jobs, four workers with room for all of them, three permits: three at a time, and never four."""
    lock, all_held = threading.Lock(), threading.Event()
    inside, most, ran = 0, 0, 0

    def enter(change: int) -> None:
        nonlocal inside, most, ran
        with lock:
            inside += change
            most = max(most, inside)
            ran += change > 0
        if most >= 3:
            all_held.set()

    def llm(_ctx: object, _payload: object) -> None:
        enter(1)
        assert all_held.wait(BOUND_S)
        time.sleep(0.001)  # for a fourth to come in
        enter(-1)

    workers = [register(open_cortex(shared(3), clock=SystemClock()), llm) for _ in range(4)]
    ids = enqueue(workers[0], jobs=40)
    with ExitStack() as stack:
        for worker in workers:
            stack.enter_context(working(worker))
        until(lambda: all(status_of(workers[0], job_id) is JobStatus.DONE for job_id in ids))
    assert (most, ran) == (3, 40)


def test_two_claims_at_once_do_not_both_take_the_last_permit(open_cortex: OpenCortex) -> None:
    """The second one waits for the commit of the first, which it could not see before."""
    ours, theirs = (register(open_cortex(shared(1))) for _ in range(2))
    enqueue(ours, jobs=2)
    claimed: list[int] = []
    second = threading.Thread(target=lambda: claimed.append(claim(ours)))
    with theirs.transaction() as session:
        assert theirs.jobs.claim_next(kinds=theirs.list_kinds(), session=session) is not None
        second.start()
        second.join(0.2)
    second.join(BOUND_S)
    assert claimed == [0]


@pytest.mark.parametrize("permits", [0, 1])
def test_zero_permits_are_read_as_one(open_cortex: OpenCortex, permits: int) -> None:
    """So that the limit can never stop all work."""
    cortex = register(open_cortex(shared(permits)))
    enqueue(cortex, jobs=3)
    assert (claim(cortex, 3), claim(cortex, 3)) == (1, 0)


def test_a_claim_of_many_takes_what_is_left_and_other_kinds_instead(open_cortex: OpenCortex) -> None:
    """Two of three permits are out: one LLM-bound row, and the others that are due."""
    ours, theirs = (register(open_cortex(shared(3))) for _ in range(2))
    enqueue(ours, jobs=5)
    enqueue(ours, "plain", jobs=2)
    assert claim(theirs, 2) == 2
    kinds = [job.kind for job in ours.jobs.claim_many(10, kinds=ours.list_kinds())]
    assert kinds == ["llm", "plain", "plain"]


def test_a_killed_holders_share_comes_back_with_its_lease(open_cortex: OpenCortex, clock: ManualClock) -> None:
    """Nobody has to recover its row first; other kinds go on meanwhile."""
    ours, theirs = (register(open_cortex(shared(1))) for _ in range(2))
    enqueue(ours, jobs=2)
    (plain,) = enqueue(ours, "plain")
    assert claim(theirs) == 1
    assert ours.drain_until_idle() == 1
    assert status_of(ours, plain) is JobStatus.DONE
    clock.advance(LEASE_MS)
    assert not ours.run_once()
    clock.advance(1)
    assert ours.run_once()


def test_a_permit_is_given_back_with_the_settlement(open_cortex: OpenCortex) -> None:
    """Whichever way it settles."""
    ours, theirs = (register(open_cortex(shared(1))) for _ in range(2))
    enqueue(ours, jobs=4)
    settlements: list[Callable[[Job], bool]] = [
        theirs.jobs.mark_done,
        lambda job: theirs.jobs.mark_failed(job, "no"),
        lambda job: theirs.jobs.mark_deferred(job, 2**60, "later"),
        theirs.jobs.release,
    ]
    for settle in settlements:
        job = theirs.jobs.claim_next(kinds=theirs.list_kinds())
        assert job is not None
        assert claim(ours) == 0
        assert settle(job)
    assert claim(ours) == 1


@pytest.mark.parametrize("theirs_limit", [1, None])
def test_a_kind_that_only_its_own_process_knows_counts(open_cortex: OpenCortex, theirs_limit: int | None) -> None:
    """The row says that it is LLM-bound, so neither its kind nor a limit has to be known to both."""
    ours, theirs = register(open_cortex(shared(1))), open_cortex(shared(theirs_limit))
    theirs.handler("theirs", payload=Note, llm_bound=True)(lambda _ctx, _payload: None)
    theirs.handler("theirs_plain", payload=Note)(lambda _ctx, _payload: None)
    enqueue(ours)
    enqueue(theirs, "theirs_plain")
    assert claim(theirs) == 1
    assert ours.status().llm_permits_held == 0
    enqueue(theirs, "theirs")
    assert claim(theirs) == 1
    assert ours.status().llm_permits_held == 1
    assert claim(ours) == 0


def limited_by(clock: ManualClock, how: str) -> Callable[..., Any]:
    def defer(*_arguments: object) -> Defer:
        return Defer(until_ms=clock.now_ms() + LONG_MS, reason="429", cooldown=True)

    def fail(*_arguments: object) -> None:
        raise RuntimeError("the client's own") from JobFailure.transient("rate_limited", retry_after_s=LONG_S)

    return defer if how == "defer" else fail


@pytest.mark.parametrize("how", ["defer", "failure"])
def test_another_processs_cooldown_closes_ours_until_its_end(
    open_cortex: OpenCortex, clock: ManualClock, how: str
) -> None:
    """The provider is the same; kinds that do not call it go on."""
    theirs, ours = register(open_cortex(shared(2)), limited_by(clock, how)), register(open_cortex(shared(2)))
    enqueue(theirs)
    assert theirs.run_once()
    (llm,) = enqueue(ours)
    enqueue(ours, "plain")
    assert ours.drain_until_idle() == 1
    assert status_of(ours, llm) is JobStatus.READY
    assert ours.status().llm_closed_until_ms == clock.now_ms() + LONG_MS
    clock.advance(LONG_MS - 1)
    assert not ours.run_once()
    clock.advance(1)
    assert ours.run_once()
    assert ours.status().llm_closed_until_ms is None


def test_a_shorter_cooldown_opens_nothing(open_cortex: OpenCortex, clock: ManualClock) -> None:
    """Of two that run at once, the longer one holds, whichever ends first."""
    longer = register(open_cortex(shared(2)), limited_by(clock, "defer"))

    def meanwhile(_ctx: object, _payload: object) -> Defer:
        assert longer.run_once()
        return Defer(until_ms=clock.now_ms() + 1_000, reason="429", cooldown=True)

    shorter = register(open_cortex(shared(2)), meanwhile)
    enqueue(shorter, jobs=2)
    assert shorter.run_once()
    assert shorter.status().llm_closed_until_ms == clock.now_ms() + LONG_MS


@pytest.mark.parametrize("kind", ["llm", "plain"])
def test_no_cooldown_is_shared_that_does_not_concern_others(
    open_cortex: OpenCortex, clock: ManualClock, kind: str
) -> None:
    """Of a kind that is not LLM-bound, or of a process that shares no limit."""
    theirs, ours = open_cortex(shared(None if kind == "llm" else 1)), register(open_cortex(shared(1)))
    theirs.handler(kind, payload=Note, llm_bound=kind == "llm")(limited_by(clock, "defer"))
    enqueue(theirs, kind)
    assert theirs.run_once()
    assert ours.status().llm_closed_until_ms is None


def test_a_plan_that_is_undone_closes_nothing(open_cortex: OpenCortex, clock: ManualClock) -> None:
    """The cooldown commits with the settlement, or not at all."""

    def fail(_session: object) -> None:
        raise ValueError("no")

    def llm(_ctx: object, _payload: object) -> Defer:
        return Defer(until_ms=clock.now_ms() + LONG_MS, reason="429", cooldown=True, writes=fail)

    cortex = register(open_cortex(shared(1)), llm)
    enqueue(cortex)
    assert cortex.run_once()
    assert cortex.status().llm_closed_until_ms is None


def test_no_cooldown_outlasts_a_week(open_cortex: OpenCortex, clock: ManualClock) -> None:
    """A handler that reckons in the wrong unit must not close the gate of every process for good."""
    cortex = register(open_cortex(shared(1)), lambda _ctx, _payload: Defer(until_ms=2**60, reason="429", cooldown=True))
    enqueue(cortex)
    assert cortex.run_once()
    assert cortex.status().llm_closed_until_ms == clock.now_ms() + MAX_COOLDOWN_MS


def test_a_worker_that_waits_for_a_permit_is_woken_and_does_not_spin(open_cortex: OpenCortex) -> None:
    """Its own next look is ten minutes away: it looks when a settlement of another process gives one back."""
    theirs = register(open_cortex(shared(1), clock=SystemClock()))
    ours = register(open_cortex(shared(1, idle_ms=600_000), clock=SystemClock()))
    job = theirs.jobs.claim_next(kinds=theirs.list_kinds()) if enqueue(theirs) else None
    assert job is not None
    (waiting,) = enqueue(ours)
    with working(ours):
        until(lambda: ours.jobs.list_jobs(status=JobStatus.DONE) and ours._wakeup._idle)  # the first tick's flush
        with statements(ours) as seen:
            time.sleep(0.2)
        assert sum("UPDATE mem_tree_jobs" in statement for statement in seen) <= 4
        assert theirs.jobs.mark_done(job)
        until(lambda: status_of(ours, waiting) is JobStatus.DONE)


def test_a_worker_looks_again_when_the_cooldown_ends(open_cortex: OpenCortex) -> None:
    """Nothing else wakes it."""
    clock = SystemClock()
    closes_for_ms = 300

    def llm(_ctx: object, _payload: object) -> Defer:
        return Defer(until_ms=clock.now_ms() + closes_for_ms, reason="429", cooldown=True)

    theirs = register(open_cortex(shared(1), clock=clock), llm)
    ours = register(open_cortex(shared(1, idle_ms=600_000), clock=clock))
    (limited,) = enqueue(theirs)
    assert theirs.run_once()
    opens_at_ms = theirs.get_job(limited).available_at_ms
    (waiting,) = enqueue(ours)
    with working(ours):
        until(lambda: status_of(ours, waiting) is JobStatus.DONE)
    started_at_ms = ours.get_job(waiting).started_at_ms
    assert started_at_ms is not None
    assert started_at_ms >= opens_at_ms


@pytest.mark.parametrize(("permits", "cost"), [(None, 0), (1, 2)])
def test_a_claim_without_the_limit_costs_no_statement_more(
    open_cortex: OpenCortex, engine_name: str, permits: int | None, cost: int
) -> None:
    """With it, a look at the gate; and a lock, where there can be several writers."""
    cortex = register(open_cortex(shared(permits)))
    enqueue(cortex)
    with statements(cortex) as seen:
        assert claim(cortex) == 1
    assert len(seen) == 1 + cost - (permits is not None and engine_name == "sqlite")
    with statements(cortex) as settling:
        assert cortex.jobs.recover_stale_locks() == 0
    assert not any("tinycortex_gate" in statement for statement in settling)


def test_a_claim_of_other_kinds_takes_no_notice_of_the_limit(open_cortex: OpenCortex) -> None:
    """It neither waits for its turn nor looks."""
    cortex = register(open_cortex(shared(1)))
    enqueue(cortex, "plain")
    plain = [spec for spec in cortex.list_kinds() if not spec.llm_bound]
    with statements(cortex) as seen:
        assert cortex.jobs.claim_next(kinds=plain) is not None
    assert len(seen) == 1


def test_the_status_shows_the_shared_gate(
    open_cortex: OpenCortex, database_url: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit, what is out, and until when nothing is handed out; nothing of it without a limit."""
    cortex = register(open_cortex(shared(2), clock=SystemClock()))
    enqueue(cortex)
    assert claim(cortex) == 1
    status = cortex.status()
    assert (status.llm_permits_global, status.llm_permits_held, status.llm_closed_until_ms) == (2, 1, None)
    assert "LLM permits" not in run("--database-url", database_url, "status")[1]
    monkeypatch.setenv("TINYCORTEX_QUEUE__LLM_PERMITS_GLOBAL", "2")
    assert "LLM permits of all workers: 1 of 2 held\n" in run("--database-url", database_url, "status")[1]
    with cortex.transaction() as session:
        cortex.jobs.shared_gate.close_for(LONG_MS, session)
    assert (
        "LLM permits of all workers: 1 of 2 held, closed until 20" in run("--database-url", database_url, "status")[1]
    )
