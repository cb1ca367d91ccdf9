"""Workers that die at work: what they held is run by others, as often as its budget allows and no more."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from pydantic import BaseModel

from background import outcome, program, until, working
from tinycortex import Cortex, JobStatus, NewJob, Settings
from tinycortex.config import SchedulerSettings, WorkerSettings
from tinycortex.testing import JobRowFactory, insert_rows

OpenCortex = Callable[..., Cortex]

RARELY_S = 3_600

RUN = """
import os, sys, threading, time
from pydantic import BaseModel
from tinycortex import Cortex

class Note(BaseModel):
    text: str = ""

with Cortex.open(sys.argv[1]) as cortex:
    @cortex.handler("hang", payload=Note)
    def hang(ctx, payload):
        print("hang", flush=True)
        time.sleep(600)

    @cortex.handler("deadly", payload=Note)
    def deadly(ctx, payload):
        print("deadly", flush=True)
        os._exit(137)

    @cortex.handler("note", payload=Note)
    def note(ctx, payload):
        print("note", flush=True)

    cortex.bootstrap()
    cortex.drain_until_idle()
"""


CLAIM_AND_WAIT = """
import sys, time
from pydantic import BaseModel
from tinycortex import Cortex

cortex = Cortex.open(sys.argv[1])

@cortex.handler("hang", payload=type("Hang", (BaseModel,), {}))
def hang(ctx, payload):
    print("claimed", flush=True)
    time.sleep(600)

cortex.run_once()
"""


WORK_UNTIL_TOLD = """
import asyncio, sys
from pydantic import BaseModel
from tinycortex import Cortex
from tinycortex.cli.signals import stopped_by_signals

with stopped_by_signals() as stop, Cortex.open(sys.argv[1]) as cortex:
    @cortex.handler("note", payload=type("Note", (BaseModel,), {}))
    async def note(ctx, payload):
        print("started", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        while not stop.is_set():
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.2)  # what the signal has set reaches the worker through another thread

    cortex.run_sync(stop)
"""


class Note(BaseModel):
    text: str = ""


@pytest.mark.parametrize("way", ["run_sync", "run"])
def test_a_killed_workers_job_is_run_by_one_that_is_at_work(
    open_cortex: OpenCortex, database_url: str, way: str
) -> None:
    """Neither a restart nor a tick nor the end of the lease is waited for, and the job runs once more."""
    cortex = open_cortex(
        Settings(worker=WorkerSettings(idle_ms=5, recover_ms=5), scheduler=SchedulerSettings(tick_s=RARELY_S))
    )
    ran: list[int] = []
    cortex.handler("hang", payload=Note)(lambda ctx, _payload: ran.append(ctx.job.attempts))
    job_id = str(cortex.enqueue(NewJob(kind="hang", payload_json="{}", available_at_ms=0)))
    with program(RUN, database_url) as doomed:
        assert doomed.stdout is not None
        assert doomed.stdout.readline() == "hang\n"
        with working(cortex, way):
            until(lambda: cortex.jobs.list_jobs(kind="flush_stale", status=JobStatus.DONE))
            assert ran == []
            doomed.send_signal(signal.SIGKILL)
            until(lambda: cortex.get_job(job_id).status is JobStatus.DONE)
    assert ran == [2]
    assert cortex.get_job(job_id).claim_token == 2


def test_a_job_that_kills_its_worker_stops_at_its_budget(cortex: Cortex, database_url: str) -> None:
    """A supervisor restarts the worker again and again: three runs, then the job says why, and the others get on."""
    deadly = str(cortex.enqueue(NewJob(kind="deadly", payload_json="{}", max_attempts=3, available_at_ms=0)))
    note = str(cortex.enqueue(NewJob(kind="note", payload_json="{}", available_at_ms=1)))
    ends: list[tuple[int, str, str]] = []
    for _ in range(6):
        with program(RUN, database_url) as worker:
            ends.append(outcome(worker))
    job = cortex.get_job(deadly)
    assert [code for code, _out, _err in ends] == [137, 137, 137, 0, 0, 0]
    assert "".join(out for _code, out, _err in ends).count("deadly") == 3
    assert (job.status, job.attempts, job.failure_reason) == (JobStatus.FAILED, 3, "lease_expired")
    assert (cortex.get_job(note).status, cortex.get_job(note).attempts) == (JobStatus.DONE, 1)


def test_a_worker_told_to_stop_ends_the_job_that_it_runs(cortex: Cortex, database_url: str) -> None:
    """A deploy is no failed attempt: what runs is finished, what waits is left, and the worker ends with 0."""
    cortex.enqueue_many(NewJob(kind="note", payload_json="{}", available_at_ms=0) for _ in range(2))
    with program(WORK_UNTIL_TOLD, database_url, TINYCORTEX_WORKER__CONCURRENCY="1") as worker:
        assert worker.stdout is not None
        assert worker.stdin is not None
        assert worker.stdout.readline() == "started\n"
        worker.send_signal(signal.SIGTERM)
        worker.stdin.write("go on\n")
        assert outcome(worker)[:2] == (0, "")
    jobs = cortex.jobs.list_jobs(kind="note")
    assert sorted((job.status, job.attempts, job.last_error) for job in jobs) == [
        (JobStatus.DONE, 1, None),
        (JobStatus.READY, 0, None),
    ]


def test_a_killed_workers_rows_are_freed_at_once(cortex: Cortex, database_url: str) -> None:
    """With its process gone, a row does not wait for its lease; the attempt stays burnt."""
    insert_rows(cortex.database, JobRowFactory.build(id="j", kind="hang", payload_json="{}", available_at_ms=0))
    worker = subprocess.Popen(
        [sys.executable, "-c", CLAIM_AND_WAIT, database_url], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "claimed\n"
        assert cortex.recover_stale_locks() == 0
        worker.send_signal(signal.SIGKILL)
    finally:
        worker.kill()
        worker.communicate()
    assert cortex.recover_stale_locks() == 1
    job = cortex.get_job("j")
    assert (job.status, job.attempts, job.locked_by) == (JobStatus.READY, 1, None)
