"""However a worker is stopped, at whatever moment, nothing is left behind that nobody ends."""

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy.orm import Session

from background import BOUND_S, outcome, program, until
from tinycortex import Cortex, Done, InvalidInputError, JobContext, JobStatus, NewJob, Settings
from tinycortex.config import WorkerSettings
from tinycortex.errors import ConfigurationError, StorageBusyError, TinycortexError
from tinycortex.testing import ManualClock

OpenCortex = Callable[..., Cortex]

HURRIED = Settings(worker=WorkerSettings(idle_ms=5, busy_ms=5, heartbeat_ms=10))

MAIN_ENDS = """
import sys, threading
from pydantic import BaseModel
from tinycortex import Cortex, NewJob

class Note(BaseModel):
    text: str = ""

cortex = Cortex.open(sys.argv[1])
stop = threading.Event()
main_has_ended = lambda: not threading.main_thread().is_alive()

@cortex.handler("note", payload=Note)
def note(ctx, payload):
    while not main_has_ended():
        threading.Event().wait(0.005)
    if payload.text == "last":
        stop.set()

cortex.enqueue(NewJob.of("note", Note(text="first")))
cortex.enqueue(NewJob.of("note", Note(text="last")))
threading.Thread(target=lambda: cortex.run_sync(stop, concurrency=1)).start()
"""

ENDS_AT_ONCE = """
import sys, threading
from pydantic import BaseModel
from tinycortex import Cortex, NewJob

class Note(BaseModel):
    text: str = ""

cortex = Cortex.open(sys.argv[1])
started = threading.Event()

@cortex.handler("note", payload=Note)
def note(ctx, payload):
    started.set()
    threading.Event().wait()

cortex.enqueue(NewJob.of("note", Note()))
threading.Thread(target=cortex.run_sync, daemon=True).start()
started.wait()
"""

FORKED_WITH_A_PERMIT = """
import os, sys
from pydantic import BaseModel
from tinycortex import Cortex, NewJob

class Note(BaseModel):
    text: str = ""

cortex = Cortex.open(sys.argv[1])

@cortex.handler("note", payload=Note, llm_bound=True)
def note(ctx, payload):
    pass

permit = cortex.llm_gate.try_acquire()
child = os.fork()
if child == 0:
    assert cortex.llm_gate.available == 1
    cortex.enqueue(NewJob.of("note", Note()))
    assert cortex.run_once()
    del permit
    assert cortex.llm_gate.available == 1
    cortex.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert cortex.llm_gate.available == 0
permit.release()
assert cortex.llm_gate.available == 1
cortex.close()
"""

FORKED_WITH_A_RESULT = """
import os, sys
from pydantic import BaseModel
from tinycortex import Cortex, Done, NewJob
from tinycortex.errors import StorageBusyError

class Note(BaseModel):
    text: str = ""

cortex = Cortex.open(sys.argv[1])

@cortex.handler("note", payload=Note)
def note(ctx, payload):
    return Done(writes=lambda session: print("written by", "parent" if os.getpid() == parent else "child", flush=True))

def busy(job, **options):
    cortex.jobs.mark_done = mark_done
    raise StorageBusyError("busy")

parent, mark_done, cortex.jobs.mark_done = os.getpid(), cortex.jobs.mark_done, busy
cortex.enqueue(NewJob.of("note", Note()))
try:
    cortex.run_once()
except StorageBusyError:
    pass
child = os.fork()
if child == 0:
    assert not cortex.run_once()
    cortex.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert not cortex.run_once()
cortex.close()
"""

INTERRUPTED = """
import asyncio, os, signal, sys
from pydantic import BaseModel
from tinycortex import Cortex, NewJob

class Note(BaseModel):
    text: str = ""

cortex = Cortex.open(sys.argv[1])

@cortex.handler("note", payload=Note)
async def note(ctx, payload):
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(60)

def turn_a_bare_loop():
    loop = asyncio.new_event_loop()
    loop.run_until_complete(cortex.run())

ways = {
    "run_once": lambda: cortex.run_once(),
    "drain": lambda: cortex.drain_until_idle(),
    "run_sync": lambda: cortex.run_sync(),
    "run_once_async": lambda: asyncio.run(cortex.run_once_async()),
    "run": lambda: asyncio.run(cortex.run()),
    "a bare loop": turn_a_bare_loop,
}
cortex.enqueue(NewJob.of("note", Note()))
try:
    ways[sys.argv[2]]()
except KeyboardInterrupt:
    os._exit(130)
"""

