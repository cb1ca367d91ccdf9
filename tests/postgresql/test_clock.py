"""The server's clock is everybody's: a machine whose own is set wrong neither steals nor starves."""

import time
from collections.abc import Iterator

import pytest
from sqlalchemy import text

from background import until
from tinycortex import Cortex, JobStatus
from tinycortex.testing import NewJobFactory

OFF_S = 600
LEASE_MS = 60_000
NEAR_MS = 5_000

SERVER_NOW_MS = text("SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint")


@pytest.fixture(params=[-OFF_S, OFF_S])
def wrong_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Set the machine's wall clock wrong, by so many seconds, from the start of the test on."""
    off_s: int = request.param
    seconds, nanoseconds = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: seconds() + off_s)
    monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + off_s * 1_000_000_000)
    return off_s


@pytest.fixture
def right(database_url: str) -> Iterator[Cortex]:
    """A queue whose clock was read while the machine's was right; made before ``wrong_clock``."""
    with Cortex.open(database_url) as cortex:
        cortex.clock.now_ms()
        yield cortex


@pytest.fixture
def wrong(right: Cortex, wrong_clock: int, database_url: str) -> Iterator[Cortex]:  # noqa: ARG001 - in this order
    """A queue that was opened on a machine whose clock is wrong."""
    with Cortex.open(database_url) as cortex:
        yield cortex


def server_now_ms(cortex: Cortex) -> int:
    with cortex.database.reading() as session:
        return int(session.execute(SERVER_NOW_MS).scalar_one())


def test_instants_are_the_servers(right: Cortex, wrong: Cortex) -> None:
    """Of a machine that was set wrong before it began, and of one that was set wrong while it worked."""
    for cortex in (right, wrong):
        assert abs(cortex.clock.now_ms() - server_now_ms(cortex)) < NEAR_MS
        job = cortex.get_job(str(cortex.enqueue(NewJobFactory.build())))
        assert abs(job.created_at_ms - server_now_ms(cortex)) < NEAR_MS


def test_a_lease_is_neither_stolen_nor_kept_for_longer(right: Cortex, wrong: Cortex) -> None:
    """Whoever claimed it, and whoever looks."""
    for holder, other in ((right, wrong), (wrong, right)):
        holder.enqueue(NewJobFactory.build())
        job = holder.jobs.claim_next(LEASE_MS)
        assert job is not None
        assert other.recover_stale_locks() == 0
        assert holder.jobs.mark_done(job)
        holder.enqueue(NewJobFactory.build())
        assert holder.jobs.claim_next(1) is not None
        ended_ms = server_now_ms(other) + 10
        while other.clock.now_ms() <= ended_ms:
            time.sleep(0.005)
        assert other.recover_stale_locks() == 1
        left = other.jobs.claim_next(LEASE_MS)
        assert left is not None
        assert other.jobs.mark_done(left)


def test_a_job_starts_neither_early_nor_late(right: Cortex, wrong: Cortex) -> None:
    """One that is due is claimed, and one that comes due within the error of the clock is not."""
    for producer, worker in ((right, wrong), (wrong, right)):
        due = str(producer.enqueue(NewJobFactory.build()))
        waiting = str(producer.enqueue(NewJobFactory.build(available_at_ms=producer.clock.now_ms() + OFF_S * 500)))
        due_at_ms = worker.get_job(due).available_at_ms
        until(lambda: worker.clock.now_ms() >= due_at_ms)  # noqa: B023 - waited for here; two readings differ by a moment
        claimed = worker.jobs.claim_many(9)
        assert [job.id for job in claimed] == [due]
        assert worker.get_job(waiting).status is JobStatus.READY
        assert worker.jobs.mark_done(claimed[0])
