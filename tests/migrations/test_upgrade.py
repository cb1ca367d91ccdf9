"""The way up and down, and that the result is what the models say (design §6)."""

from io import StringIO
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

import foreign_file
from tinycortex import Cortex, SchemaError, SchemaMissingError, SchemaOutdatedError, StorageError, schema
from tinycortex.dialects import dialect_for
from tinycortex.domain.jobs import ACTIVE_KEY_PREDICATE
from tinycortex.models import Base
from tinycortex.testing import FakeDelegates, NewJobFactory

REVISIONS = [
    script.revision for script in ScriptDirectory.from_config(schema._config(StringIO())).walk_revisions()
]  # newest first
EARLIER = REVISIONS[1:]
SCHEMA_MAKERS = ["upgrade", "create_all", "sql"]


def make_schema(url: str, way: str) -> None:
    if way == "upgrade":
        schema.upgrade(url)
    elif way == "create_all":
        with foreign_file.connect(url) as connection:
            Base.metadata.create_all(connection)
        schema.stamp(url)
    else:
        script = schema.sql(url)
        with foreign_file.connect(url) as connection:
            for statement in script.split(";\n"):
                if statement.strip() and statement.strip() not in {"BEGIN", "COMMIT"}:
                    connection.execute(text(statement.replace(":", "\\:")))


def normal(predicate: str) -> str:
    return "".join(predicate.lower().split())


def test_head_is_the_newest_revision() -> None:
    """``HEAD`` is written out, so that opening a database need not load Alembic; here it is kept true."""
    script = ScriptDirectory.from_config(schema._config(StringIO()))
    assert script.get_heads() == [schema.HEAD]
    assert script.get_bases() == ["0001"]


@pytest.mark.parametrize("way", SCHEMA_MAKERS)
def test_the_schema_is_what_the_models_say(empty_database_url: str, way: str) -> None:
    """Made by upgrade, by create_all and stamp, or by the offline script run by hand, it checks clean."""
    make_schema(empty_database_url, way)
    assert schema.check(empty_database_url) == []


@pytest.mark.parametrize("way", SCHEMA_MAKERS)
def test_autogenerate_has_nothing_to_say(empty_database_url: str, way: str) -> None:
    """Without any filter of ours but for the version table, ``alembic check`` would be clean."""
    make_schema(empty_database_url, way)
    options = {
        "compare_type": True,
        "compare_server_default": True,
        "include_name": lambda name, kind, _parents: (kind, name) != ("table", schema.VERSION_TABLE),
    }
    with foreign_file.connect(empty_database_url) as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []


@pytest.mark.parametrize("way", SCHEMA_MAKERS)
def test_the_stored_predicate_is_the_models(empty_database_url: str, way: str) -> None:
    """The dedupe index is partial, and its stored predicate is the one that an enqueue names."""
    make_schema(empty_database_url, way)
    with foreign_file.connect(empty_database_url) as connection:
        indexes = {index["name"]: index for index in inspect(connection).get_indexes("mem_tree_jobs")}
        stored = indexes["idx_mem_tree_jobs_dedupe_active"]
        where = str(stored["dialect_options"][f"{connection.dialect.name}_where"])
    assert stored["unique"]
    assert stored["column_names"] == ["dedupe_key"]
    plain = dialect_for(empty_database_url).plain_predicate
    assert normal(plain(where)) == normal(plain(ACTIVE_KEY_PREDICATE))


@pytest.mark.parametrize("way", SCHEMA_MAKERS)
def test_a_finished_row_gives_its_key_back(empty_database_url: str, way: str) -> None:
    """However the schema was made, K can be enqueued again once K is done."""
    make_schema(empty_database_url, way)
    with Cortex.open(empty_database_url, delegates=FakeDelegates()) as cortex:
        assert cortex.enqueue(NewJobFactory.build(dedupe_key="K")) is not None
        assert cortex.enqueue(NewJobFactory.build(dedupe_key="K")) is None
        assert cortex.run_once()
        assert cortex.enqueue(NewJobFactory.build(dedupe_key="K")) is not None


