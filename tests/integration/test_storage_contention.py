"""Several writers and one file: they take turns, and nobody is told that it is locked unless it stays so."""

import asyncio
import logging
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.orm import Session

from background import outcome, program, until, working
from tinycortex import Cortex, Database, Done, JobContext, JobStatus, NewJob, Settings, StorageBusyError, schema
from tinycortex.config import DatabaseSettings, WorkerSettings
from tinycortex.dialects.sqlite import database_path
from tinycortex.testing import FakeDelegates, JobRowFactory, ManualClock, NewJobFactory, insert_rows

OpenCortex = Callable[..., Cortex]

IMPATIENT = Settings(
    database=DatabaseSettings(busy_timeout_ms=50), worker=WorkerSettings(idle_ms=5, busy_ms=5, recover_ms=0)
)

PRODUCE = """
import sys
from tinycortex import Cortex, NewJob

url, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with Cortex.open(url) as cortex:
    for number in range(first, last):
        assert cortex.enqueue(NewJob(kind="note", payload_json=f'{{"number": {number}}}', dedupe_key=f"note:{number}"))
"""

WORK = """
import sys, threading
from pydantic import BaseModel
from tinycortex import Cortex, Settings
from tinycortex.config import WorkerSettings

class Note(BaseModel):
    number: int

stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
with Cortex.open(sys.argv[1], settings=Settings(worker=WorkerSettings(idle_ms=5))) as cortex:
    cortex.handler("note", payload=Note)(lambda ctx, payload: print(f"{payload.number}\\n", end=""))
    cortex.run_sync(stop)
"""


class Note(BaseModel):
    text: str = ""


@pytest.fixture
def hold(database_url: str) -> Iterator[sqlite3.Connection]:
    """A connection of another program, for holding the write lock."""
    path = database_url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as connection:
        yield connection


def watch_faults(cortex: Cortex) -> list[object]:
    """Return the faults that a queue's database meets from now on, as a list that grows."""
    met: list[object] = []
    event.listen(cortex.database.engine, "handle_error", met.append)
    return met


def test_four_workers_and_four_producers_share_one_file(cortex: Cortex, database_url: str) -> None:
    """No process is told that the file is locked, each job runs once, and no attempt is burnt."""
    with ExitStack() as processes:
        workers = [processes.enter_context(program(WORK, database_url)) for _ in range(4)]
        producers = [
            processes.enter_context(program(PRODUCE, database_url, str(first), str(first + 150)))
            for first in range(0, 600, 150)
        ]
        assert [outcome(producer) for producer in producers] == [(0, "", "")] * 4
        until(lambda: not cortex.jobs.list_jobs(status=JobStatus.READY, kind="note", limit=1))
        outcomes = [outcome(worker) for worker in workers]  # the end of their input stops them
    assert [(code, err) for code, _out, err in outcomes] == [(0, "")] * 4
    assert sorted(int(number) for _code, out, _err in outcomes for number in out.split()) == list(range(600))
    jobs = cortex.jobs.list_jobs(kind="note", limit=1_000)
    assert {(job.status, job.attempts, job.claim_token) for job in jobs} == {(JobStatus.DONE, 1, 1)}
    assert len(jobs) == 600


def test_whatever_writes_begins_as_a_writer(empty_database_url: str, clock: ManualClock) -> None:
    """A reader that turns into a writer fails at once when another one wrote in between, however long it may wait."""
    begun: dict[int, str] = {}
    writes: set[tuple[str | None, str]] = set()

    def executing(connection: Connection, _cursor: object, statement: str, *_rest: Any) -> None:
        words = statement.split()
        if words[0] == "BEGIN":
            begun[id(connection.connection.dbapi_connection)] = statement
        elif re.search(r"\b(INSERT|UPDATE|DELETE|REPLACE|CREATE|ALTER|DROP)\b", statement):
            writes.add((begun.get(id(connection.connection.dbapi_connection)), words[0]))

    def ended(connection: Connection) -> None:
        begun.pop(id(connection.connection.dbapi_connection), None)

    listeners: list[tuple[str, Callable[..., None]]] = [
        ("before_cursor_execute", executing),
        ("commit", ended),
        ("rollback", ended),
    ]
    for name, listener in listeners:
        event.listen(Engine, name, listener)
    try:
        schema.upgrade(empty_database_url)
        with Cortex.open(empty_database_url, clock=clock) as cortex:
            do_everything(cortex)
    finally:
        for name, listener in listeners:
            event.remove(Engine, name, listener)
    assert {verb for _begin, verb in writes} >= {"INSERT", "UPDATE", "DELETE", "CREATE", "ALTER"}
    assert {begin for begin, _verb in writes} == {"BEGIN IMMEDIATE"}


