"""Draining, and the loops that run until told to stop (spec: Worker loop; contract §3)."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from pydantic import BaseModel

from tinycortex import (
    Cortex,
    JobFailure,
    JobStatus,
    NewJob,
    Settings,
    StorageBusyError,
    StorageCorruptError,
    StorageError,
    StorageFullError,
)
from tinycortex.config import WorkerSettings
from tinycortex.domain.clock import SystemClock
from tinycortex.testing import JobRowFactory, ManualClock, NewJobFactory, insert_rows

OpenCortex = Callable[..., Cortex]

HURRIED = Settings(worker=WorkerSettings(idle_ms=5, busy_ms=5, other_ms=5))


class Note(BaseModel):
    text: str = ""


def start_loop(cortex: Cortex, way: str) -> Callable[[Callable[[], object]], None]:
    """Return a function that runs the loop, lets its argument wait for something, and stops the loop."""

    def run(until: Callable[[], object]) -> None:
        stop = threading.Event()

        def watch() -> None:
            until()
            stop.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        if way == "run_sync":
            cortex.run_sync(stop)
        else:
            asyncio.run(run_async(cortex, stop))
        watcher.join()

    return run


async def run_async(cortex: Cortex, stop: threading.Event) -> None:
    stopping = asyncio.Event()

    async def watch() -> None:
        await asyncio.to_thread(stop.wait)
        stopping.set()

    watching = asyncio.create_task(watch())
    await cortex.run(stopping)
    await watching


def test_a_drain_runs_all_that_is_due_and_counts_it(cortex: Cortex, clock: ManualClock) -> None:
    """Spec: until nothing is claimable; what is due later is left."""
    cortex.enqueue_many(NewJobFactory.build() for _ in range(5))
    cortex.enqueue(NewJobFactory.build(available_at_ms=clock.now_ms() + 1))
    assert cortex.drain_until_idle() == 5
    assert cortex.jobs.count_by_status()[JobStatus.READY] == 1


def test_a_drain_of_nothing_is_zero(cortex: Cortex) -> None:
    """An empty queue is idle."""
    assert cortex.drain_until_idle() == 0


def test_a_drain_tells_of_each_step(cortex: Cortex) -> None:
    """``on_step`` is called after every job."""
    cortex.enqueue_many(NewJobFactory.build() for _ in range(3))
    steps: list[int] = []
    cortex.drain_until_idle(on_step=lambda: steps.append(1))
    assert len(steps) == 3


def test_a_drain_runs_follow_ups_and_retries_that_come_due(cortex: Cortex, clock: ManualClock) -> None:
    """A job that becomes due while the drain goes on is part of it."""

    def note(_ctx: object, _payload: Note) -> None:
        if clock.now_ms() < 1_700_000_300_000:
            raise JobFailure.transient("net")

    cortex.handler("note", payload=Note)(note)
    cortex.enqueue(NewJob.of("note", Note()))
    assert cortex.drain_until_idle(on_step=lambda: clock.advance(200_000)) == 3


@pytest.mark.parametrize("way", ["run_sync", "run"])
def test_a_loop_works_until_it_is_told_to_stop(open_cortex: OpenCortex, way: str) -> None:
    """Jobs that are there and jobs that come later run; then the loop returns."""
    cortex = open_cortex(HURRIED)
    ran: dict[str, threading.Event] = {"first": threading.Event(), "second": threading.Event()}
    cortex.handler("note", payload=Note)(lambda _ctx, payload: ran[payload.text].set())
    cortex.enqueue(NewJob.of("note", Note(text="first")))

    def until() -> None:
        assert ran["first"].wait(10)
        cortex.enqueue(NewJob.of("note", Note(text="second")))
        assert ran["second"].wait(10)

    start_loop(cortex, way)(until)
    assert all(event.is_set() for event in ran.values())


@pytest.mark.parametrize("way", ["run_sync", "run"])
def test_a_loop_begins_with_housekeeping_and_a_tick(open_cortex: OpenCortex, way: str) -> None:
    """Retired rows are purged, dead leases recovered, the block's flush enqueued, without waiting for an interval."""
    cortex = open_cortex(HURRIED)
    insert_rows(
        cortex.database,
        JobRowFactory.build(id="retired", kind="topic_route"),
        JobRowFactory.build(id="expired", expired=True),
        JobRowFactory.build(id="healed", failed_transient=True),
    )

    def until() -> None:
        for _ in range(1_000):
            done = cortex.jobs.list_jobs(status=JobStatus.DONE)
            if len(done) == 3:
                return
            threading.Event().wait(0.005)

    start_loop(cortex, way)(until)
    done = {job.id: job.kind for job in cortex.jobs.list_jobs(status=JobStatus.DONE)}
    assert {"expired", "healed"} < set(done)
    assert "flush_stale" in done.values()
    assert cortex.jobs.find_job("retired") is None


