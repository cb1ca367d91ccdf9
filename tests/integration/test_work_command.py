"""`tinycortex work` and `tinycortex scheduler` as a supervisor meets them: options, signals, exit codes."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from background import BOUND_S, outcome, program, until
from tinycortex import Cortex, Job, JobStatus, NewJob, Settings, StorageBusyError, StorageCorruptError
from tinycortex.config import SchedulerSettings, WorkerSettings
from tinycortex.testing import JobRowFactory, insert_rows

OpenCortex = Callable[..., Cortex]
Run = Callable[..., tuple[int, str, str]]

SOON_S = 2.0
"""A second signal ends the process within this."""

# The command with kinds of a program's own; everything else is the real thing.
COMMAND = """
import asyncio, os, signal, sys, time
from pydantic import BaseModel
from tinycortex.cli import main, work
from tinycortex.cli.opening import open_cortex

class Note(BaseModel):
    text: str = ""

def open_with_handlers(*arguments):
    cortex = open_cortex(*arguments)
    for name in ("purge_retired_jobs", "recover_stale_locks"):  # what a worker and a tick write first
        def tell(write=getattr(cortex.jobs, name)):
            print("writes", flush=True)
            return write()
        setattr(cortex.jobs, name, tell)

    @cortex.handler("told", payload=Note)
    async def told(ctx, payload):
        print("told", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

    @cortex.handler("endless", payload=Note)
    async def endless(ctx, payload):
        print("endless", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            print("cancelled", flush=True)

    @cortex.handler("stuck", payload=Note)
    def stuck(ctx, payload):
        print("stuck", flush=True)
        time.sleep(600)

    @cortex.handler("forks", payload=Note)
    def forks(ctx, payload):
        child = os.fork()
        if child == 0:
            time.sleep(600)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

    cortex.handler("quick", payload=Note)(lambda ctx, payload: None)
    return cortex

work.open_cortex = open_with_handlers
main()
"""


def enqueue(cortex: Cortex, kind: str, *, due_at_ms: int = 0) -> str:
    return str(cortex.enqueue(NewJob(kind=kind, payload_json="{}", available_at_ms=due_at_ms)))


def read_until(stream: object, word: str) -> None:
    while word not in (line := stream.readline()):  # type: ignore[attr-defined]
        assert line, f"it ended without {word!r}"


def job_of(cortex: Cortex, job_id: str, status: JobStatus) -> Job:
    """Return the job once it is in ``status``."""
    until(lambda: cortex.get_job(job_id).status is status)
    return cortex.get_job(job_id)


def stop(process: "subprocess.Popen[str]", number: int = signal.SIGTERM) -> None:
    """Send the first signal, and wait until it has arrived."""
    process.send_signal(number)
    read_until(process.stderr, "stopping")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("options", [["--concurrency", "1"], ["--drain"]], ids=["loop", "drain"])
def test_a_first_signal_lets_the_running_job_end(
    cortex: Cortex, database_url: str, number: int, options: list[str]
) -> None:
    """What runs is finished, what waits is left, and the exit code is 0."""
    running, waiting = enqueue(cortex, "told"), enqueue(cortex, "told", due_at_ms=1)
    with program(COMMAND, "--database-url", database_url, "work", *options, "--kinds", "told") as process:
        assert process.stdin is not None
        read_until(process.stdout, "told")
        stop(process, number)
        process.stdin.write("go on\n")
        assert outcome(process)[0] == 0
    assert (cortex.get_job(running).status, cortex.get_job(running).attempts) == (JobStatus.DONE, 1)
    assert (cortex.get_job(waiting).status, cortex.get_job(waiting).attempts) == (JobStatus.READY, 0)


@pytest.mark.parametrize("kind", ["endless", "stuck"])
@pytest.mark.parametrize("options", [[], ["--drain"]], ids=["loop", "drain"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(
    cortex: Cortex, database_url: str, kind: str, options: list[str], number: int
) -> None:
    """Whatever runs is left to its lease, and the exit code says which signal it was."""
    running = enqueue(cortex, kind)
    with program(COMMAND, "--database-url", database_url, "work", *options, "--kinds", kind) as process:
        read_until(process.stdout, kind)
        stop(process, number)
        process.send_signal(number)
        assert process.wait(SOON_S) == 128 + number
    job = cortex.get_job(running)
    assert (job.status, job.attempts) == (JobStatus.RUNNING, 1)


@pytest.mark.parametrize("command", [["work"], ["work", "--drain"], ["scheduler"]])
def test_a_locked_database_does_not_hold_the_second_signal_up(
    database_url: str, tmp_path: Path, command: list[str]
) -> None:
    """Not even where the main thread itself waits for the lock."""
    lock = sqlite3.connect(tmp_path / "chunks.db", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    with program(COMMAND, "--database-url", database_url, *command) as process:
        read_until(process.stdout, "writes")
        began = time.monotonic()

        def ended() -> bool:
            process.send_signal(signal.SIGTERM)  # again and again, since two that come at once are one
            return process.poll() is not None

        until(ended)
        assert time.monotonic() - began < SOON_S
        assert process.returncode == 128 + signal.SIGTERM
    lock.close()


@pytest.mark.parametrize("options", [[], ["--drain"]], ids=["loop", "drain"])
def test_past_the_grace_an_asynchronous_handler_is_cancelled(
    cortex: Cortex, database_url: str, options: list[str]
) -> None:
    """Its row is ready for another worker, with its attempt given back."""
    running = enqueue(cortex, "endless")
    with program(
        COMMAND,
        *("--database-url", database_url, "work", *options, "--kinds", "endless"),
        TINYCORTEX_WORKER__SHUTDOWN_GRACE_S="0.05",
    ) as process:
        read_until(process.stdout, "endless")
        stop(process)
        code, out, _err = outcome(process)
    assert (code, "cancelled" in out) == (0, True)
    job = cortex.get_job(running)
    assert (job.status, job.attempts, job.locked_by) == (JobStatus.READY, 0, None)


@pytest.mark.parametrize("options", [[], ["--drain"]], ids=["loop", "drain"])
def test_past_the_grace_a_plain_handler_does_not_keep_the_process(
    cortex: Cortex, database_url: str, options: list[str]
) -> None:
    """Nothing joins its thread: the process ends by itself with 0, and the row is left to its lease."""
    running = enqueue(cortex, "stuck")
    with program(
        COMMAND,
        *("--database-url", database_url, "work", *options, "--kinds", "stuck"),
        TINYCORTEX_WORKER__SHUTDOWN_GRACE_S="0.05",
    ) as process:
        read_until(process.stdout, "stuck")
        stop(process)
        assert outcome(process)[0] == 0
    assert (cortex.get_job(running).status, cortex.get_job(running).attempts) == (JobStatus.RUNNING, 1)


def test_a_forked_child_is_its_own(cortex: Cortex, database_url: str) -> None:
    """A handler's child dies of the signal that it is sent, and the worker does not take it for its own."""
    enqueue(cortex, "forks")
    with program(COMMAND, "--database-url", database_url, "work", "--kinds", "forks,quick") as process:
        read_until(process.stdout, str(-signal.SIGTERM))
        job_of(cortex, enqueue(cortex, "quick"), JobStatus.DONE)
        stop(process)
        assert outcome(process)[0] == 0


@pytest.mark.parametrize("options", [[], ["--drain"]], ids=["loop", "drain"])
def test_only_the_kinds_that_were_asked_for_are_run(cortex: Cortex, database_url: str, options: list[str]) -> None:
    """An older job of another kind waits."""
    other, wanted = enqueue(cortex, "stuck"), enqueue(cortex, "quick", due_at_ms=1)
    with program(COMMAND, "--database-url", database_url, "work", "--kinds", "told, quick", *options) as process:
        job_of(cortex, wanted, JobStatus.DONE)
        if not options:
            stop(process)
        assert outcome(process)[0] == 0
    assert (cortex.get_job(other).status, cortex.get_job(other).attempts) == (JobStatus.READY, 0)


def test_without_the_scheduler_leases_are_still_recovered(cortex: Cortex, database_url: str) -> None:
    """At the start and later on; only the tick's work, such as the flush, is left to others."""
    first = JobRowFactory.build(id="first", kind="quick", expired=True)
    insert_rows(cortex.database, first)
    with program(
        COMMAND, "--database-url", database_url, "work", "--no-scheduler", TINYCORTEX_WORKER__RECOVER_MS="5"
    ) as process:
        job_of(cortex, "first", JobStatus.DONE)
        insert_rows(cortex.database, JobRowFactory.build(id="second", kind="quick", expired=True))
        job_of(cortex, "second", JobStatus.DONE)
        stop(process)
        assert outcome(process)[0] == 0
    assert cortex.jobs.list_jobs(kind="flush_stale") == []


def test_the_scheduler_alone_ticks_and_stops(cortex: Cortex, database_url: str) -> None:
    """It enqueues the flush again and again as it is due, runs nothing, and ends with 0."""
    with program(COMMAND, "--database-url", database_url, "scheduler", TINYCORTEX_SCHEDULER__TICK_S="1") as process:
        until(lambda: cortex.jobs.list_jobs(kind="flush_stale"))
        with cortex.transaction() as session:
            session.connection().exec_driver_sql("DELETE FROM mem_tree_jobs")
        until(lambda: cortex.jobs.list_jobs(kind="flush_stale"))
        stop(process)
        assert outcome(process)[0] == 0
    (flush,) = cortex.jobs.list_jobs(kind="flush_stale")
    assert (flush.status, flush.attempts) == (JobStatus.READY, 0)


def test_the_scheduler_waits_a_storage_fault_out(open_cortex: OpenCortex, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick that the database stopped is tried again after the fault's pause, not after an interval."""
    cortex = open_cortex(Settings(worker=WorkerSettings(busy_ms=5), scheduler=SchedulerSettings(tick_s=3_600)))
    faults = [StorageBusyError("hidden") for _ in range(2)]
    done = threading.Event()

    def heal() -> object:
        if faults:
            raise faults.pop()
        done.set()
        return type(cortex.jobs).self_heal(cortex.jobs)

    monkeypatch.setattr(cortex.jobs, "self_heal", heal)
    stopping = threading.Event()
    thread = threading.Thread(target=cortex.run_scheduler, args=(stopping,))
    thread.start()
    assert done.wait(BOUND_S)
    stopping.set()
    thread.join(BOUND_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [StorageCorruptError("damaged"), ZeroDivisionError("hidden")])
@pytest.mark.parametrize("command", ["scheduler", "work"])
def test_what_waiting_cannot_help_ends_it_with_1(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, command: str
) -> None:
    """A damaged database or an unexpected error is one line."""

    def tick(_scheduler: object) -> None:
        raise error

    monkeypatch.setattr("tinycortex.scheduler.Scheduler.tick", tick)
    code, out, err = run(command)
    announced, told = err.splitlines()
    assert (code, out, "stop with Ctrl-C" in announced, str(error) in told) == (1, "", True, True)


@pytest.mark.parametrize("way", ["option", "setting"])
def test_a_worker_has_the_name_that_it_was_given(cortex: Cortex, database_url: str, way: str) -> None:
    """It stands in ``locked_by``, and a nonce after it keeps two of one name apart."""
    running = enqueue(cortex, "endless")
    options = ["--worker-id", "blue"] if way == "option" else []
    setting = "red" if way == "option" else "blue"
    with program(COMMAND, "--database-url", database_url, "work", *options, TINYCORTEX_WORKER__ID=setting) as process:
        read_until(process.stdout, "endless")
        name, nonce = str(cortex.get_job(running).locked_by).split(":")
        assert (name, len(nonce)) == ("blue", 16)


@pytest.mark.parametrize(
    "options",
    [
        ["--kinds", "seal,nope"],
        ["--kinds", ""],
        ["--kinds", "seal,"],
        ["--worker-id", "two words"],
        ["--worker-id", ""],
        ["--worker-id", "x" * 65],
        ["--worker-id", "a\tb"],
        ["--drain", "--concurrency", "2"],
    ],
)
def test_a_wrong_option_is_one_line_and_2(run: Run, options: list[str]) -> None:
    """The line names the option."""
    code, out, err = run("work", *options)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert options[0] in err


@pytest.mark.parametrize(
    "arguments", [["work", "--concurrency", "0"], ["work", "--concurrency", "x"], ["scheduler", "x"]]
)
def test_wrong_usage_is_2(run: Run, arguments: list[str]) -> None:
    """As everywhere in the command line."""
    assert run(*arguments)[0] == 2


@pytest.mark.parametrize("way", ["run_sync", "run", "run_scheduler"])
def test_a_programs_own_handlers_of_signals_stay(cortex: Cortex, way: str) -> None:
    """The library installs none: a program's handler is there while a worker runs, and gets the signal."""
    got: list[int] = []
    stopping, stopping_async = threading.Event(), asyncio.Event()

    def handler(number: int, _frame: object) -> None:
        got.append(number)
        stopping.set()
        stopping_async.set()

    earlier = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    installed: list[object] = []

    def interrupt() -> None:
        until(lambda: cortex.jobs.list_jobs(kind="flush_stale"))
        installed.extend(signal.getsignal(number) for number in earlier)
        os.kill(os.getpid(), signal.SIGTERM)  # to the process, as from outside

    helper = threading.Thread(target=interrupt)
    helper.start()
    try:
        if way == "run":
            asyncio.run(cortex.run(stopping_async))
        else:
            getattr(cortex, way)(stopping)
        assert [signal.getsignal(number) for number in earlier] == [handler, handler] == installed
    finally:
        helper.join(BOUND_S)
        for number, old in earlier.items():
            signal.signal(number, old)
    assert got == [signal.SIGTERM]
