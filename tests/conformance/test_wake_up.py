"""An idle worker starts what comes, and what comes due, though its own next look is ten minutes away."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest
from pydantic import BaseModel

from background import BOUND_S, outcome, program, until, working
from tinycortex import Cortex, Database, JobStatus, NewJob, Settings
from tinycortex.config import WorkerSettings
from tinycortex.domain.clock import SystemClock
from tinycortex.domain.policy import DEFAULT_LOCK_DURATION_MS
from tinycortex.testing import JobRowFactory, ManualClock, insert_rows
from tinycortex.worker import wakeup

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
    """Nobody tells it but the database."""
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


@pytest.mark.parametrize("way", ["requeue", "release", "release of all", "recovery"])
def test_a_job_that_is_ready_again_wakes_a_worker(cortex: Cortex, clock: ManualClock, way: str) -> None:
    """It is new to everybody but its last holder, who may be gone."""
    insert_rows(cortex.database, JobRowFactory.build(id="failed", failed_transient=True), JobRowFactory.build(id="new"))
    claimed = cortex.jobs.claim_next(worker_id="somebody")
    assert claimed is not None
    clock.advance(DEFAULT_LOCK_DURATION_MS + 1)
    ways: dict[str, Callable[[], object]] = {
        "requeue": lambda: cortex.jobs.requeue_job("failed"),
        "release": lambda: cortex.jobs.release(claimed),
        "release of all": lambda: cortex.jobs.release_running_locks("somebody"),
        "recovery": cortex.jobs.recover_stale_locks,
    }
    woken: list[int] = []
    with cortex._wakeup.listen(lambda: woken.append(len(cortex.jobs.list_jobs(status=JobStatus.READY)))):
        ways[way]()
    assert woken == [1]


def test_a_busy_worker_is_told_too(open_cortex: OpenCortex, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have looked just before; and what it is told must not pile up before it."""
    monkeypatch.setattr(wakeup, "_LOOK_BUSY_S", 0.01)
    cortex, other = open_cortex(), open_cortex()
    woken = threading.Event()
    with cortex._wakeup.listen(woken.set):
        with cortex._wakeup.idle():
            until(lambda: cortex._wakeup.is_live)
        for _ in range(3):
            woken.clear()
            other.enqueue(NewJob.of("note", Note()))
            assert woken.wait(BOUND_S)


def test_a_watch_can_be_cut_short(database: Database) -> None:
    """Whether it waits already or is about to."""
    watch = database.watch()

    def wait() -> bool:
        return watch.wait(2 * BOUND_S)

    def is_cut_short(waiting: "Future[bool]") -> bool:
        watch.interrupt()
        return waiting.done()

    with closing(watch), ThreadPoolExecutor(1) as thread:
        while thread.submit(watch.wait, 0).result():  # it may have something to tell at first
            pass
        watch.interrupt()
        assert not thread.submit(wait).result(BOUND_S)
        waiting = thread.submit(wait)
        until(lambda: is_cut_short(waiting))
        assert not waiting.result()