def test_create_all_followed_by_upgrade_is_an_adoption(empty_database_url: str) -> None:
    """No "table already exists"; the upgrade takes over what create_all made."""
    with foreign_file.connect(empty_database_url) as connection:
        Base.metadata.create_all(connection)
        foreign_file.fill(connection)
    before = foreign_file.read_rows(empty_database_url)
    schema.upgrade(empty_database_url)
    assert schema.check(empty_database_url) == []
    assert foreign_file.read_rows(empty_database_url) == before


@pytest.mark.parametrize("revision", EARLIER)
def test_an_upgrade_from_any_revision_keeps_every_row(empty_database_url: str, revision: str) -> None:
    """Rows written at an earlier revision are all there at the newest, unchanged."""
    schema.upgrade(empty_database_url, revision)
    with foreign_file.connect(empty_database_url) as connection:
        foreign_file.fill(connection)
    before = foreign_file.read_rows(empty_database_url)
    schema.upgrade(empty_database_url)
    assert foreign_file.shared(foreign_file.read_rows(empty_database_url), before) == before
    assert schema.check(empty_database_url) == []


@pytest.mark.parametrize("revision", [*EARLIER, "base"])
def test_down_and_up_again_keeps_every_row(empty_database_url: str, revision: str) -> None:
    """Down to any revision, even to none, and up again loses no row and no contract column."""
    schema.upgrade(empty_database_url)
    with foreign_file.connect(empty_database_url) as connection:
        foreign_file.fill(connection)
    before = foreign_file.read_rows(empty_database_url)
    chunks = foreign_file.read_rows(empty_database_url, "mem_tree_chunks")
    schema.downgrade(empty_database_url, revision)
    below = foreign_file.read_rows(empty_database_url)
    assert below == foreign_file.shared(before, below)
    assert schema.current(empty_database_url) == (None if revision == "base" else revision)
    schema.upgrade(empty_database_url)
    assert foreign_file.read_rows(empty_database_url) == before
    assert foreign_file.read_rows(empty_database_url, "mem_tree_chunks") == chunks
    assert schema.check(empty_database_url) == []


def test_downgraded_to_base_only_the_contract_is_left(empty_database_url: str) -> None:
    """Going down takes our columns back and nothing of the contract."""
    schema.upgrade(empty_database_url)
    schema.downgrade(empty_database_url, "base")
    with foreign_file.connect(empty_database_url) as connection:
        columns = [column["name"] for column in inspect(connection).get_columns("mem_tree_jobs")]
    assert columns[0] == "id"
    assert columns[-1] == "failure_class"
    assert len(columns) == 15


def test_the_contracts_columns_come_first_and_in_its_order(empty_database_url: str) -> None:
    """Contract §1: names and order of the jobs table, ours behind them."""
    schema.upgrade(empty_database_url)
    with foreign_file.connect(empty_database_url) as connection:
        columns = [column["name"] for column in inspect(connection).get_columns("mem_tree_jobs")]
    assert columns[:15] == [
        "id",
        "kind",
        "payload_json",
        "dedupe_key",
        "status",
        "attempts",
        "max_attempts",
        "available_at_ms",
        "locked_until_ms",
        "last_error",
        "created_at_ms",
        "started_at_ms",
        "completed_at_ms",
        "failure_reason",
        "failure_class",
    ]


@pytest.mark.parametrize("table", sorted(Base.metadata.tables))
def test_our_own_columns_never_stop_another_programs_insert(empty_database_url: str, table: str) -> None:
    """Contract §1: what stands behind the contract's columns is nullable or has a server default."""
    schema.upgrade(empty_database_url, "0001")
    with foreign_file.connect(empty_database_url) as connection:
        contract = {column["name"] for column in inspect(connection).get_columns(table)}
    ours = [column for column in Base.metadata.tables[table].columns if column.name not in contract]
    assert [column.name for column in ours if not column.nullable and column.server_default is None] == []


