"""docs/postgresql.md: what a reader pastes into psql runs, and shows what is said to be seen."""

import re
from pathlib import Path

import pytest
from sqlalchemy import text

import foreign_file
from conftest import MakeDatabase
from tinycortex import Database
from tinycortex.config import DatabaseSettings
from tinycortex.testing import JobRowFactory, insert_rows

PAGE = Path(__file__).parents[2] / "docs" / "postgresql.md"
QUERIES = re.findall(r"^```sql\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def url(make_postgresql: MakeDatabase) -> str:
    """URL of a queue on PostgreSQL with jobs in every state, some of them from long ago."""
    url = make_postgresql(True)
    database = Database(DatabaseSettings(url=url))
    now_ms = database.clock.now_ms()
    insert_rows(
        database,
        JobRowFactory.build(kind="seal", now_ms=now_ms - 60_000),
        JobRowFactory.build(kind="seal", now_ms=now_ms - 5_000),
        JobRowFactory.build(kind="extract_chunk", now_ms=now_ms - 5_000),
        JobRowFactory.build(kind="extract_chunk", now_ms=now_ms, delayed=True),
        JobRowFactory.build(kind="seal", now_ms=now_ms, running=True),
        JobRowFactory.build(kind="seal", now_ms=now_ms - 1_000, failed=True),
        JobRowFactory.build(kind="seal", now_ms=now_ms - 3 * 86_400_000, failed=True),
    )
    database.dispose()
    return url


def ask(url: str, column: str) -> list[dict[str, object]]:
    """Run the one query of the page that has a column, and return what it shows."""
    (query,) = [query for query in QUERIES if re.search(rf"\b{column}\b", query)]
    with foreign_file.connect(url) as connection:
        return [dict(row) for row in connection.execute(text(query)).mappings()]


def test_what_waits_is_shown_by_kind_and_age(url: str) -> None:
    """What is not due yet is not counted, and the oldest comes first."""
    seal, extract = ask(url, "due")
    assert (seal["kind"], seal["due"]) == ("seal", 2)
    assert (extract["kind"], extract["due"]) == ("extract_chunk", 1)
    assert 60 <= int(str(seal["oldest_s"])) < 120


def test_leases_are_shown_by_worker(url: str) -> None:
    """With what is left of the one that ends first."""
    (held,) = ask(url, "lease_left_s")
    assert held["running"] == 1
    assert 0 < int(str(held["lease_left_s"])) <= 300


def test_failures_of_the_day_are_shown(url: str) -> None:
    """Older ones are not."""
    (failed,) = ask(url, "last_ms")
    assert (failed["kind"], failed["failed"]) == ("seal", 1)


def test_the_state_of_the_table_is_shown(url: str) -> None:
    """One row, with the sizes as people read them."""
    (state,) = ask(url, "n_dead_tup")
    assert re.fullmatch(r"\d+ \w+", str(state["indexes"]))


def test_a_transaction_that_is_left_open_is_shown(url: str) -> None:
    """The oldest first, so that this one is among them."""
    with foreign_file.connect(url) as reader:
        reader.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
        (pid,) = reader.execute(text("SELECT pg_backend_pid() FROM mem_tree_jobs LIMIT 1")).one()
        assert pid in [row["pid"] for row in ask(url, "backend_xmin")]


def test_every_query_of_the_page_is_tested() -> None:
    """One test above for each."""
    assert len(QUERIES) == 5
