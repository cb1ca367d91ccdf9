"""Moving a queue out of a SQLite file: its bytes, its log, its locks, and what other programs wrote into it."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import foreign_file
from background import BOUND_S, program
from conftest import MakeDatabase
from full_queue import count_rows, fill, path_of, stored, write
from tinycortex import (
    Database,
    MoveError,
    SchemaMissingError,
    Settings,
    StorageBusyError,
    StorageUnavailableError,
    move,
    schema,
)
from tinycortex.config import DatabaseSettings


@pytest.fixture
def source_file(make_sqlite: MakeDatabase) -> str:
    """URL of a full queue in a SQLite file, which other programs can write to as they like."""
    url = make_sqlite(True)
    database = Database(DatabaseSettings(url=url))
    fill(database)
    database.dispose()
    return url


def all_files(folder: Path, name: str) -> dict[str, tuple[bytes, int]]:
    """Return what is in a database's file and in those beside it, and when each was written."""
    files = [file for file in folder.glob(f"{name}*") if file.is_file()]
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


@pytest.mark.parametrize("journal_mode", ["wal", "delete"])
def test_not_a_byte_of_a_file_changes(source_file: str, tmp_path: Path, target_url: str, journal_mode: str) -> None:
    """Neither in it nor beside it."""
    write(source_file, f"PRAGMA journal_mode={journal_mode}")
    before = all_files(tmp_path, "chunks.db")
    assert set(before) == {"chunks.db"}
    move(source_file, target_url)
    with pytest.raises(MoveError):
        move(source_file, target_url)
    assert all_files(tmp_path, "chunks.db") == before


ENQUEUE_AND_DIE = """
import os, sys
from tinycortex import Cortex, NewJob

Cortex.open(sys.argv[1]).enqueue(NewJob(kind="custom", payload_json="{}"))
os._exit(9)
"""


def test_what_a_killed_process_left_in_the_log_is_moved(
    make_sqlite: MakeDatabase, tmp_path: Path, target_url: str
) -> None:
    """The log stays a log; only its index may be made anew."""
    source = make_sqlite(True)
    with program(ENQUEUE_AND_DIE, source) as killed:
        assert killed.wait(BOUND_S) == 9
    before = all_files(tmp_path, "chunks.db")
    assert move(source, target_url).tables["mem_tree_jobs"].rows == 1
    after = all_files(tmp_path, "chunks.db")
    for name in ("chunks.db", "chunks.db-wal"):
        assert after[name] == before[name]


def test_a_file_without_a_queue_is_refused(tmp_path: Path, target_url: str, target_engine: str) -> None:
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


KEY_TOO_LONG = "mem_tree_jobs with id='job:x' breaks a rule of the table: index row"


@pytest.mark.parametrize("target_engine", ["postgresql"], indirect=True)
def test_a_key_that_is_too_long_for_the_targets_index_is_named(source_file: str, target_url: str) -> None:
    """PostgreSQL takes a third of a page at the most, and what it is told can be compressed a little."""
    write(source_file, INSERT_JOB, "job:x", "{}", 0, None)
    write(
        source_file,
        "UPDATE mem_tree_jobs SET dedupe_key = ? WHERE id = 'job:x'",
        "".join(map(chr, range(9_000, 19_000))),
    )
    with pytest.raises(MoveError, match=KEY_TOO_LONG) as refused:
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


def test_a_target_that_is_locked_is_told(source_file: str, make_sqlite: MakeDatabase) -> None:
    """After the busy timeout, as everywhere."""
    target = make_sqlite(False)
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
