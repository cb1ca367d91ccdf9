"""A database that is damaged, full, gone or refused: said once and clearly, and nothing is lost by it."""

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from background import BOUND_S, Worker, program, until, working
from tinycortex import (
    Cortex,
    Done,
    JobStatus,
    NewJob,
    Settings,
    StorageCorruptError,
    StorageFullError,
    StorageUnavailableError,
)
from tinycortex.config import DatabaseSettings, WorkerSettings
from tinycortex.dialects.sqlite import _set_journal
from tinycortex.errors import TransactionEndedError
from tinycortex.testing import ChunkRowFactory, NewJobFactory, insert_rows

OpenCortex = Callable[..., Cortex]

LONG_MS = 3_600_000

HURRIED = WorkerSettings(idle_ms=5, busy_ms=5, recover_ms=LONG_MS)

# A kill leaves the write-ahead log behind.
ENQUEUE_AND_DIE = """
import os, sys
from tinycortex import Cortex
from tinycortex.errors import TransactionEndedError
from tinycortex.testing import ChunkRowFactory, NewJobFactory, insert_rows

cortex = Cortex.open(sys.argv[1])
cortex.enqueue(NewJobFactory.build())
os._exit(9)
"""


class Note(BaseModel):
    text: str = ""


@pytest.fixture
def path(database_url: str) -> Path:
    return Path(database_url.removeprefix("sqlite:///"))


def damage(path: Path) -> None:
    """Overwrite the page that every claim reads, and have open connections look at the file again."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE bystander (id INTEGER)")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
        select_root = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        (page,) = connection.execute(select_root, ["idx_mem_tree_jobs_claim"]).fetchone()
        with path.open("r+b") as file:
            file.seek((page - 1) * page_size)
            file.write(b"\xff" * page_size)
        connection.execute("INSERT INTO bystander VALUES (1)")


def files(path: Path) -> dict[str, bytes]:
    """Return the bytes of everything beside the database that is no shared memory and no lock."""
    return {
        file.name: file.read_bytes() for file in path.parent.iterdir() if file.is_file() and "-shm" not in file.name
    }


def run_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tinycortex", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=BOUND_S)


# Damaged


@pytest.mark.parametrize("way", ["run_sync", "run"])
def test_damage_under_a_worker_ends_it_and_changes_nothing(open_cortex: OpenCortex, path: Path, way: str) -> None:
    """The error names the file, and file and log stay byte for byte what they were, the close included."""
    cortex = open_cortex(Settings(worker=HURRIED))
    worker = Worker(cortex, way)
    until(lambda: cortex.jobs.list_jobs(status=JobStatus.DONE))  # the first tick's flush
    damage(path)
    before = files(path)
    assert worker.ended.wait(BOUND_S)
    assert isinstance(worker.error, StorageCorruptError)
    assert "chunks.db" in str(worker.error)
    cortex.close()
    assert files(path) == before
    assert set(before) == {path.name, f"{path.name}-wal"}


@pytest.mark.parametrize(
    ("what", "command"),
    [("a page", ["work"]), ("the head", ["work"]), ("a page", ["status"]), ("the head", ["db", "upgrade"])],
)
def test_a_damaged_file_is_one_line_and_stays_as_it_is(
    database_url: str, path: Path, what: str, command: list[str]
) -> None:
    """Every command names it and fails; nothing repairs, renames or tidies it."""
    with program(ENQUEUE_AND_DIE, database_url) as killed:
        assert killed.wait(BOUND_S) == 9
    with path.open("r+b") as file:
        file.seek(0 if what == "the head" else 4096)
        file.write(b"\xff" * 4096 * (1 if what == "the head" else 60))
    before = files(path)
    done = run_command("--database-url", database_url, *command, cwd=path.parent)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert "chunks.db" in done.stderr
    assert files(path) == before


# Full


def limit_room(cortex: Cortex) -> Callable[[bool], None]:
    """Return a function that says whether the database may grow, on every connection opened from then on."""
    most_pages = [1_000_000]

    @event.listens_for(cortex.database.engine, "connect")
    def _limit(connection: sqlite3.Connection, _record: object) -> None:
        connection.execute(f"PRAGMA max_page_count={most_pages[0]}")

    def allow(may_grow: bool) -> None:
        most_pages[0] = 1_000_000 if may_grow else 1  # read by SQLite as: no more than there are
        cortex.database.engine.dispose()

    return allow


def test_what_has_no_room_is_refused_whole(cortex: Cortex) -> None:
    """A full disk costs the caller a clear error, and the queue nothing."""
    limit_room(cortex)(False)
    small = NewJobFactory.build()
    large = NewJob.of("note", Note(text="x" * 500_000))
    with pytest.raises(StorageFullError, match=r"chunks\.db"):
        cortex.enqueue_many([small, large])
    assert cortex.jobs.list_jobs() == []
    assert cortex.enqueue(small) is not None


@pytest.mark.parametrize("way", ["run_sync", "run"])
def test_a_result_waits_for_room(open_cortex: OpenCortex, caplog: pytest.LogCaptureFixture, way: str) -> None:
    """A full disk pauses the worker; the job's result is kept, and its handler is not run again."""
    others = dict.fromkeys(("io_ms", "host_io_ms", "other_ms"), LONG_MS)  # only the right pause is short
    cortex = open_cortex(Settings(worker=WorkerSettings(idle_ms=5, disk_full_ms=5, **others)))
    ran: list[object] = []

    def note(ctx: object, _payload: Note) -> Done:
        ran.append(ctx)
        return Done(follow_ups=[NewJob.of("note", Note(text="x" * 500_000))])

    def full(ctx: object, _payload: Note) -> Done:
        allow(False)
        return note(ctx, _payload)

    allow = limit_room(cortex)
    met: list[object] = []
    event.listen(cortex.database.engine, "handle_error", met.append)
    cortex.handler("full", payload=Note)(full)
    job_id = str(cortex.enqueue(NewJob.of("full", Note())))
    with working(cortex, way):
        until(lambda: len(met) >= 3)
        job = cortex.get_job(job_id)
        assert (job.status, job.attempts) == (JobStatus.RUNNING, 1)
        allow(True)
        until(lambda: cortex.get_job(job_id).status is JobStatus.DONE)
    assert (len(ran), cortex.get_job(job_id).attempts) == (1, 1)
    assert len(cortex.jobs.list_jobs(kind="note")) == 1
    assert len([record for record in caplog.records if "again" in record.message]) == 1