def do_everything(cortex: Cortex) -> None:
    cortex.handler("note", payload=Note)(lambda _ctx, _payload: Done(follow_ups=[NewJobFactory.build()]))
    cortex.enqueue(NewJob.of("note", Note()))
    insert_rows(
        cortex.database,
        JobRowFactory.build(kind="digest_daily"),
        JobRowFactory.build(expired=True),
        JobRowFactory.build(failed_transient=True),
    )
    cortex.ingestor.ingest_text("chat", "room", "Ada asked Grace for the figures.\n", timestamp_ms=1)
    cortex.bootstrap()
    cortex.tick()
    cortex.drain_until_idle()
    cortex.cancel(str(cortex.enqueue(NewJobFactory.build())))
    cortex.jobs.claim_next()
    cortex.release_running_locks()
    cortex.retry_all_failed()
    cortex.purge(0)
    cortex.ensure_reembed_backfill()


@pytest.mark.parametrize("way", ["run_sync", "run"])
def test_a_worker_outlasts_a_lock_that_is_held_too_long(
    open_cortex: OpenCortex,
    hold: sqlite3.Connection,
    caplog: pytest.LogCaptureFixture,
    way: str,
) -> None:
    """Held from before its start, the lock is waited for, told of once, and forgotten; no attempt is burnt."""
    cortex = open_cortex(IMPATIENT)
    job_id = str(cortex.enqueue(NewJobFactory.build()))
    met = watch_faults(cortex)
    hold.execute("BEGIN IMMEDIATE")
    with working(cortex, way):
        until(lambda: len(met) >= 5)
        with pytest.raises(StorageBusyError, match=r"chunks\.db"):
            cortex.enqueue(NewJobFactory.build())
        hold.execute("ROLLBACK")
        until(lambda: cortex.get_job(job_id).status is JobStatus.DONE)
    assert cortex.get_job(job_id).attempts == 1
    assert [(record.levelno, record.exc_info) for record in caplog.records] == [(logging.WARNING, None)]


@pytest.mark.parametrize("way", ["run_sync", "run"])
def test_a_worker_goes_on_after_a_lock(open_cortex: OpenCortex, hold: sqlite3.Connection, way: str) -> None:
    """One that was at work already takes up the next job after the lock is let go."""
    cortex = open_cortex(IMPATIENT)
    met = watch_faults(cortex)
    job_ids: list[str] = []
    with working(cortex, way):
        for _ in range(2):
            job_ids.append(str(cortex.enqueue(NewJobFactory.build())))
            until(lambda: cortex.get_job(job_ids[-1]).status is JobStatus.DONE)
            met.clear()
            hold.execute("BEGIN IMMEDIATE")
            until(lambda: met)
            hold.execute("ROLLBACK")
    assert {(job.status, job.attempts) for job in map(cortex.get_job, job_ids)} == {(JobStatus.DONE, 1)}


@pytest.mark.parametrize("way", ["run_sync", "run"])
def test_a_result_outlasts_a_lock(open_cortex: OpenCortex, hold: sqlite3.Connection, way: str) -> None:
    """A job whose settlement met the lock is not run again: its result waits."""
    cortex = open_cortex(IMPATIENT)
    met = watch_faults(cortex)
    ran: list[object] = []

    def note(ctx: object, _payload: Note) -> None:
        ran.append(ctx)
        hold.execute("BEGIN IMMEDIATE")

    cortex.handler("note", payload=Note)(note)
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    with working(cortex, way):
        until(lambda: len(met) >= 3)
        assert cortex.get_job(job_id).status is JobStatus.RUNNING
        hold.execute("ROLLBACK")
        until(lambda: cortex.get_job(job_id).status is JobStatus.DONE)
    assert (len(ran), cortex.get_job(job_id).attempts) == (1, 1)


