"""Moving a queue into an empty database: all of it or nothing, verified, and the source as it was."""

from collections.abc import Callable

import pytest

import foreign_file
from background import BOUND_S, program
from conftest import MakeDatabase
from full_queue import KEYS, count_rows, stored
from tinycortex import (
    Cortex,
    Database,
    JobStatus,
    MoveError,
    MoveProgress,
    MoveStage,
    QueueDelegates,
    move,
    schema,
)
from tinycortex.domain.clock import Clock
from tinycortex.domain.redact import mask_url
from tinycortex.models import Base
from tinycortex.testing import JobRowFactory, NewJobFactory, insert_rows

OpenCortex = Callable[..., Cortex]


# All of it


@pytest.mark.parametrize("prepared", [False, True])
def test_every_row_of_every_table_arrives(source_url: str, target_url: str, prepared: bool) -> None:
    """Value for value, into a database that is made for it or that was upgraded before."""
    if prepared:
        schema.upgrade(target_url)
    report = move(source_url, target_url)
    assert stored(target_url) == stored(source_url)
    assert schema.check(target_url) == []
    assert set(report.tables) == set(Base.metadata.tables)
    assert {name: digest.rows for name, digest in report.tables.items()} == {
        name: len(rows) for name, rows in stored(source_url).items()
    }
    assert all(digest.rows for digest in report.tables.values())
    assert report.active_keys.rows == len(KEYS)
    assert (report.source, report.target) == (mask_url(source_url), mask_url(target_url))


def test_there_and_back_again_has_equal_checksums(
    source_url: str, target_url: str, engine_name: str, request: pytest.FixtureRequest
) -> None:
    """What comes back from another engine is what was sent there."""
    make: MakeDatabase = request.getfixturevalue(f"make_{engine_name}")
    back_url = make(False)
    there, back = move(source_url, target_url), move(target_url, back_url)
    assert (there.tables, there.active_keys) == (back.tables, back.active_keys)
    assert stored(back_url) == stored(source_url)


def test_an_empty_queue_can_be_moved(database_url: str, target_url: str) -> None:
    """Nothing is something to move, too."""
    report = move(database_url, target_url)
    assert {digest.rows for digest in report.tables.values()} == {0}
    assert schema.check(target_url) == []


def test_many_rows_are_told_of_as_they_are_copied_and_read_again(
    database: Database, database_url: str, target_url: str
) -> None:
    """Progress only grows, and ends at what was said; each row is written once, and read once more on both sides."""
    jobs = 1_201
    insert_rows(database, *JobRowFactory.build_batch(jobs))
    seen: list[MoveProgress] = []
    assert move(database_url, target_url, on_progress=seen.append).tables["mem_tree_jobs"].rows == jobs
    for stage, total in ((MoveStage.COPY, jobs), (MoveStage.VERIFY, 2 * jobs)):
        steps = [progress for progress in seen if progress.stage is stage]
        assert {step.total for step in steps} == {total}
        assert [step.done for step in steps] == sorted({step.done for step in steps})
        assert steps[-1].done == total
        assert len(steps) > 2


def test_the_queue_goes_on_where_it_was(
    source_url: str, target_url: str, delegates: QueueDelegates, clock: Clock, cortex: Cortex
) -> None:
    """Keys go on suppressing twins, what waits is run, and new jobs come after all those that were moved."""
    early = str(cortex.enqueue(NewJobFactory.build(dedupe_key="early")))
    cortex.close()
    move(source_url, target_url)
    with Cortex.open(target_url, delegates=delegates, clock=clock) as moved:
        for key in (*KEYS, "early"):
            assert moved.enqueue(NewJobFactory.build(dedupe_key=key)) is None
        late = str(moved.enqueue(NewJobFactory.build(dedupe_key="late")))
        assert late > max(job.id for job in moved.jobs.list_jobs() if job.id != late)
        assert moved.drain_until_idle() > 3
        assert {moved.get_job(job_id).status for job_id in (early, late)} == {JobStatus.DONE}


def test_no_key_is_counted_by_a_database() -> None:
    """So there is no sequence that would have to be set behind the rows that were moved."""
    assert [table.name for table in Base.metadata.sorted_tables if table.autoincrement_column is not None] == []


# The source is left alone


def test_no_row_of_the_source_changes(source_url: str, target_url: str) -> None:
    """Whether the move succeeds or not."""
    before = stored(source_url)
    move(source_url, target_url)
    with pytest.raises(MoveError):
        move(source_url, target_url)
    assert stored(source_url) == before


def test_a_queue_that_is_open_and_at_rest_can_be_moved(source: Database, database_url: str, target_url: str) -> None:
    """A program that only looks at it is not in the way."""
    with source.reading() as session:
        session.connection().exec_driver_sql("SELECT count(*) FROM mem_tree_jobs").scalar_one()
        move(database_url, target_url)
    assert stored(target_url) == stored(database_url)


# Nothing of it


class StopHereError(Exception):
    """What a caller raises to stop a move."""


@pytest.mark.parametrize("stage", [MoveStage.COPY, MoveStage.VERIFY])
def test_a_failure_in_the_middle_leaves_the_target_empty(source_url: str, target_url: str, stage: MoveStage) -> None:
    """And a second try succeeds."""

    def stop(progress: MoveProgress) -> None:
        if progress.stage is stage and progress.done > progress.total // 2:
            raise StopHereError

    with pytest.raises(StopHereError):
        move(source_url, target_url, on_progress=stop)
    assert count_rows(target_url) == 0
    move(source_url, target_url)
    assert stored(target_url) == stored(source_url)


MOVE_AND_DIE = """
import os, sys
from tinycortex import move

move(sys.argv[1], sys.argv[2], on_progress=lambda progress: progress.stage == "verify" and os._exit(9))
"""


def test_a_kill_in_the_middle_leaves_the_target_empty(source_url: str, target_url: str) -> None:
    """All rows had been written by then, and none had been kept."""
    with program(MOVE_AND_DIE, source_url, target_url) as killed:
        assert killed.wait(BOUND_S) == 9
    assert count_rows(target_url) == 0
    move(source_url, target_url)
    assert stored(target_url) == stored(source_url)


TRIGGERS = {
    "sqlite": ["CREATE TRIGGER meddle AFTER INSERT ON mem_tree_jobs BEGIN {}; END"],
    "postgresql": [
        "CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {}; RETURN NULL; END $$",
        "CREATE TRIGGER meddle AFTER INSERT ON mem_tree_jobs FOR EACH ROW EXECUTE FUNCTION meddle()",
    ],
}


@pytest.mark.parametrize(
    "meddling",
    [
        "UPDATE mem_tree_jobs SET payload_json = '{ }' WHERE id = new.id",
        "DELETE FROM mem_tree_ingested_sources",
        "INSERT INTO mem_tree_ingested_sources VALUES ('a', new.id, 1)",
        "UPDATE mem_tree_jobs SET dedupe_key = NULL WHERE id = new.id",
    ],
)
def test_a_target_that_stores_something_else_is_noticed(
    source_url: str, target_url: str, target_engine: str, meddling: str
) -> None:
    """What was written is read again before it is kept."""
    schema.upgrade(target_url)
    with foreign_file.connect(target_url) as connection:
        for statement in TRIGGERS[target_engine]:
            connection.exec_driver_sql(statement.format(meddling))
    with pytest.raises(MoveError, match=r"does not hold what was copied into mem_tree_\w+"):
        move(source_url, target_url)
    assert count_rows(target_url) == 0
