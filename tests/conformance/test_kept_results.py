"""What a handler achieved is not lost when the database cannot take it at that moment."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy.orm import Session

from background import BOUND_S, until, working
from tinycortex import Cortex, Defer, Done, Job, JobContext, JobPlan, JobStatus, NewJob, Settings
from tinycortex.config import WorkerSettings
from tinycortex.errors import StorageBusyError, StorageCorruptError, StorageError, StorageFullError
from tinycortex.telemetry import WorkerPaused
from tinycortex.testing import ChunkRowFactory, ManualClock, NewJobFactory

OpenCortex = Callable[..., Cortex]


class Note(BaseModel):
    text: str = ""


def refuse(monkeypatch: pytest.MonkeyPatch, cortex: Cortex, method: str, times: int = 1) -> None:
    """Let the database be busy the next ``times`` that the repository's ``method`` is called."""
    allowed = getattr(cortex.jobs, method)
    refusals = ["busy"] * times

    def refusing(*arguments: Any, **options: Any) -> Any:
        if refusals:
            raise StorageBusyError(refusals.pop())
        return allowed(*arguments, **options)

    monkeypatch.setattr(cortex.jobs, method, refusing)


def writes(session: Session) -> None:
    session.add(ChunkRowFactory.build(id="written"))


def count_written(cortex: Cortex) -> int:
    with cortex.transaction() as session:
        return int(session.connection().exec_driver_sql("SELECT COUNT(*) FROM mem_tree_chunks").scalar_one())


def enqueue(cortex: Cortex, result: JobPlan | Exception | None = None, **options: Any) -> tuple[str, list[int]]:
    """Enqueue a job whose handler ends with ``result``; return its id, and the attempts in which it ran."""
    ran: list[int] = []

    def handler(ctx: JobContext, _payload: Note) -> Any:
        ran.append(ctx.job.attempts)
        if isinstance(result, Exception):
            raise result
        return result

    cortex.handler("note", payload=Note, **options)(handler)
    return str(cortex.enqueue(NewJob.of("note", Note()))), ran


FOLLOW_UPS = [NewJobFactory.build(available_at_ms=1_800_000_000_000)]


@pytest.mark.parametrize(
    ("method", "result", "settled"),
    [
        ("mark_done", Done(writes=writes, follow_ups=FOLLOW_UPS), (JobStatus.DONE, 1, 2)),
        (
            "mark_deferred",
            Defer(until_ms=1_800_000_000_000, reason="later", writes=writes, follow_ups=FOLLOW_UPS),
            (JobStatus.READY, 1, 2),
        ),
        ("mark_failed_typed", ValueError("broke"), (JobStatus.READY, 0, 1)),
    ],
)
def test_a_result_that_was_refused_is_written_by_a_later_step(
    cortex: Cortex, monkeypatch: pytest.MonkeyPatch, method: str, result: Any, settled: tuple[JobStatus, int, int]
) -> None:
    """Until then the row runs on, with none of the plan in the database; the handler runs once."""

    def state() -> tuple[JobStatus, int, int]:
        return cortex.get_job(job_id).status, count_written(cortex), len(cortex.jobs.list_jobs())

    job_id, ran = enqueue(cortex, result)
    refuse(monkeypatch, cortex, method, times=3)
    for _ in range(3):
        with pytest.raises(StorageBusyError):
            cortex.run_once()
        assert state() == (JobStatus.RUNNING, 0, 1)
    assert not cortex.run_once()
    assert state() == settled
    assert ran == [1]