# Ended by SQLite itself


def fill(session: Session) -> None:
    """Meet a full disk, and go on as if nothing had been: SQLite has rolled the transaction back by then."""
    with suppress(StorageFullError):
        session.execute(text("INSERT INTO bystander VALUES (zeroblob(500000))"))


def break_a_rule(session: Session) -> None:
    """Meet a conflict that SQLite answers by rolling the transaction back, and go on."""
    with suppress(IntegrityError):
        session.execute(text("INSERT OR ROLLBACK INTO mem_tree_chunks SELECT * FROM mem_tree_chunks"))


def run_a_script(session: Session) -> None:
    """Use the driver's way that commits what is open before it begins."""
    driver: Any = session.connection().connection
    driver.executescript("DELETE FROM mem_tree_chunks")


def run_a_script_quietly(session: Session) -> None:
    """The same, and take no notice of the refusal."""
    with suppress(sqlite3.Error):
        run_a_script(session)


ENDINGS = [fill, break_a_rule, run_a_script, run_a_script_quietly]


def prepare(cortex: Cortex) -> None:
    with cortex.transaction() as session:
        session.execute(text("CREATE TABLE bystander (data BLOB)"))
    insert_rows(cortex.database, ChunkRowFactory.build(id="before", owner="kept"))
    limit_room(cortex)(False)


@pytest.mark.parametrize("end", ENDINGS)
@pytest.mark.parametrize("then", ["write more", "do nothing more"])
def test_a_plan_whose_transaction_ended_under_it_keeps_nothing(
    cortex: Cortex, end: Callable[[Session], None], then: str
) -> None:
    """Nothing is written behind the end of the transaction, a statement at a time, while the row runs on."""

    def writes(session: Session) -> None:
        session.add(ChunkRowFactory.build(id="written"))
        session.flush()
        end(session)
        if then == "write more":
            session.execute(text("UPDATE mem_tree_chunks SET owner = 'changed'"))

    prepare(cortex)
    cortex.handler("note", payload=Note)(lambda _ctx, _payload: Done(writes=writes, follow_ups=[NewJobFactory.build()]))
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    assert cortex.run_once()
    job = cortex.get_job(job_id)
    assert (job.status, job.attempts) == (JobStatus.READY, 1)
    assert "TransactionEndedError" in str(job.last_error)
    assert [job.id for job in cortex.jobs.list_jobs()] == [job_id]
    with cortex.database.reading() as session:
        assert session.execute(text("SELECT id, owner FROM mem_tree_chunks")).all() == [("before", "kept")]


