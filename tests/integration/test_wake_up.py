"""An idle worker starts what comes, and what comes due, though its own next look is ten minutes away."""

from collections.abc import Callable

import pytest
from pydantic import BaseModel

from background import outcome, program, until, working
from tinycortex import Cortex, JobStatus, NewJob, Settings
from tinycortex.config import WorkerSettings
from tinycortex.domain.clock import SystemClock

OpenCortex = Callable[..., Cortex]

PATIENT = Settings(worker=WorkerSettings(idle_ms=600_000))
"""Whoever is not woken up sleeps through any test."""

ENQUEUES = """
import sys
from pydantic import BaseModel
from tinycortex import Cortex, NewJob

class Note(BaseModel):
    text: str = ""

with Cortex.open(sys.argv[1]) as cortex:
    print(cortex.enqueue(NewJob.of("note", Note())))
"""


class Note(BaseModel):
    text: str = ""


@pytest.fixture
def idler(open_cortex: OpenCortex) -> Cortex:
    """A queue, whose worker will have nothing to do; by the machine's clock, as what comes due needs one that goes."""
    cortex = open_cortex(PATIENT, clock=SystemClock())
    cortex.handler("note", payload=Note)(lambda _ctx, _payload: None)
    return cortex


def until_idle(cortex: Cortex) -> None:
    """Return when the worker has done the first tick's flush, and waits."""
    until(lambda: cortex.jobs.list_jobs(status=JobStatus.DONE) and cortex._wakeup._idle)


def until_done(cortex: Cortex, job_id: str) -> None:
    until(lambda: cortex.get_job(job_id).status is JobStatus.DONE)


@pytest.mark.parametrize("way", ["run_sync", "run"])
def test_an_enqueue_of_this_process_wakes_an_idle_worker(idler: Cortex, way: str) -> None:
    """Again and again, and one in a transaction of the program's own too."""
    ids: list[str] = []
    with working(idler, way):
        for _ in range(3):
            until_idle(idler)
            ids.append(str(idler.enqueue(NewJob.of("note", Note()))))
            until_done(idler, ids[-1])
        until_idle(idler)
        with idler.transaction() as session:
            ids.append(str(idler.enqueue(NewJob.of("note", Note()), session=session)))
        until_done(idler, ids[-1])
    assert [idler.get_job(job_id).attempts for job_id in ids] == [1] * 4


def test_an_enqueue_of_another_process_wakes_an_idle_worker(idler: Cortex, database_url: str) -> None:
    """Nobody tells it but the file itself."""
    with working(idler):
        until_idle(idler)
        with program(ENQUEUES, database_url) as producer:
            code, job_id, err = outcome(producer)
        assert (code, err) == (0, "")
        until_done(idler, job_id.strip())


def test_a_job_that_comes_due_is_not_slept_through(idler: Cortex) -> None:
    """Whether it was there before the worker went idle, or came while it was."""
    soon_ms = 200
    before = str(idler.enqueue(NewJob.of("note", Note(), available_at_ms=idler.clock.now_ms() + soon_ms)))
    with working(idler):
        until_done(idler, before)
        until_idle(idler)
        at_ms = idler.clock.now_ms() + soon_ms
        later = str(idler.enqueue(NewJob.of("note", Note(), available_at_ms=at_ms)))
        until_done(idler, later)
    started_at_ms = idler.get_job(later).claimed_at_ms
    assert started_at_ms is not None
    assert started_at_ms >= at_ms


@pytest.mark.parametrize("way", ["run_sync", "run"])
def test_an_idle_worker_can_be_stopped(idler: Cortex, way: str) -> None:
    """It does not wait for its next look first."""
    with working(idler, way) as worker:
        until_idle(idler)
    assert worker.ended.is_set()


def test_a_wake_up_comes_after_the_commit_or_not_at_all(idler: Cortex) -> None:
    """A worker that looked before it would find nothing, and sleep on."""
    woken: list[int] = []

    def look() -> None:
        woken.append(len(idler.jobs.list_jobs(kind="note")))

    with idler._wakeup.listen(look):
        with idler.transaction() as session:
            idler.enqueue(NewJob.of("note", Note()), session=session)
            assert woken == []
        assert woken == [1]
        with idler.transaction() as session:
            idler.enqueue(NewJob.of("note", Note()), session=session)
            session.rollback()
        assert woken == [1]
        idler.enqueue(NewJob.of("note", Note()))
        assert woken == [1, 2]
