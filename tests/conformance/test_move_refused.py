"""What is not moved: into a database that has rows, from a queue that is at work, or what could not be stored."""

from collections.abc import Callable

import pytest
from sqlalchemy import inspect

import foreign_file
from full_queue import count_rows, path_of, stored
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
    move,
    schema,
)
from tinycortex.config import DatabaseSettings
from tinycortex.models import Base, IngestedSourceRow
from tinycortex.testing import JobRowFactory, insert_rows

OpenCortex = Callable[..., Cortex]


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


def test_the_target_of_another_program_is_not_adopted_when_it_has_rows(source_url: str, target_url: str) -> None:
    """It is refused before anything is added to it."""
    with foreign_file.connect(target_url) as connection:
        connection.exec_driver_sql(foreign_file.CHUNKS_TABLE)
        connection.exec_driver_sql(foreign_file.JOBS_TABLE)
        connection.exec_driver_sql(
            "INSERT INTO mem_tree_jobs (id, kind, payload_json, available_at_ms, created_at_ms) "
            "VALUES ('job:1', 'seal', '{}', 0, 0)"
        )
    with pytest.raises(MoveError, match="has rows already, in mem_tree_jobs;"):
        move(source_url, target_url)
    with foreign_file.connect(target_url) as connection:
        assert sorted(inspect(connection).get_table_names()) == ["mem_tree_chunks", "mem_tree_jobs"]
        assert len(inspect(connection).get_columns("mem_tree_jobs")) == 15


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


def test_a_source_without_a_schema_is_refused(empty_database_url: str, target_url: str) -> None:
    """The line names the command that mends it."""
    with foreign_file.connect(empty_database_url) as connection:
        connection.exec_driver_sql("CREATE TABLE of_somebody_else (id TEXT)")
    with pytest.raises(SchemaMissingError, match="tinycortex db upgrade"):
        move(empty_database_url, target_url)


def test_an_altered_schema_is_refused(source_url: str, target_url: str) -> None:
    """Without its index a key could be active twice; the doctor knows what to do."""
    with foreign_file.connect(source_url) as connection:
        connection.exec_driver_sql("DROP INDEX idx_mem_tree_jobs_dedupe_active")
    with pytest.raises(MoveError, match=r"idx_mem_tree_jobs_dedupe_active.*tinycortex doctor"):
        move(source_url, target_url)


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