CLOSES_ITS_LOOP = """
import asyncio, os, sys, threading
from pydantic import BaseModel
from tinycortex import Cortex, JobStatus, NewJob, Settings
from tinycortex.config import WorkerSettings

class Note(BaseModel):
    text: str = ""

cortex = Cortex.open(sys.argv[1], settings=Settings(worker=WorkerSettings(heartbeat_ms=10)))
began, may_end = threading.Event(), threading.Event()

async def asynchronous(ctx, payload):
    began.set()
    await asyncio.Event().wait()

def in_a_thread(ctx, payload):
    began.set()
    may_end.wait()

async def main():
    global worker
    worker = asyncio.create_task(cortex.run(kinds=["note"]))
    while not began.is_set():
        await asyncio.sleep(0.005)

cortex.handler("note", payload=Note, llm_bound=True)(globals()[sys.argv[2]])
job_id = cortex.enqueue(NewJob.of("note", Note()))
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
loop.close()
may_end.set()
while cortex.get_job(job_id).status is JobStatus.RUNNING:
    threading.Event().wait(0.005)
job = cortex.get_job(job_id)
print(job.status, job.attempts, cortex.llm_gate.available, flush=True)
os._exit(0)
"""


class Note(BaseModel):
    text: str = ""


def assert_nothing_is_held(cortex: Cortex) -> None:
    """No row runs, and no lease is renewed."""
    until(lambda: cortex.jobs.count_by_status()[JobStatus.RUNNING] == 0)
    assert not cortex._heartbeat._watched


# Cancelled tasks