@pytest.mark.parametrize("end", [fill, break_a_rule])
def test_a_producer_is_told_that_its_transaction_ended_under_it(cortex: Cortex, end: Callable[[Session], None]) -> None:
    """Its job does not commit without the rows that were written before it."""
    prepare(cortex)

    def produce(*, then_enqueue: bool) -> None:
        with cortex.transaction() as session:
            session.add(ChunkRowFactory.build(id="written"))
            session.flush()
            end(session)
            if then_enqueue:
                cortex.enqueue(NewJobFactory.build(), session=session)

    for then_enqueue in (True, False):
        with pytest.raises(TransactionEndedError):
            produce(then_enqueue=then_enqueue)
    assert cortex.jobs.list_jobs() == []
    with cortex.database.reading() as session:
        assert list(session.execute(text("SELECT id FROM mem_tree_chunks")).scalars()) == ["before"]


# Gone, or never there


def test_a_file_that_cannot_be_opened_is_one_line(tmp_path: Path, path: Path) -> None:
    """A path through a file, or a log that cannot be written: the path is named, and the command fails."""
    (tmp_path / "note.txt").write_text("no folder")
    Path(f"{path}-wal").mkdir()
    for url in (f"sqlite:///{tmp_path}/note.txt/chunks.db", f"sqlite:///{path}"):
        done = run_command("--database-url", url, "db", "upgrade", cwd=tmp_path)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
        assert url.removeprefix("sqlite:///") in done.stderr


@pytest.mark.parametrize("way", ["run_sync", "run"])
def test_a_worker_whose_folder_is_deleted_says_so_once_and_stops(
    tmp_path: Path, sqlite_template: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """Nothing is written into a file that has no name any more, where it would be lost."""
    folder = tmp_path / "gone"
    folder.mkdir()
    shutil.copyfile(sqlite_template, folder / "chunks.db")
    hurried = Settings(worker=HURRIED.model_copy(update={"io_ms": 5}))
    with Cortex.open(f"sqlite:///{folder}/chunks.db", settings=hurried) as cortex:
        met: list[object] = []
        event.listen(cortex.database.engine, "handle_error", met.append)
        with working(cortex, way):
            until(lambda: cortex.jobs.list_jobs(status=JobStatus.DONE))
            shutil.rmtree(folder)
            with pytest.raises(StorageUnavailableError, match=r"gone/chunks\.db"):
                cortex.enqueue(NewJobFactory.build())
            until(lambda: len(met) >= 10)
    assert len(caplog.records) == 1
    assert not folder.exists()


@pytest.mark.parametrize("way", ["run_sync", "run"])
def test_a_worker_whose_file_is_deleted_waits_for_it(
    open_cortex: OpenCortex, sqlite_template: Path, path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """No empty file takes its place; once a copy is put back, the worker goes on with that."""
    cortex = open_cortex(Settings(worker=HURRIED.model_copy(update={"io_ms": 5})))
    met: list[object] = []
    event.listen(cortex.database.engine, "handle_error", met.append)
    with working(cortex, way):
        until(lambda: cortex.jobs.list_jobs(status=JobStatus.DONE))
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        with pytest.raises(StorageUnavailableError, match=r"chunks\.db"):
            cortex.enqueue(NewJobFactory.build())
        until(lambda: len(met) >= 10)
        assert not path.exists()
        copy = path.with_name("copy.db")
        shutil.copyfile(sqlite_template, copy)
        copy.replace(path)
        job_id = str(cortex.enqueue(NewJobFactory.build()))
        until(lambda: cortex.get_job(job_id).status is JobStatus.DONE)
    assert len(caplog.records) == 1


def test_a_file_that_is_replaced_is_followed(cortex: Cortex, sqlite_template: Path, path: Path) -> None:
    """After a restore the queue works on what was restored, not on what was moved away."""
    cortex.enqueue(NewJobFactory.build())
    cortex.database.engine.dispose()  # its log is written, as before any copy of the file
    aside = path.with_name("aside.db")
    assert cortex.jobs.count_by_status()[JobStatus.READY] == 1
    path.replace(aside)
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    shutil.copyfile(sqlite_template, path)
    assert cortex.jobs.count_by_status()[JobStatus.READY] == 0
    assert cortex.enqueue(NewJobFactory.build()) is not None


def test_a_refused_journal_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Where SQLite keeps another journal than WAL, as it may on a network disk, a warning names file and mode."""
    with closing(sqlite3.connect(":memory:")) as connection:  # SQLite refuses WAL in memory in the same way
        _set_journal(connection, DatabaseSettings(), Path("chunks.db"))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "chunks.db: SQLite refused journal mode wal and stays in memory" in record.message