@pytest.mark.parametrize("way", ["run_sync", "run"])
@pytest.mark.parametrize("fault", [StorageBusyError, StorageError])
def test_a_job_waits_a_storage_fault_out(open_cortex: OpenCortex, way: str, fault: type[StorageError]) -> None:
    """A fault of the queue's database that a handler meets ends nothing; no attempt is burnt."""
    cortex = open_cortex(HURRIED, clock=SystemClock())
    ran = threading.Event()
    faults = [fault("hidden", url=cortex.database.masked_url) for _ in range(2)]

    def note(_ctx: object, _payload: Note) -> None:
        if len(faults) == 2:
            raise faults.pop()
        if faults:
            raise ValueError("wrapped") from faults.pop()
        ran.set()

    cortex.handler("note", payload=Note)(note)
    job_id = cortex.enqueue(NewJob.of("note", Note()))
    start_loop(cortex, way)(lambda: ran.wait(10))
    job = cortex.get_job(str(job_id))
    assert (job.status, job.attempts) == (JobStatus.DONE, 1)


@pytest.mark.parametrize("fault", [StorageBusyError, StorageCorruptError])
def test_a_fault_of_another_database_is_a_failed_attempt(cortex: Cortex, fault: type[StorageError]) -> None:
    """It is the handler's own affair: it neither stops the worker nor comes back for ever."""

    def note(_ctx: object, _payload: Note) -> None:
        raise fault("elsewhere", url="sqlite:///elsewhere.db")

    cortex.handler("note", payload=Note)(note)
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    assert cortex.run_once()
    job = cortex.get_job(job_id)
    assert (job.status, job.attempts, job.last_error) == (JobStatus.READY, 1, f"{fault.__name__}: elsewhere")


def test_a_job_that_meets_the_same_fault_again_and_again_comes_back_less_often(
    cortex: Cortex, clock: ManualClock
) -> None:
    """First after the fault's pause, then after as long as it has met it for, at most an hour; no attempt is burnt."""

    def note(_ctx: object, _payload: Note) -> None:
        raise StorageFullError("full", url=cortex.database.masked_url)

    cortex.handler("note", payload=Note)(note)
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    waits: list[int] = []
    for _ in range(10):
        assert cortex.run_once()
        job = cortex.get_job(job_id)
        assert (job.status, job.attempts, job.last_error) == (JobStatus.READY, 0, "StorageFullError: full")
        waits.append(job.available_at_ms - clock.now_ms())
        clock.set(job.available_at_ms)
    assert waits == [30_000, 30_000, 60_000, 120_000, 240_000, 480_000, 960_000, 1_920_000, 3_600_000, 3_600_000]


@pytest.mark.parametrize("way", ["run_sync", "run"])
def test_a_damaged_database_ends_the_loop(open_cortex: OpenCortex, way: str) -> None:
    """A permanent fault is raised once, not retried for ever."""
    cortex = open_cortex(HURRIED)

    def note(_ctx: object, _payload: Note) -> None:
        raise StorageCorruptError("damaged", url=cortex.database.masked_url)

    cortex.handler("note", payload=Note)(note)
    cortex.enqueue(NewJob.of("note", Note()))
    loops: dict[str, Callable[[], None]] = {"run_sync": cortex.run_sync, "run": lambda: asyncio.run(cortex.run())}
    with pytest.raises(StorageCorruptError, match="damaged"):
        loops[way]()


@pytest.mark.parametrize("way", ["run_sync", "run"])
def test_a_stopped_loop_does_not_start(open_cortex: OpenCortex, way: str) -> None:
    """An event that is set already ends the loop before its first claim."""
    cortex = open_cortex(HURRIED)
    cortex.enqueue(NewJobFactory.build())
    if way == "run_sync":
        stop = threading.Event()
        stop.set()
        cortex.run_sync(stop)
    else:

        async def main() -> None:
            stop = asyncio.Event()
            stop.set()
            await cortex.run(stop)

        asyncio.run(main())
    assert cortex.jobs.count_by_status()[JobStatus.READY] == 1


def test_a_cancelled_loop_gives_its_job_back(open_cortex: OpenCortex) -> None:
    """Cancelling the worker's task is no failed attempt of the job that it was running."""
    cortex = open_cortex(HURRIED)

    async def note(_ctx: object, _payload: Note) -> None:
        started.set()
        await asyncio.sleep(600)

    async def main() -> None:
        worker = asyncio.create_task(cortex.run())
        await started.wait()
        worker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await worker

    started = asyncio.Event()
    cortex.handler("note", payload=Note, llm_bound=True)(note)
    job_id = cortex.enqueue(NewJob.of("note", Note()))
    asyncio.run(main())
    job = cortex.get_job(str(job_id))
    assert (job.status, job.attempts, job.last_error, job.locked_by) == (JobStatus.READY, 0, None, None)
    assert cortex.llm_gate.available == 1


def test_one_queue_may_run_on_one_loop_after_another(open_cortex: OpenCortex) -> None:
    """``asyncio.run`` three times with one object works."""
    cortex = open_cortex(HURRIED)
    for number in range(3):
        job_id = cortex.enqueue(NewJobFactory.build(chunk_id=f"c{number}"))
        assert asyncio.run(cortex.run_once_async())
        assert cortex.get_job(str(job_id)).status is JobStatus.DONE
