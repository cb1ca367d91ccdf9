"""What is not moved: into a database that has rows, from a queue that is at work, or what could not be stored."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import foreign_file
from full_queue import count_rows, fill, path_of, stored, write
from tinycortex import (
    Cortex,
    Database,
    JobStatus,
    MoveError,
    MoveProgress,
    MoveStage,
    NewJob,
    SchemaMissingError,
    SchemaOutdatedError,
    Settings,
    StorageBusyError,
    StorageUnavailableError,
    move,
    schema,
)
from tinycortex.config import DatabaseSettings
from tinycortex.models import Base, IngestedSourceRow
from tinycortex.testing import JobRowFactory, insert_rows

OpenCortex = Callable[..., Cortex]


@pytest.fixture
def source_file(sqlite_urls: tuple[str, str]) -> str:
    """URL of a full queue in a SQLite file, which other programs can write to as they like."""
    _empty, url = sqlite_urls
    database = Database(DatabaseSettings(url=url))
    fill(database)
    database.dispose()
    return url


def make_with_rows(url: str, *rows: Base) -> None:
    """Make a database at the newest revision that holds ``rows``."""
    schema.upgrade(url)
    database = Database(DatabaseSettings(url=url))
    insert_rows(database, *rows)
    database.dispose()


SOURCE = {"source_kind": "chat", "source_id": "a", "ingested_at_ms": 1}

# Refused at once


@pytest.mark.parametrize("table", ["mem_tree_jobs", "mem_tree_ingested_sources"])
def test_a_target_with_rows_is_refused_and_left(source_url: str, target_url: str, table: str) -> None:
    """One row in any table of ours is enough, and the line says where."""
    row = JobRowFactory.build() if table == "mem_tree_jobs" else IngestedSourceRow(**SOURCE)
    make_with_rows(target_url, row)
    with pytest.raises(MoveError, match=f"has rows already, in {table};"):
        move(source_url, target_url)
    assert count_rows(target_url) == 1


def test_a_queue_is_not_moved_onto_itself(source_url: str) -> None:
    """Its own rows are in the way."""
    rows = stored(source_url)
    with pytest.raises(MoveError, match="has rows already"):
        move(source_url, source_url)
    assert stored(source_url) == rows


def test_the_target_of_another_program_is_not_adopted_when_it_has_rows(source_url: str, tmp_path: Path) -> None:
    """It is refused before anything is added to it."""
    url = f"sqlite:///{tmp_path / 'other.db'}"
    with foreign_file.connect(url) as connection:
        connection.exec_driver_sql(foreign_file.CHUNKS_TABLE)
        connection.exec_driver_sql(foreign_file.JOBS_TABLE)
        connection.exec_driver_sql(
            "INSERT INTO mem_tree_jobs (id, kind, payload_json, available_at_ms, created_at_ms) "
            "VALUES ('job:1', 'seal', '{}', 0, 0)"
        )
    before = path_of(url).read_bytes()
    with pytest.raises(MoveError, match="has rows already, in mem_tree_jobs;"):
        move(source_url, url)
    assert path_of(url).read_bytes() == before


def test_another_revision_is_refused_on_either_side(source_url: str, target_url: str) -> None:
    """The line names the command that mends it."""
    schema.upgrade(target_url, "0002")
    with pytest.raises(SchemaOutdatedError, match=r"revision 0002.*tinycortex db upgrade"):
        move(source_url, target_url)
    schema.upgrade(target_url)
    schema.downgrade(source_url, "0003")
    with pytest.raises(SchemaOutdatedError, match=r"revision 0003.*tinycortex db upgrade"):
        move(source_url, target_url)
    assert count_rows(target_url) == 0


def test_a_source_without_a_schema_is_refused(tmp_path: Path, target_url: str, target_engine: str) -> None:
    """A file that is not there is told from one that has no queue; and nothing is made for them."""
    path = tmp_path / "source.db"
    with pytest.raises(MoveError, match="there is no database at"):
        move(f"sqlite:///{path}", target_url)
    path.write_bytes(b"")
    with pytest.raises(SchemaMissingError, match="tinycortex db upgrade"):
        move(f"sqlite:///{path}", target_url)
    assert path.read_bytes() == b""
    if target_engine == "sqlite":
        assert not path_of(target_url).exists()


def test_an_altered_schema_is_refused(sqlite_urls: tuple[str, str]) -> None:
    """Without its index a key could be active twice; the doctor knows what to do."""
    target, source = sqlite_urls
    write(source, "DROP INDEX idx_mem_tree_jobs_dedupe_active")
    with pytest.raises(MoveError, match=r"idx_mem_tree_jobs_dedupe_active.*tinycortex doctor"):
        move(source, target)


# Running jobs


@pytest.fixture
def running_id(source: Database) -> str:
    """The id of a job that runs in the source."""
    row = JobRowFactory.build(running=True)
    insert_rows(source, row)
    return row.id


def test_running_jobs_are_refused(running_id: str, database_url: str, target_url: str, target_engine: str) -> None:
    """They would run on there and again here; the line says how many there are, and which."""
    with pytest.raises(MoveError, match=f"running: 1, such as {running_id};.*--wait"):
        move(database_url, target_url)
    if target_engine == "sqlite":
        assert not path_of(target_url).exists()


def test_waiting_ends_with_the_last_running_job(
    running_id: str, cortex: Cortex, database_url: str, target_url: str
) -> None:
    """What is moved is the queue as it is then."""
    seen: list[MoveProgress] = []

    def end_the_job(progress: MoveProgress) -> None:
        seen.append(progress)
        if progress.stage is MoveStage.WAIT:
            assert cortex.jobs.mark_done(cortex.get_job(running_id))

    move(database_url, target_url, wait=True, on_progress=end_the_job)
    assert [progress for progress in seen if progress.stage is MoveStage.WAIT] == [
        MoveProgress(stage=MoveStage.WAIT, done=0, total=1)
    ]
    with Cortex.open(target_url) as moved:
        assert moved.get_job(running_id).status is JobStatus.DONE


@pytest.mark.usefixtures("running_id")
def test_a_target_with_rows_is_refused_before_the_wait(database_url: str, target_url: str) -> None:
    """Nobody waits for hours to be told."""
    make_with_rows(target_url, JobRowFactory.build())
    with pytest.raises(MoveError, match="has rows already"):
        move(database_url, target_url, wait=True)


CHANGES: dict[str, Callable[[Cortex], object]] = {
    "enqueue": lambda cortex: cortex.enqueue(NewJob(kind="custom", payload_json="{}")),
    "claim": lambda cortex: cortex.jobs.claim_next(),
    "cancel": lambda cortex: cortex.cancel(cortex.jobs.list_jobs(status=JobStatus.READY)[0].id),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("moment", [(stage, opened) for stage in ("copy", "verify") for opened in (True, False)])
def test_a_source_that_somebody_goes_on_writing_to_is_refused(
    source_url: str, target_url: str, open_cortex: OpenCortex, moment: tuple[str, bool], change: str
) -> None:
    """A job enqueued meanwhile would stay behind, and one that was run would run again; opened before or then."""
    stage, opened = moment
    early = open_cortex() if opened else None
    changed: list[object] = []

    def write_once(progress: MoveProgress) -> None:
        if progress.stage == stage and not changed:
            changed.append(CHANGES[change](early or open_cortex()))

    with pytest.raises(MoveError, match="was changed while it was moved"):
        move(source_url, target_url, on_progress=write_once)
    assert changed
    assert changed[0] is not None
    assert count_rows(target_url) == 0


# What not every database can store


INSERT_JOB = (
    "INSERT INTO mem_tree_jobs (id, kind, payload_json, available_at_ms, created_at_ms, last_error) "
    "VALUES (?, 'custom', ?, ?, 0, ?)"
)


@pytest.mark.parametrize(
    ("values", "row", "fault"),
    [
        (("job:x", "{}", 0, "a\x00b"), "id='job:x'", "a NUL character in column last_error"),
        (("job:\x00", "{}", 0, None), r"id='job:\\x00'", "a NUL character in column id"),
        (("job:x", b"{}", 0, None), "id='job:x'", "bytes, where text must stand in column payload_json"),
        (("job:x", "{}", "soon", None), "id='job:x'", "text, where a whole number must stand in column available_at"),
        (("job:x", "{}", 0.5, None), "id='job:x'", "a real number, where a whole number must stand in column availab"),
    ],
)
def test_a_value_that_not_every_database_stores_is_named(
    source_file: str, target_url: str, values: tuple[object, ...], row: str, fault: str
) -> None:
    """Table, row and column, in one line; another program may have written it into a SQLite file."""
    write(source_file, INSERT_JOB, *values)
    with pytest.raises(MoveError, match=f"the row of mem_tree_jobs with {row} holds {fault}") as refused:
        move(source_file, target_url)
    assert str(refused.value).isprintable()
    assert count_rows(target_url) == 0


def test_a_row_without_an_id_is_named(tmp_path: Path, target_url: str) -> None:
    """A table that another program made may hold one; without it the file is moved as any other."""
    url = f"sqlite:///{tmp_path / 'adopted.db'}"
    foreign_file.make(url)
    schema.upgrade(url)
    write(url, "DELETE FROM mem_tree_jobs WHERE status = 'running'")
    write(url, INSERT_JOB, None, "{}", 0, None)
    with pytest.raises(MoveError, match=r"mem_tree_jobs with id=None holds nothing \(NULL\), where .* in column id"):
        move(url, target_url)
    write(url, "DELETE FROM mem_tree_jobs WHERE id IS NULL")
    move(url, target_url)
    assert stored(target_url) == stored(url)


@pytest.mark.parametrize("raw", [b"\xed\xa0\x80", b"\xff", b"caf\xe9", b"\xf0\x9f"])
@pytest.mark.parametrize("column", ["last_error", "id"])
def test_text_that_is_no_utf_8_is_named(source_file: str, target_url: str, raw: bytes, column: str) -> None:
    """A lone surrogate among it; it is neither replaced nor left out."""
    write(source_file, INSERT_JOB, "job:x", "{}", 0, None)
    write(source_file, f"UPDATE mem_tree_jobs SET {column} = CAST(? AS TEXT) WHERE id = 'job:x'", raw)
    with pytest.raises(MoveError, match=f"mem_tree_jobs with id=.* holds a lone surrogate in column {column}"):
        move(source_file, target_url)
    assert count_rows(target_url) == 0


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        (
            "INSERT INTO mem_tree_chunk_embeddings VALUES ('gone', 'model', x'00', 1, 0.5)",
            "mem_tree_chunk_embeddings with chunk_id='gone', model_signature='model' breaks a rule",
        ),
        (
            "INSERT INTO mem_tree_buffers VALUES ('gone', 3, '[]', 0, NULL, 0)",
            "mem_tree_buffers with tree_id='gone', level=3 breaks a rule",
        ),
        (
            "INSERT INTO mem_tree_chunk_embeddings VALUES ('chunk', 'model', 'text', 1, 0.5)",
            "mem_tree_chunk_embeddings with .* holds text, where bytes must stand in column vector",
        ),
        (
            "INSERT INTO mem_tree_chunk_embeddings VALUES ('chunk', 'model', 5, 1, 'late')",
            "mem_tree_chunk_embeddings with .* holds a whole number, where bytes must stand in column vector",
        ),
    ],
)
def test_a_row_that_breaks_a_rule_is_named(source_file: str, target_url: str, statement: str, named: str) -> None:
    """Such as one that refers to nothing, from a program that does not ask for foreign keys."""
    write(source_file, statement)
    with pytest.raises(MoveError, match=named):
        move(source_file, target_url)
    assert count_rows(target_url) == 0


# Storage


def test_a_target_that_is_locked_is_told(source_file: str, sqlite_urls: tuple[str, str]) -> None:
    """After the busy timeout, as everywhere."""
    target, _source = sqlite_urls
    schema.upgrade(target)
    settings = Settings(database=DatabaseSettings(busy_timeout_ms=0))
    with closing(sqlite3.connect(path_of(target), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageBusyError):
            move(source_file, target, settings=settings)
    move(source_file, target, settings=settings)


def test_a_target_that_cannot_be_made_is_told(source_file: str, tmp_path: Path) -> None:
    """The folder is missing."""
    with pytest.raises(StorageUnavailableError, match="nowhere"):
        move(source_file, f"sqlite:///{tmp_path / 'nowhere' / 'x.db'}")


def test_a_source_that_is_locked_by_its_journal_is_told(source_file: str, target_url: str) -> None:
    """In another journal mode a writer keeps readers out."""
    settings = Settings(database=DatabaseSettings(busy_timeout_ms=0))
    with closing(sqlite3.connect(path_of(source_file), isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode=delete")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StorageBusyError):
            move(source_file, target_url, settings=settings)
    move(source_file, target_url, settings=settings)
