"""Adopting a file that another program made (contract §1)."""

import pytest
from sqlalchemy import Connection, inspect, text

import foreign_file
from foreign_file import connect, insert_job, make, read_rows, shared
from tinycortex import Cortex, JobStatus, SchemaError, schema
from tinycortex.testing import FakeDelegates, ManualClock


@pytest.fixture
def url(empty_database_url: str) -> str:
    """A database with exactly the contract's two main tables, full of rows, without any index."""
    make(empty_database_url)
    return empty_database_url


def index_names(url: str) -> set[str | None]:
    with connect(url) as connection:
        return {index["name"] for index in inspect(connection).get_indexes("mem_tree_jobs")}


def identity_of_index(connection: Connection) -> object:
    """Return what changes when the dedupe index is made anew."""
    catalog = "sqlite_master" if inspect(connection).has_table("sqlite_master") else "pg_class"
    where = {"sqlite_master": "name", "pg_class": "relname"}[catalog]
    column = {"sqlite_master": "sql", "pg_class": "oid"}[catalog]
    search = f"SELECT {column} FROM {catalog} WHERE {where} = 'idx_mem_tree_jobs_dedupe_active'"
    return connection.execute(text(search)).scalar_one()


def test_every_row_is_kept(url: str) -> None:
    """All kinds, retired and unknown ones too, in all statuses, byte for byte."""
    jobs, chunks = read_rows(url), read_rows(url, "mem_tree_chunks")
    schema.upgrade(url)
    assert shared(read_rows(url), jobs) == jobs
    assert read_rows(url, "mem_tree_chunks") == chunks


def test_what_is_missing_is_added(url: str) -> None:
    """Columns, indexes and the other tables; afterwards nothing differs from the models."""
    schema.upgrade(url)
    assert schema.check(url) == []
    assert {
        "idx_mem_tree_jobs_ready",
        "idx_mem_tree_jobs_kind",
        "idx_mem_tree_jobs_dedupe_active",
        "idx_mem_tree_jobs_claim",
    } <= index_names(url)


def test_unknown_columns_and_tables_are_kept(url: str) -> None:
    """What belongs to the other program stays, with its values, and is no difference."""
    with connect(url) as connection:
        connection.execute(text("ALTER TABLE mem_tree_jobs ADD COLUMN their_note TEXT"))
        connection.execute(text("UPDATE mem_tree_jobs SET their_note = id"))
        connection.execute(text("CREATE TABLE theirs (id TEXT PRIMARY KEY)"))
        connection.execute(text("CREATE INDEX their_index ON mem_tree_jobs (created_at_ms)"))
        connection.execute(text("INSERT INTO theirs VALUES ('kept')"))
    schema.upgrade(url)
    assert all(row["their_note"] == row["id"] for row in read_rows(url))
    assert read_rows(url, "theirs") == [{"id": "kept"}]
    assert "their_index" in index_names(url)
    assert schema.check(url) == []


def test_a_full_dedupe_index_is_made_partial(url: str) -> None:
    """An index of the right name that also covers settled rows would block their keys for ever."""
    with connect(url) as connection:
        connection.execute(text("CREATE UNIQUE INDEX idx_mem_tree_jobs_dedupe_active ON mem_tree_jobs (dedupe_key)"))
    schema.upgrade(url)
    assert schema.check(url) == []


def test_an_index_of_the_same_meaning_is_left(url: str) -> None:
    """The contract's own index, however it is spaced and cased, is adopted as it is."""
    statement = (
        "CREATE UNIQUE INDEX idx_mem_tree_jobs_dedupe_active ON mem_tree_jobs(dedupe_key)"
        "  WHERE dedupe_key IS NOT NULL  AND status IN ('ready','running')"
    )
    with connect(url) as connection:
        connection.execute(text(statement))
        before = identity_of_index(connection)
    schema.upgrade(url, "0005")  # the next one gives its column the collation of bytes on PostgreSQL
    with connect(url) as connection:
        assert identity_of_index(connection) == before