class Gate:
    """Holds up the repository's claim, in its thread."""

    def __init__(self, cortex: Cortex, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        claim_next = cortex.jobs.claim_many

        def held_up(*arguments: Any, **options: Any) -> Any:
            self.reached.set()
            assert self.open.wait(BOUND_S)
            return claim_next(*arguments, **options)

        monkeypatch.setattr(cortex.jobs, "claim_many", held_up)


@pytest.mark.parametrize("way", ["run", "run_once_async"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_claim_whose_task_is_cancelled_is_given_back(
    open_cortex: OpenCortex, monkeypatch: pytest.MonkeyPatch, way: str, times: int
) -> None:
    """Once or again and again, before the database has answered: the row that it leases is nobody's to run."""
    cortex = open_cortex(HURRIED)
    cortex.handler("note", payload=Note, llm_bound=True)(lambda _ctx, _payload: None)
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    gate = Gate(cortex, monkeypatch)

    async def main() -> None:
        task = asyncio.create_task(cortex.run(kinds=["note"]) if way == "run" else cortex.run_once_async())
        await asyncio.to_thread(gate.reached.wait, BOUND_S)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    until(lambda: cortex.get_job(job_id).claim_token == 1)
    assert_nothing_is_held(cortex)
    job = cortex.get_job(job_id)
    assert (job.status, job.attempts, cortex.llm_gate.available) == (JobStatus.READY, 0, 1)


def test_a_handler_that_ends_during_the_last_claim_holds_no_worker_up(
    open_cortex: OpenCortex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has ended by then is settled, and nobody waits for another end, which would not come."""
    cortex = open_cortex(Settings(worker=WorkerSettings(idle_ms=60_000, shutdown_grace_s=2 * BOUND_S)))
    helpers: list[asyncio.Task[None]] = []

    async def main() -> None:
        stop = asyncio.Event()

        async def note(_ctx: JobContext, _payload: Note) -> None:
            gate = Gate(cortex, monkeypatch)
            await asyncio.to_thread(gate.reached.wait, BOUND_S)
            helpers.append(asyncio.create_task(open_after(asyncio.current_task(), gate)))
            stop.set()

        async def open_after(run: "asyncio.Task[Any] | None", gate: Gate) -> None:
            assert run is not None
            await asyncio.wait({run})
            await asyncio.sleep(0)
            gate.open.set()

        cortex.handler("note", payload=Note)(note)
        await asyncio.wait_for(cortex.run(stop, concurrency=2, kinds=["note"]), BOUND_S)

    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    asyncio.run(main())
    assert cortex.get_job(job_id).status is JobStatus.DONE


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("hops", range(12))
def test_a_loop_that_ends_at_any_moment_leaves_no_claim(open_cortex: OpenCortex, plain: bool, hops: int) -> None:
    """``asyncio.run`` cancels every task that is left, whatever each of them is at."""
    cortex = open_cortex(HURRIED)

    async def asynchronous(_ctx: JobContext, _payload: Note) -> None:
        await asyncio.sleep(0)

    cortex.handler("note", payload=Note)((lambda _ctx, _payload: None) if plain else asynchronous)
    cortex.enqueue_many(NewJob.of("note", Note()) for _ in range(20))

    async def main() -> None:
        worker = asyncio.create_task(cortex.run())
        while cortex.jobs.count_by_status()[JobStatus.DONE] == 0:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)
        for _ in range(hops):
            await asyncio.sleep(0)
        assert not worker.done()

    asyncio.run(main())
    assert_nothing_is_held(cortex)
    assert {job.attempts for job in cortex.jobs.list_jobs(status=JobStatus.READY, kind="note")} <= {0}


@pytest.mark.parametrize("hops", range(8))
def test_a_cancellation_beside_a_wake_up_is_not_lost(
    open_cortex: OpenCortex, monkeypatch: pytest.MonkeyPatch, hops: int
) -> None:
    """However few turns of the loop lie between a commit and the request to stop, the worker ends."""
    cortex = open_cortex(Settings(worker=WorkerSettings(idle_ms=60_000)))
    looked = threading.Event()
    find_next = cortex.jobs.find_next_ready_at

    def look(*arguments: Any) -> int | None:
        looked.set()
        return find_next(*arguments)

    monkeypatch.setattr(cortex.jobs, "find_next_ready_at", look)

    async def main() -> None:
        worker = asyncio.create_task(cortex.run(kinds=["seal"]))
        await asyncio.to_thread(looked.wait, BOUND_S)
        await asyncio.sleep(0.05)  # until it waits; nothing tells of that
        cortex._wakeup.notify()
        for _ in range(hops):
            await asyncio.sleep(0)
        worker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(worker, BOUND_S)

    asyncio.run(main())


def test_a_handler_that_cleans_up_keeps_its_row_until_it_has_ended(open_cortex: OpenCortex) -> None:
    """However often its task is cancelled meanwhile: two runs of one job at a time are worse than a wait."""
    cortex = open_cortex(HURRIED)
    began, cleaning, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handler(_ctx: JobContext, _payload: Note) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await may_end.wait()

    cortex.handler("note", payload=Note, llm_bound=True)(handler)
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))

    async def main() -> None:
        step = asyncio.create_task(cortex.run_once_async())
        await began.wait()
        step.cancel()
        await cleaning.wait()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await asyncio.to_thread(cortex.run_once)
        assert (cortex.get_job(job_id).status, cortex.llm_gate.available) == (JobStatus.RUNNING, 0)
        may_end.set()
        await asyncio.to_thread(until, lambda: cortex.get_job(job_id).status is not JobStatus.RUNNING)

    asyncio.run(main())
    job = cortex.get_job(job_id)
    assert (job.status, job.attempts, cortex.llm_gate.available) == (JobStatus.READY, 0, 1)
    assert_nothing_is_held(cortex)


@pytest.mark.parametrize("way", ["run_once", "drain", "run_sync", "run_once_async", "run", "a bare loop"])
def test_an_interrupt_inside_a_handler_gives_the_job_back(database_url: str, open_cortex: OpenCortex, way: str) -> None:
    """It is the user's wish to stop and no fault of the job, and the row is free before the program has ended."""
    cortex = open_cortex()
    with program(INTERRUPTED, database_url, way) as process:
        code, _out, err = outcome(process)
    assert (code, err) == (130, "")
    [job] = cortex.jobs.list_jobs(kind="note")
    assert (job.status, job.attempts) == (JobStatus.READY, 0)


# Loops that end


@pytest.mark.parametrize(("handler", "expected"), [("asynchronous", "ready 0 1"), ("in_a_thread", "done 1 1")])
def test_a_loop_that_is_closed_over_a_claim_holds_it_no_longer(
    database_url: str, cortex: Cortex, handler: str, expected: str
) -> None:
    """A handler on it will never go on, so its row is free; one in a thread does, and is settled at its end."""
    with program(CLOSES_ITS_LOOP, database_url, handler) as process:
        _code, out, err = outcome(process)
    assert out.split("\n")[0] == expected, err
    assert cortex.jobs.count_by_status()[JobStatus.RUNNING] == 0


def test_a_listener_whose_loop_is_closed_harms_no_producer(cortex: Cortex) -> None:
    """A program that closes its loop over a worker has ended that worker, and nothing else."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    with cortex._wakeup.listen(lambda: loop.call_soon_threadsafe(lambda: None)):
        assert cortex.enqueue(NewJob.of("note", Note())) is not None


def test_a_handler_that_stops_its_loop_stops_nobody_else(cortex: Cortex) -> None:
    """Its own job is done, and so is the next one."""

    async def stop_the_loop(_ctx: JobContext, _payload: Note) -> None:
        asyncio.get_running_loop().stop()

    cortex.handler("note", payload=Note)(stop_the_loop)
    cortex.enqueue_many(NewJob.of("note", Note()) for _ in range(3))
    assert cortex.drain_until_idle() == 3
    assert cortex.jobs.count_by_status()[JobStatus.DONE] == 3


def test_a_kept_result_is_renewed_by_nobody_once_its_loop_has_ended(
    open_cortex: OpenCortex, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker takes the row after its lease, instead of never."""
    cortex = open_cortex(HURRIED)
    ended = threading.Event()

    def refuse(*_arguments: Any, **_options: Any) -> bool:
        ended.set()
        raise StorageBusyError("busy")

    cortex.handler("note", payload=Note)(lambda _ctx, _payload: None)
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    monkeypatch.setattr(cortex.jobs, "mark_done", refuse)
    cortex.run_sync(ended, kinds=["note"])
    assert cortex.get_job(job_id).status is JobStatus.RUNNING
    assert not cortex._heartbeat._watched
    clock.advance(300_001)
    assert open_cortex().recover_stale_locks() == 1


def test_a_result_that_comes_after_its_worker_is_renewed_by_nobody(
    open_cortex: OpenCortex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that outlives the worker and meets a busy database leaves its row to its lease, and to a later step."""
    cortex = open_cortex(HURRIED)
    stop, may_end, refused = threading.Event(), threading.Event(), threading.Event()
    mark_done = cortex.jobs.mark_done

    def refuse(*_arguments: Any, **_options: Any) -> bool:
        refused.set()
        raise StorageBusyError("busy")

    def handler(_ctx: JobContext, _payload: Note) -> None:
        stop.set()
        assert may_end.wait(BOUND_S)

    cortex.handler("note", payload=Note)(handler)
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    monkeypatch.setattr(cortex.jobs, "mark_done", refuse)
    hurried = cortex.settings.worker.model_copy(update={"shutdown_grace_s": 0})
    cortex._worker.settings = hurried
    cortex.run_sync(stop, kinds=["note"])
    may_end.set()
    assert refused.wait(BOUND_S)
    until(lambda: cortex._turns.is_keeping and not cortex._heartbeat._watched)
    monkeypatch.setattr(cortex.jobs, "mark_done", mark_done)
    cortex.run_once()
    assert cortex.get_job(job_id).status is JobStatus.DONE


def test_a_close_beside_a_running_step_is_told(cortex: Cortex) -> None:
    """Whoever waits in another thread gets one clear error, and the job is given back."""
    started = threading.Event()
    errors: list[BaseException] = []

    async def wait(_ctx: JobContext, _payload: Note) -> None:
        started.set()
        await asyncio.wait_for(asyncio.Event().wait(), BOUND_S)

    def step() -> None:
        try:
            cortex.run_once()
        except BaseException as error:  # noqa: BLE001 - what it is is asserted
            errors.append(error)

    cortex.handler("note", payload=Note)(wait)
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    thread = threading.Thread(target=step)
    thread.start()
    assert started.wait(BOUND_S)
    cortex.close()
    thread.join(BOUND_S)
    assert [type(error) for error in errors] == [ConfigurationError]
    job = cortex.get_job(job_id)
    assert (job.status, job.attempts) == (JobStatus.READY, 0)


@pytest.mark.parametrize("_again", range(20))
def test_closes_and_steps_at_once_hang_nowhere(cortex: Cortex, _again: int) -> None:
    """A step that comes a moment before a close, or a moment after, ends."""
    cortex.handler("note", payload=Note)(lambda _ctx, _payload: None)
    cortex.enqueue_many(NewJob.of("note", Note()) for _ in range(5))

    def step() -> None:
        for _ in range(5):
            try:
                cortex.run_once()
            except TinycortexError:
                continue

    threads = [threading.Thread(target=step) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        cortex.close()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    cortex.drain_until_idle()
    assert cortex.jobs.count_by_status()[JobStatus.DONE] == 5


# Calls that would wait for themselves


@pytest.mark.parametrize("call", ["run_once", "drain_until_idle", "ensure_reembed_backfill", "run_sync", "close"])
def test_an_asynchronous_handler_that_would_wait_for_its_own_loop_is_told(cortex: Cortex, call: str) -> None:
    """Its attempt fails with a message that says what to do instead; nothing hangs."""

    async def handler(_ctx: JobContext, _payload: Note) -> None:
        getattr(cortex, call)()

    cortex.handler("note", payload=Note)(handler)
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    assert cortex.run_once()
    job = cortex.get_job(job_id)
    assert (job.status, job.attempts) == (JobStatus.READY, 1)
    assert "InvalidInputError" in str(job.last_error)


def test_plain_handlers_may_run_jobs_of_their_own(cortex: Cortex) -> None:
    """As deep as they like: each runs in a thread that no other call waits for."""

    def handler(_ctx: JobContext, _payload: Note) -> None:
        cortex.run_once()

    cortex.handler("note", payload=Note, timeout_s=BOUND_S)(handler)
    cortex.enqueue_many(NewJob.of("note", Note()) for _ in range(60))
    assert cortex.run_once()
    assert cortex.jobs.count_by_status()[JobStatus.DONE] == 60


def test_a_step_inside_a_transaction_is_refused(cortex: Cortex) -> None:
    """It would wait for the write lock that its caller holds; from a plan's own writes as well."""
    with pytest.raises(InvalidInputError, match="transaction is open"), cortex.transaction():
        cortex.run_once()

    def writes(_session: Session) -> None:
        cortex.run_once()

    cortex.handler("note", payload=Note)(lambda _ctx, _payload: Done(writes=writes))
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    assert cortex.run_once()
    assert "transaction is open" in str(cortex.get_job(job_id).last_error)


def test_a_subscriber_that_would_wait_for_its_own_thread_is_told(cortex: Cortex) -> None:
    """Its call is refused, and the queue goes on."""
    errors: list[BaseException] = []

    def subscriber(_event: object) -> None:
        try:
            cortex.run_once()
        except InvalidInputError as error:
            errors.append(error)

    cortex.handler("note", payload=Note)(lambda _ctx, _payload: None)
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    cortex.subscribe(subscriber)
    assert cortex.run_once()
    assert errors
    assert cortex.get_job(job_id).status is JobStatus.DONE


# Threads and time


def assert_all_run_at_once(cortex: Cortex, many: int) -> None:
    """So many jobs, in one worker with as many slots, are done at their first attempts."""
    stop = threading.Event()
    cortex.enqueue_many(NewJob.of("note", Note()) for _ in range(many))
    worker = threading.Thread(target=lambda: cortex.run_sync(stop, concurrency=many))
    worker.start()
    until(lambda: len(cortex.jobs.list_jobs(kind="note", status=JobStatus.DONE, limit=many)) == many)
    stop.set()
    worker.join(BOUND_S)
    assert not worker.is_alive()
    assert {job.attempts for job in cortex.jobs.list_jobs(kind="note", limit=many)} == {1}


def test_handlers_that_hold_connections_hold_up_no_worker(open_cortex: OpenCortex) -> None:
    """However many of them read for as long as they like, the others are claimed and settled."""
    many = 40
    cortex = open_cortex(HURRIED)
    barrier = threading.Barrier(many)

    def handler(_ctx: JobContext, _payload: Note) -> None:
        with cortex.database.reading() as session:
            session.connection()
            barrier.wait(BOUND_S)  # each holds its own before any returns

    cortex.handler("note", payload=Note)(handler)
    assert_all_run_at_once(cortex, many)


def test_a_timeout_does_not_count_the_wait_for_a_thread(open_cortex: OpenCortex) -> None:
    """However many plain handlers run, each has a thread at once."""
    many = 60
    cortex = open_cortex(HURRIED)
    barrier = threading.Barrier(many)

    def handler(_ctx: JobContext, _payload: Note) -> None:
        barrier.wait(BOUND_S)  # none returns before all have begun

    cortex.handler("note", payload=Note, timeout_s=BOUND_S / 2)(handler)
    assert_all_run_at_once(cortex, many)


def test_work_goes_on_while_the_main_thread_ends(cortex: Cortex, database_url: str) -> None:
    """A worker in a thread of its own keeps the process, and no attempt is burnt for the interpreter's sake."""
    with program(MAIN_ENDS, database_url) as process:
        assert outcome(process) == (0, "", "")
    jobs = cortex.jobs.list_jobs(kind="note")
    assert [(job.status, job.attempts, job.last_error) for job in jobs] == [(JobStatus.DONE, 1, None)] * 2


def test_a_process_ends_although_a_handler_does_not(cortex: Cortex, database_url: str) -> None:
    """A worker in a daemon thread holds up nobody's exit; its row is recovered at once."""
    with program(ENDS_AT_ONCE, database_url) as process:
        assert outcome(process)[0] == 0
    (job,) = cortex.jobs.list_jobs(kind="note")
    assert job.status is JobStatus.RUNNING
    assert cortex.recover_stale_locks() >= 1
    freed = cortex.get_job(job.id)
    assert (freed.status, freed.attempts) == (JobStatus.READY, 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_has_permits_of_its_own(cortex: Cortex, database_url: str) -> None:
    """A permit that the parent held at the fork neither blocks the child nor is given back by it."""
    with program(FORKED_WITH_A_PERMIT, database_url, PYTHONWARNINGS="ignore") as process:
        assert outcome(process) == (0, "", "")
    assert cortex.jobs.count_by_status()[JobStatus.DONE] == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_result_is_written_by_the_process_that_has_it(cortex: Cortex, database_url: str) -> None:
    """A child that was forked while its parent kept a result leaves it to the parent."""
    with program(FORKED_WITH_A_RESULT, database_url, PYTHONWARNINGS="ignore") as process:
        assert outcome(process) == (0, "written by parent\n", "")
    assert cortex.jobs.count_by_status()[JobStatus.DONE] == 1


# Errors that cannot be told apart from an end


class UnprintableError(Exception):
    """Its text ends the program."""

    def __str__(self) -> str:
        raise SystemExit(3)


@pytest.mark.parametrize("where", ["handler", "writes"])
@pytest.mark.parametrize("error", [UnprintableError(), KeyboardInterrupt(), SystemExit(3), StopIteration()])
def test_no_error_of_a_handler_ends_the_worker(cortex: Cortex, where: str, error: BaseException) -> None:
    """Raised by it or by its writes, it is a failed attempt."""

    def fail(*_arguments: object) -> None:
        raise error

    cortex.handler("note", payload=Note)(fail if where == "handler" else lambda _ctx, _payload: Done(writes=fail))
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    assert cortex.run_once()
    job = cortex.get_job(job_id)
    assert (job.status, job.attempts) == (JobStatus.READY, 1)
    assert type(error).__name__ in str(job.last_error)
