"""Moving a queue into a PostgreSQL database and out of one: schemas, locks, and what SQLite cannot store."""

import threading

import pytest

import foreign_file
from background import BOUND_S, until
from conftest import MakeDatabase
from full_queue import count_rows, stored
from tinycortex import MoveError, MoveProgress, MoveStage, Settings, StorageBusyError, move, schema
from tinycortex.config import DatabaseSettings


@pytest.fixture
def postgresql_url(make_postgresql: MakeDatabase) -> str:
    """URL of a PostgreSQL database without any table, beside the one at ``source_url``."""
    return make_postgresql(False)


@pytest.mark.parametrize("engine_name", ["sqlite"])
def test_the_schema_of_the_settings_is_made_in_the_target(source_url: str, postgresql_url: str) -> None:
    """It holds the whole queue, and nothing of it lies elsewhere."""
    move(source_url, postgresql_url, settings=Settings(database=DatabaseSettings(schema_name="memory")))
    assert schema.current(postgresql_url) is None
    assert schema.check(postgresql_url, schema="memory") == []
    with foreign_file.connect(postgresql_url) as connection:
        jobs = connection.exec_driver_sql("SELECT count(*) FROM memory.mem_tree_jobs").scalar_one()
    assert jobs == len(stored(source_url)["mem_tree_jobs"])


def test_two_moves_into_one_target_take_turns(source_url: str, postgresql_url: str) -> None:
    """The second one finds the rows of the first, though both had found it empty at their start."""
    refused: list[BaseException] = []

    def move_too() -> None:
        try:
            move(source_url, postgresql_url)
        except MoveError as error:
            refused.append(error)

    second = threading.Thread(target=move_too, daemon=True)

    def start_second(progress: MoveProgress) -> None:
        if progress.stage is MoveStage.COPY and second.ident is None:
            second.start()
            with foreign_file.connect(postgresql_url) as connection:
                until(
                    lambda: connection.exec_driver_sql(
                        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
                    ).scalar_one()
                )

    move(source_url, postgresql_url, on_progress=start_second)
    second.join(BOUND_S)
    assert ["has rows already" in str(error) for error in refused] == [True]
    assert stored(postgresql_url) == stored(source_url)


def test_a_target_whose_table_is_locked_is_told(source_url: str, postgresql_url: str) -> None:
    """After the busy timeout, as everywhere."""
    schema.upgrade(postgresql_url)
    settings = Settings(database=DatabaseSettings(busy_timeout_ms=50))
    with foreign_file.connect(postgresql_url) as other:
        other.exec_driver_sql("LOCK TABLE mem_tree_jobs IN EXCLUSIVE MODE")
        with pytest.raises(StorageBusyError):
            move(source_url, postgresql_url, settings=settings)
    assert count_rows(postgresql_url) == 0
    move(source_url, postgresql_url, settings=settings)


@pytest.mark.parametrize("engine_name", ["postgresql"])
def test_a_number_that_is_none_is_named(source_url: str, target_url: str) -> None:
    """SQLite would store nothing in its place."""
    with foreign_file.connect(source_url) as connection:
        connection.exec_driver_sql("UPDATE mem_tree_score SET total = 'NaN'")
    with pytest.raises(
        MoveError, match=r"mem_tree_score with chunk_id='chunk' holds no number \(NaN\) in column total"
    ):
        move(source_url, target_url)
    assert count_rows(target_url) == 0


@pytest.mark.parametrize("engine_name", ["postgresql"])
def test_numbers_without_end_arrive(source_url: str, target_url: str) -> None:
    """Both engines have them."""
    with foreign_file.connect(source_url) as connection:
        connection.exec_driver_sql("UPDATE mem_tree_score SET total = 'Infinity', source_weight = '-Infinity'")
    move(source_url, target_url)
    assert stored(target_url) == stored(source_url)
