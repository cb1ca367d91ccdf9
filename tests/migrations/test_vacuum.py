"""On PostgreSQL a claim goes on costing the same, whatever has been run, and whatever the server has counted."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import event, insert, text

import foreign_file
from conftest import MakeDatabase
from tinycortex import Cortex, schema
from tinycortex.models import JobRow
from tinycortex.testing import FakeDelegates, JobRowFactory, ManualClock

ROWS = 10_000
RUN = 1_000


@pytest.fixture
def url(make_postgresql: MakeDatabase) -> str:
    """URL of a PostgreSQL database at the newest revision."""
    return make_postgresql(True)


@pytest.fixture
def cortex(url: str, clock: ManualClock, delegates: FakeDelegates) -> Iterator[Cortex]:
    """A queue on that database with many rows that are done."""
    with Cortex.open(url, clock=clock, delegates=delegates) as cortex:
        fill(cortex, done=True)
        yield cortex


def fill(cortex: Cortex, **state: bool) -> None:
    """Insert many rows in one state."""
    template = vars(JobRowFactory.build(**state))
    columns = JobRow.__table__.columns.keys()
    rows = [
        {name: template.get(name) for name in columns} | {"id": f"{template['id']}:{number:05}", "dedupe_key": None}
        for number in range(ROWS)
    ]
    with cortex.transaction() as session:
        session.execute(insert(JobRow), rows)


def vacuum(cortex: Cortex) -> None:
    """Clean up, as the server does by itself."""
    with cortex.database.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.exec_driver_sql("VACUUM ANALYZE mem_tree_jobs")


def pages_of_a_claim(cortex: Cortex) -> int:
    """Return how many pages a claim reads, by the server's own account; it is taken back."""
    seen: list[tuple[str, Any]] = []

    def collect(_connection: object, _cursor: object, statement: str, parameters: object, *_rest: object) -> None:
        seen.append((statement, parameters))

    with cortex.transaction() as session:
        event.listen(cortex.database.engine, "before_cursor_execute", collect)
        taken_back = session.begin_nested()
        cortex.jobs.claim_next(session=session)
        event.remove(cortex.database.engine, "before_cursor_execute", collect)
        taken_back.rollback()
        ((statement, parameters),) = [one for one in seen if "FOR UPDATE" in one[0]]
        taken_back = session.begin_nested()
        explained = f"EXPLAIN (ANALYZE, BUFFERS) {statement}"
        plan = "\n".join(line for (line,) in session.connection().exec_driver_sql(explained, parameters))
        taken_back.rollback()
    found = re.search(r"Buffers: (.*)", plan)
    assert found is not None
    return sum(int(pages) for pages in re.findall(r"(?:hit|read)=(\d+)", found[1]))


def test_a_claim_reads_no_more_once_many_jobs_have_run_and_been_cleaned_up(cortex: Cortex) -> None:
    """What they have left in the index of ready rows is taken out of it."""
    fill(cortex)
    vacuum(cortex)
    at_first = pages_of_a_claim(cortex)
    for _ in range(RUN // 100):
        cortex.jobs.mark_done_many(cortex.jobs.claim_many(100))
    uncleaned = pages_of_a_claim(cortex)
    vacuum(cortex)
    assert pages_of_a_claim(cortex) <= at_first + 3 < uncleaned


@pytest.mark.parametrize("before", ["done", "delayed"])
def test_a_claim_reads_no_more_where_the_server_expects_nothing(cortex: Cortex, before: str) -> None:
    """It has counted rows that were all done, or not due for long, before a burst of others came."""
    fill(cortex, **{before: True})
    vacuum(cortex)
    fill(cortex)
    unexpected = pages_of_a_claim(cortex)
    vacuum(cortex)
    assert unexpected <= 2 * pages_of_a_claim(cortex)


def test_the_server_cleans_up_long_before_a_fifth_of_the_rows_has_changed(url: str) -> None:
    """As long as the revision holds; the table has the server's own settings again below it."""
    with foreign_file.connect(url) as connection:
        options = connection.execute(text("SELECT reloptions FROM pg_class WHERE relname = 'mem_tree_jobs'")).scalar()
    assert "autovacuum_vacuum_scale_factor=0.01" in (options or [])
    schema.downgrade(url, "0005")
    with foreign_file.connect(url) as connection:
        options = connection.execute(text("SELECT reloptions FROM pg_class WHERE relname = 'mem_tree_jobs'")).scalar()
    assert options is None