@pytest.mark.parametrize("way", ["run_sync", "run"])
@pytest.mark.parametrize("busy_times", [0, 5])
def test_there_is_no_worker_without_its_scheduler(
    open_cortex: OpenCortex, monkeypatch: pytest.MonkeyPatch, way: str, busy_times: int
) -> None:
    """A tick that meets a busy database is tried again until it is done; any other error ends the loop."""
    cortex = open_cortex(IMPATIENT, delegates=FakeDelegates())
    faults: list[Exception] = [StorageBusyError("busy") for _ in range(busy_times)]
    enqueue_flush = cortex._maintenance.enqueue_flush_stale

    def failing(max_age_secs: int) -> str | None:
        if faults:
            raise faults.pop()
        return enqueue_flush(max_age_secs)

    monkeypatch.setattr(cortex._maintenance, "enqueue_flush_stale", failing)
    if busy_times:
        with working(cortex, way):
            until(lambda: cortex.jobs.list_jobs(kind="flush_stale", status=JobStatus.DONE))
        assert faults == []
    else:
        faults.append(RuntimeError("broken"))
        with pytest.raises(RuntimeError, match="broken"), working(cortex, way) as worker:
            assert worker.ended.wait(60)


def test_results_with_writes_wait_for_a_lock_together(open_cortex: OpenCortex, hold: sqlite3.Connection) -> None:
    """Eight that end together, each with a transaction of its own, do not wait out the busy timeout one by one."""
    cortex = open_cortex(IMPATIENT)
    begun: list[asyncio.Event] = []

    async def note(_ctx: JobContext, _payload: Note) -> Done:
        begun.append(asyncio.Event())
        if len(begun) == 8:
            hold.execute("BEGIN IMMEDIATE")
            begun[0].set()
        await begun[0].wait()
        return Done(writes=lambda _session: None)

    async def main() -> list[object]:
        return list(await asyncio.gather(*(cortex.run_once_async() for _ in range(8)), return_exceptions=True))

    cortex.handler("note", payload=Note)(note)
    cortex.enqueue_many(NewJob.of("note", Note()) for _ in range(8))
    faults = watch_faults(cortex)
    assert {type(ended) for ended in asyncio.run(main())} == {StorageBusyError}
    assert len(faults) < 8
    hold.execute("ROLLBACK")
    assert not cortex.run_once()
    assert len(cortex.jobs.list_jobs(kind="note", status=JobStatus.DONE)) == 8


def patience_of(session: Session) -> object:
    """Return for how many milliseconds SQLite itself would wait for a lock."""
    return session.execute(text("PRAGMA busy_timeout")).scalar()


def test_a_reader_is_patient_after_a_writer(database_url: str) -> None:
    """Both use one connection; the writer does the waiting itself, and a reader may need SQLite's, for a recovery."""
    database = Database(DatabaseSettings(url=database_url, busy_timeout_ms=1234))
    for _ in range(2):
        with database.transaction() as session:
            assert patience_of(session) == 0
        with database.reading() as session:
            assert patience_of(session) == 1234
    database.dispose()


def test_a_writer_without_a_log_is_patient(database_url: str) -> None:
    """Its commit has to wait until nobody reads."""
    database = Database(DatabaseSettings(url=database_url, busy_timeout_ms=1234, journal_mode="truncate"))
    for _ in range(2):
        with database.transaction() as session:
            assert patience_of(session) == 1234
    database.dispose()


# The pages and the write-ahead log


def page_bytes(database_url: str) -> int:
    with closing(sqlite3.connect(database_path(database_url))) as connection:
        return int(connection.execute("PRAGMA page_size").fetchone()[0])


def test_a_new_file_has_small_pages(cortex: Cortex, database_url: str) -> None:
    """Each job writes a page of its own in the index of the keys."""
    cortex.enqueue(NewJobFactory.build())
    assert page_bytes(database_url) == 1024


def test_a_file_keeps_the_pages_that_it_has(tmp_path: Path) -> None:
    """It is upgraded and used as it is, be it of an earlier version or of a program that has tables of its own."""
    url = f"sqlite:///{tmp_path / 'theirs.db'}"
    with closing(sqlite3.connect(tmp_path / "theirs.db")) as connection:
        connection.execute("PRAGMA page_size=8192")
        connection.execute("CREATE TABLE theirs (number INTEGER)")
    schema.upgrade(url)
    with Cortex.open(url) as cortex:
        assert cortex.enqueue(NewJobFactory.build()) is not None
    assert page_bytes(url) == 8192


def test_the_log_of_a_large_transaction_does_not_stay(cortex: Cortex, database_url: str) -> None:
    """The next writes take its room back, whoever is still connected."""
    log = database_path(database_url).with_name(f"{database_path(database_url).name}-wal")
    cortex.enqueue_many(NewJobFactory.build_batch(48_000))
    assert log.stat().st_size > 17 * 1024 * 1024
    for job in NewJobFactory.build_batch(2):
        cortex.enqueue(job)
    assert log.stat().st_size <= 16 * 1024 * 1024