def test_the_kept_result_goes_first(cortex: Cortex, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that writes it then claims the next job; the LLM permit was not held meanwhile."""
    first, ran = enqueue(cortex, llm_bound=True)
    refuse(monkeypatch, cortex, "mark_done")
    with pytest.raises(StorageBusyError):
        cortex.run_once()
    assert cortex.llm_gate.available == 1
    second = cortex.enqueue(NewJob.of("note", Note()))
    assert cortex.run_once()
    assert [cortex.get_job(str(job)).status for job in (first, second)] == [JobStatus.DONE] * 2
    assert ran == [1, 1]


def test_a_claim_beside_a_kept_result_is_carried_out(cortex: Cortex, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that writes a kept result in vain, and claims a job, runs that job, and then tells of the fault."""
    job_id, ran = enqueue(cortex, Done(writes=writes))
    ran_beside: list[int] = []
    cortex.handler("beside", payload=Note, llm_bound=True)(lambda ctx, _payload: ran_beside.append(ctx.job.attempts))
    settle, damaged = cortex.jobs.mark_done, [StorageCorruptError("damaged")] * 2

    def refusing(job: Job, **options: Any) -> bool:
        if job.id == job_id and damaged:
            raise damaged.pop()
        return settle(job, **options)

    monkeypatch.setattr(cortex.jobs, "mark_done", refusing)
    with pytest.raises(StorageCorruptError):
        cortex.run_once()
    beside = str(cortex.enqueue(NewJob.of("beside", Note())))
    with pytest.raises(StorageCorruptError):
        cortex.run_once()
    assert (cortex.get_job(beside).status, ran_beside, cortex.llm_gate.available) == (JobStatus.DONE, [1], 1)
    until(lambda: not cortex.run_once() and cortex.get_job(job_id).status is JobStatus.DONE)
    assert ran == [1]


def test_an_asynchronous_step_keeps_its_result_too(cortex: Cortex, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way the step is made, the next one of either kind writes it."""
    job_id, ran = enqueue(cortex)
    refuse(monkeypatch, cortex, "mark_done")
    with pytest.raises(StorageBusyError):
        asyncio.run(cortex.run_once_async())
    assert not cortex.run_once()
    assert (cortex.get_job(job_id).status, ran) == (JobStatus.DONE, [1])


def test_the_lease_of_a_kept_result_is_renewed(
    open_cortex: OpenCortex, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else takes the row while its result waits to be written."""
    cortex = open_cortex(Settings(worker=WorkerSettings(heartbeat_ms=10)))
    job_id, _ran = enqueue(cortex, lease_ms=30)
    refuse(monkeypatch, cortex, "mark_done")
    with pytest.raises(StorageBusyError):
        cortex.run_once()
    clock.advance(1_000)
    until(lambda: cortex.get_job(job_id).locked_until_ms == clock.now_ms() + 30)
    assert open_cortex().recover_stale_locks() == 0
    assert not cortex.run_once()
    assert cortex.get_job(job_id).status is JobStatus.DONE


def test_a_close_writes_what_is_kept(cortex: Cortex, open_cortex: OpenCortex, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that stops right after the refusal does not make its job run again."""
    job_id, _ran = enqueue(cortex, Done(writes=writes))
    refuse(monkeypatch, cortex, "mark_done")
    with pytest.raises(StorageBusyError):
        cortex.run_once()
    cortex.close()
    other = open_cortex()
    assert other.get_job(job_id).status is JobStatus.DONE
    assert count_written(other) == 1


def test_a_close_that_is_refused_leaves_the_row_to_recovery(
    cortex: Cortex, open_cortex: OpenCortex, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close ends all the same, and the job is run again after its lease."""
    job_id, _ran = enqueue(cortex)
    refuse(monkeypatch, cortex, "mark_done", times=2)
    with pytest.raises(StorageBusyError):
        cortex.run_once()
    cortex.close()
    clock.advance(300_001)
    other = open_cortex()
    assert other.recover_stale_locks() == 1
    assert other.get_job(job_id).status is JobStatus.READY


def test_a_kept_result_whose_lease_is_lost_is_not_written(
    cortex: Cortex,
    open_cortex: OpenCortex,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another worker has the row by now: its claim stands, nothing of the plan is written, and the log says so."""
    job_id, _ran = enqueue(cortex, Done(writes=writes, follow_ups=FOLLOW_UPS))
    refuse(monkeypatch, cortex, "mark_done")
    with pytest.raises(StorageBusyError):
        cortex.run_once()
    other = open_cortex()
    clock.advance(300_001)
    assert other.recover_stale_locks() == 1
    holder = other.jobs.claim_next(kinds=cortex.list_kinds())
    assert holder is not None
    caplog.clear()
    assert not cortex.run_once()
    assert cortex.get_job(job_id) == holder
    assert (count_written(cortex), len(cortex.jobs.list_jobs())) == (0, 1)
    assert f"job {job_id} (note) was cancelled, or claimed anew" in caplog.text


def test_a_fault_that_the_handler_met_is_kept_like_a_result(
    cortex: Cortex, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that is busy for the handler is busy for its worker too; the job's attempt is not lost by that."""
    job_id, ran = enqueue(cortex, StorageError("busy for the handler", url=cortex.database.masked_url))
    refuse(monkeypatch, cortex, "mark_deferred")
    with pytest.raises(StorageBusyError):
        cortex.run_once()
    assert cortex.get_job(job_id).status is JobStatus.RUNNING
    assert not cortex.run_once()
    job = cortex.get_job(job_id)
    assert (job.status, job.attempts, job.locked_by) == (JobStatus.READY, 0, None)
    assert job.available_at_ms > clock.now_ms()
    assert ran == [1]


@pytest.mark.parametrize("most", [1, 8])
def test_a_result_that_has_no_room_holds_up_no_other_job(
    cortex: Cortex, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Others are claimed and done beside it, until there are so many that the worker would collect them for ever."""
    settle = cortex.jobs.mark_done

    def refusing(job: Job, **options: Any) -> bool:
        if job.kind == "large":
            raise StorageFullError("no room")
        return settle(job, **options)

    monkeypatch.setattr(cortex.jobs, "mark_done", refusing)
    cortex.handler("large", payload=Note, rank=0)(lambda _ctx, _payload: None)
    cortex.handler("small", payload=Note)(lambda _ctx, _payload: None)
    for _ in range(most):
        cortex.enqueue(NewJob.of("large", Note()))
        with pytest.raises(StorageFullError):
            cortex.run_once()
    small = str(cortex.enqueue(NewJob.of("small", Note())))
    if most == 1:
        assert cortex.run_once()
        assert cortex.get_job(small).status is JobStatus.DONE
    else:
        with pytest.raises(StorageFullError):
            cortex.run_once()
        assert cortex.get_job(small).status is JobStatus.READY


def test_the_lease_of_a_result_that_is_tried_often_is_renewed(
    open_cortex: OpenCortex, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A try that fails is no renewal: one that comes more often than renewals are due must not put them off."""
    cortex = open_cortex(Settings(worker=WorkerSettings(heartbeat_ms=10)))
    job_id, _ran = enqueue(cortex, lease_ms=300)
    refuse(monkeypatch, cortex, "mark_done", times=1_000_000)
    with pytest.raises(StorageBusyError):
        cortex.run_once()
    clock.advance(1_000)

    def retried_and_renewed() -> bool:
        with pytest.raises(StorageBusyError):
            cortex.run_once()
        return cortex.get_job(job_id).locked_until_ms == clock.now_ms() + 300

    until(retried_and_renewed)


def test_what_is_kept_is_tried_once_more_at_the_end(
    cortex: Cortex, open_cortex: OpenCortex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A close does not leave work behind because its next try was not due yet."""
    job_id, ran = enqueue(cortex)
    settle, may_write = cortex.jobs.mark_done, [False]

    def refusing(job: Job, **options: Any) -> bool:
        if not may_write[0]:
            raise StorageFullError("no room")
        return settle(job, **options)

    monkeypatch.setattr(cortex.jobs, "mark_done", refusing)
    with pytest.raises(StorageFullError):
        cortex.run_once()
    assert not cortex.run_once()  # tried again, and put off by the pause of a full disk
    may_write[0] = True
    cortex.close()
    assert (open_cortex().get_job(job_id).status, ran) == (JobStatus.DONE, [1])


@pytest.mark.parametrize("way", ["run_sync", "run"])
def test_many_refused_results_are_one_pause(open_cortex: OpenCortex, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """What eight jobs met at one time is waited out once, and their results are then written."""
    cortex = open_cortex(Settings(worker=WorkerSettings(idle_ms=5, disk_full_ms=300)))
    paused: list[object] = []
    refused: list[str] = []
    together = threading.Barrier(8)
    settle = cortex.jobs.mark_done

    def refusing(job: Job, **options: Any) -> bool:
        if job.kind == "note" and len(refused) < 8:
            refused.append(job.id)
            raise StorageFullError("no room")
        return settle(job, **options)

    def refusing_all(*_arguments: Any, **_options: Any) -> list[bool]:
        raise StorageFullError("no room")  # and then each is tried by itself

    def note(_ctx: JobContext, _payload: Note) -> None:
        together.wait(BOUND_S)

    cortex.handler("note", payload=Note)(note)
    cortex.subscribe(lambda event: paused.append(event) if isinstance(event, WorkerPaused) else None)
    cortex.enqueue_many(NewJob.of("note", Note()) for _ in range(8))
    monkeypatch.setattr(cortex.jobs, "mark_done", refusing)
    monkeypatch.setattr(cortex.jobs, "mark_done_many", refusing_all)
    with working(cortex, way):
        until(lambda: len(cortex.jobs.list_jobs(kind="note", status=JobStatus.DONE)) == 8)
    assert len(refused) == 8
    assert 1 <= len(paused) <= 3


# A claim that is given back


def test_a_worker_that_is_cancelled_while_the_database_is_busy_ends(
    cortex: Cortex, open_cortex: OpenCortex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request to stop is not taken for a storage fault to be waited out; the close gives the job back."""
    started = asyncio.Event()

    async def handler(_ctx: JobContext, _payload: Note) -> None:
        started.set()
        await asyncio.wait_for(asyncio.Event().wait(), BOUND_S)

    async def main() -> None:
        worker = asyncio.create_task(cortex.run())
        await started.wait()
        worker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(worker, BOUND_S)

    cortex.handler("note", payload=Note, llm_bound=True)(handler)
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    refuse(monkeypatch, cortex, "release", times=2)
    asyncio.run(main())
    assert cortex.get_job(job_id).status is JobStatus.RUNNING
    assert cortex.llm_gate.available == 1
    cortex.close()
    job = open_cortex().get_job(job_id)
    assert (job.status, job.attempts) == (JobStatus.READY, 0)


def test_a_worker_that_is_cancelled_during_a_claim_that_fails_ends(
    cortex: Cortex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for a worker that is waiting for the database's lock when it is told to stop."""
    claiming, released = threading.Event(), threading.Event()

    def claim_next(*_arguments: Any, **_options: Any) -> None:
        claiming.set()
        assert released.wait(BOUND_S)
        raise StorageBusyError("busy")

    async def main() -> None:
        worker = asyncio.create_task(cortex.run())
        assert await asyncio.to_thread(claiming.wait, BOUND_S)
        worker.cancel()
        await asyncio.sleep(0)
        released.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(worker, BOUND_S)

    monkeypatch.setattr(cortex.jobs, "claim_many", claim_next)
    asyncio.run(main())