def test_upgrading_twice_does_nothing(empty_database_url: str) -> None:
    """At head already, an upgrade changes no row and no index."""
    schema.upgrade(empty_database_url)
    with foreign_file.connect(empty_database_url) as connection:
        foreign_file.fill(connection)
    before = foreign_file.read_rows(empty_database_url)
    schema.upgrade(empty_database_url)
    assert foreign_file.read_rows(empty_database_url) == before


# Opening


def test_a_database_without_schema_cannot_be_opened(empty_database_url: str) -> None:
    """The message names the command that fixes it, and nothing is created."""
    with pytest.raises(SchemaMissingError, match="tinycortex db upgrade"):
        Cortex.open(empty_database_url, delegates=FakeDelegates())
    assert schema.current(empty_database_url) is None


@pytest.mark.parametrize("revision", EARLIER)
def test_an_outdated_database_cannot_be_opened(empty_database_url: str, revision: str) -> None:
    """The message names both revisions and the command."""
    schema.upgrade(empty_database_url, revision)
    with pytest.raises(SchemaOutdatedError, match=f"{revision}.*{schema.HEAD}.*tinycortex db upgrade"):
        Cortex.open(empty_database_url, delegates=FakeDelegates())


def test_a_database_of_a_newer_tinycortex_cannot_be_opened(empty_database_url: str) -> None:
    """A revision that we do not know is not guessed at, neither by opening nor by upgrading."""
    schema.upgrade(empty_database_url)
    with foreign_file.connect(empty_database_url) as connection:
        connection.execute(text(f"UPDATE {schema.VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(SchemaOutdatedError, match="9999"):
        Cortex.open(empty_database_url, delegates=FakeDelegates())
    with pytest.raises(SchemaError, match="9999"):
        schema.upgrade(empty_database_url)


def test_an_unknown_revision_is_one_of_our_errors(empty_database_url: str) -> None:
    """Alembic's own error does not leak."""
    with pytest.raises(SchemaError, match="nope"):
        schema.upgrade(empty_database_url, "nope")


def test_a_database_that_drifted_is_reported(database_url: str) -> None:
    """A dropped table, a dropped column and a changed index show in ``check``, a line each."""
    with foreign_file.connect(database_url) as connection:
        connection.execute(text("DROP INDEX idx_mem_tree_jobs_dedupe_active"))
        connection.execute(text("CREATE UNIQUE INDEX idx_mem_tree_jobs_dedupe_active ON mem_tree_jobs (dedupe_key)"))
        connection.execute(text("ALTER TABLE mem_tree_jobs DROP COLUMN heals"))
        connection.execute(text("DROP TABLE mem_tree_score"))
        connection.execute(text("DROP TABLE mem_tree_entity_index"))
    faults = schema.check(database_url)
    assert sorted(faults[:-1]) == [
        "column heals of mem_tree_jobs is missing",
        "table mem_tree_entity_index is missing",
        "table mem_tree_score is missing",
    ]
    assert faults[-1].startswith("index idx_mem_tree_jobs_dedupe_active is ")


def test_an_awkward_path(tmp_path: Path) -> None:
    """Percent signs, spaces and non-ASCII in the path are no format strings and no URL escapes."""
    folder = tmp_path / "100% ünusual %(here)s"
    folder.mkdir()
    url = f"sqlite:///{folder / 'a b.db'}"
    schema.upgrade(url)
    assert schema.check(url) == []
    assert (folder / "a b.db").is_file()
    assert "CREATE TABLE" in schema.sql(url)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """The error says which database could not be opened."""
    with pytest.raises(StorageError, match="missing"):
        schema.upgrade(f"sqlite:///{tmp_path / 'missing' / 'chunks.db'}")