def test_a_column_that_another_program_has_added_already_is_adopted(url: str) -> None:
    """Half of our columns present, from an upgrade by hand perhaps, is no error."""
    with connect(url) as connection:
        column = f"claim_token {foreign_file.whole_number(url)} NOT NULL DEFAULT 0"
        connection.execute(text(f"ALTER TABLE mem_tree_jobs ADD COLUMN {column}"))
    schema.upgrade(url)
    assert schema.check(url) == []


@pytest.mark.parametrize("status", ["ready", "running"])
def test_two_active_rows_of_one_key_stop_the_upgrade(url: str, status: str) -> None:
    """One SchemaError that says what to do, and the file is as it was."""
    with connect(url) as connection:
        insert_job(connection, 900, "seal", "ready", "twice")
        insert_job(connection, 901, "seal", status, "twice")
    before = read_rows(url)
    with pytest.raises(SchemaError, match="idx_mem_tree_jobs_dedupe_active") as raised:
        schema.upgrade(url)
    assert "settle or delete" in str(raised.value)
    assert read_rows(url) == before
    assert schema.current(url) is None


def test_after_mending_the_upgrade_goes_through(url: str) -> None:
    """The error is no dead end."""
    with connect(url) as connection:
        insert_job(connection, 900, "seal", "ready", "twice")
        insert_job(connection, 901, "seal", "ready", "twice")
    with pytest.raises(SchemaError):
        schema.upgrade(url)
    with connect(url) as connection:
        connection.execute(text("UPDATE mem_tree_jobs SET status = 'cancelled' WHERE id = 'job-901'"))
    schema.upgrade(url)
    assert schema.check(url) == []


def test_settled_rows_may_share_a_key(url: str) -> None:
    """Any number of them, beside one active row, is no duplicate."""
    with connect(url) as connection:
        for number, status in enumerate(["done", "done", "failed", "cancelled", "ready"], start=900):
            insert_job(connection, number, "seal", status, "shared")
    schema.upgrade(url)
    assert schema.check(url) == []


def test_a_table_of_another_meaning_is_not_touched(empty_database_url: str) -> None:
    """A table of our name without our columns belongs to somebody else: one error that says so."""
    with connect(empty_database_url) as connection:
        connection.execute(text("CREATE TABLE mem_tree_jobs (id TEXT PRIMARY KEY, title TEXT)"))
    with pytest.raises(SchemaError, match="mem_tree_jobs exists without its column kind"):
        schema.upgrade(empty_database_url)
    with connect(empty_database_url) as connection:
        assert [column["name"] for column in inspect(connection).get_columns("mem_tree_jobs")] == ["id", "title"]


def test_another_program_can_go_on_inserting(url: str) -> None:
    """Contract §1: an insert that names only contract columns works after the upgrade, and the job runs."""
    schema.upgrade(url)
    with connect(url) as connection:
        insert_job(connection, 900, "extract_chunk", "ready")
    with Cortex.open(url, clock=ManualClock(), delegates=FakeDelegates()) as cortex:
        cortex.drain_until_idle()
        assert cortex.get_job("job-900").status is JobStatus.DONE


def test_an_adopted_file_works(url: str) -> None:
    """Its expired rows are recovered, its retired rows purged, its ready rows run; unknown kinds wait."""
    schema.upgrade(url)
    with Cortex.open(url, clock=ManualClock(), delegates=FakeDelegates()) as cortex:
        assert tuple(cortex.bootstrap()) == (10, 7)
        cortex.drain_until_idle()
        assert cortex.status().by_kind["from_the_future"] == dict.fromkeys(["cancelled", "done", "failed"], 1) | {
            "ready": 2
        }
        # Their payloads fit one kind only, so the others fail for that reason, each by itself.
        assert set(cortex.status().failed_by_reason) == {"why", "malformed_payload"}
    assert len(read_rows(url)) == len(foreign_file.KINDS) * len(foreign_file.STATUSES) - 10


def test_the_hosts_own_version_table_is_untouched(url: str) -> None:
    """A host application's Alembic may live in the same database: its revision is not ours."""
    with connect(url) as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('host-7')"))
    schema.upgrade(url)
    schema.downgrade(url, "base")
    schema.upgrade(url)
    with connect(url) as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all() == ["host-7"]
    assert schema.check(url) == []
