"""Ids and keys are compared byte by byte on PostgreSQL too, whatever language the database sorts by."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import event, insert, text

import foreign_file
from postgresql_server import Server
from tinycortex import Cortex, JobStatus, schema
from tinycortex.domain.kinds import BUILTIN_KINDS
from tinycortex.models import ChunkRow, JobRow
from tinycortex.testing import ChunkRowFactory, FakeDelegates, JobRowFactory, ManualClock, insert_rows

IDS = ["job:B", "job:a", "job:A", "job:b", "job:-z", "job:z", "job:Z-", "job:_", "job:\xe9", "job:e", "job:\U0001f600"]
BYTEWISE = sorted(IDS)

MANY = 20_000


@pytest.fixture
def language_url(postgresql_server: Server) -> Iterator[str]:
    """URL of a database at the newest revision, in which lower and upper case lie side by side."""
    with postgresql_server.database_in_a_language() as name:
        if name is None:
            pytest.skip("the server knows no language: it was built without ICU, and its system has no en_US.UTF-8")
        url = postgresql_server.url_of(name)
        schema.upgrade(url)
        with foreign_file.connect(url) as connection:
            (found,) = connection.execute(text("SELECT ARRAY(SELECT unnest(ARRAY['B', 'a']) AS x ORDER BY x)")).one()
            assert found == ["a", "B"]
        yield url


@pytest.fixture
def sorted_by_a_language(language_url: str, clock: ManualClock, delegates: FakeDelegates) -> Iterator[Cortex]:
    """A queue on that database."""
    with Cortex.open(language_url, clock=clock, delegates=delegates) as cortex:
        yield cortex


def test_a_schema_whose_texts_are_sorted_by_a_language_differs(postgresql_server: Server) -> None:
    """Before the revision that mends it, and when a column is changed behind it; the line says which column."""
    with postgresql_server.database() as name:
        url = postgresql_server.url_of(name)
        schema.upgrade(url, "0005")
        schema.stamp(url)
        assert any("'mem_tree_chunks', 'id'" in line for line in schema.check(url))
        schema.stamp(url, "0005")
        schema.upgrade(url)
        assert schema.check(url) == []
        with foreign_file.connect(url) as connection:
            connection.execute(text('ALTER TABLE mem_tree_jobs ALTER COLUMN id TYPE TEXT COLLATE "default"'))
        (fault,) = schema.check(url)
        assert "'mem_tree_jobs', 'id'" in fault


def test_equal_times_are_claimed_and_listed_by_the_bytes_of_their_ids(sorted_by_a_language: Cortex) -> None:
    """The same order as on SQLite, so that a queue that moves goes on in it."""
    cortex = sorted_by_a_language
    insert_rows(cortex.database, *(JobRowFactory.build(id=job_id) for job_id in IDS))
    assert [job.id for job in cortex.jobs.list_jobs()] == BYTEWISE[::-1]
    assert [job.id for job in cortex.jobs.claim_many(4)] == BYTEWISE[:4]
    claimed = [cortex.jobs.claim_next() for _ in IDS[4:]]
    assert [job.id for job in claimed if job is not None] == BYTEWISE[4:]


def test_the_newest_of_equal_times_is_the_last_by_its_bytes(sorted_by_a_language: Cortex) -> None:
    """Of failed rows with one key, made in one instant, that one is revived."""
    cortex = sorted_by_a_language
    insert_rows(cortex.database, *(JobRowFactory.build(id=job_id, failed=True, dedupe_key="k") for job_id in IDS))
    assert cortex.retry_all_failed().revived == 1
    (revived,) = cortex.jobs.list_jobs(status=JobStatus.READY)
    assert revived.id == BYTEWISE[-1]


def test_chunks_are_found_in_the_order_of_their_bytes(sorted_by_a_language: Cortex) -> None:
    """As the batches of a re-embedding take them."""
    cortex = sorted_by_a_language
    insert_rows(cortex.database, *(ChunkRowFactory.build(id=chunk_id) for chunk_id in IDS))
    with cortex.transaction() as session:
        found = session.query(ChunkRow.id).order_by(ChunkRow.id).all()
    assert [chunk_id for (chunk_id,) in found] == BYTEWISE


def test_a_claim_among_many_rows_goes_by_its_index(sorted_by_a_language: Cortex) -> None:
    """Each kind's rows are found in order: none is read from end to end, and no more than a few are sorted."""
    cortex = sorted_by_a_language
    template = vars(JobRowFactory.build())
    columns = JobRow.__table__.columns.keys()
    numbers = list(range(MANY))
    random.Random(0).shuffle(numbers)  # noqa: S311 - to mix them, not to hide them
    rows = [
        {name: template.get(name) for name in columns}
        | {"id": f"job:{number}", "dedupe_key": None, "kind": list(BUILTIN_KINDS)[number % len(BUILTIN_KINDS)]}
        for number in numbers
    ]
    seen: list[tuple[str, Any]] = []

    def collect(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
        seen.append((statement, parameters))

    with cortex.transaction() as session:
        session.execute(insert(JobRow), rows)
    with cortex.transaction() as session:
        session.execute(text("ANALYZE mem_tree_jobs"))
    with cortex.transaction() as session:
        event.listen(cortex.database.engine, "before_cursor_execute", collect)
        cortex.jobs.claim_many(20, session=session)
        event.remove(cortex.database.engine, "before_cursor_execute", collect)
        ((statement, parameters),) = [one for one in seen if "FOR UPDATE" in one[0]]
        plan = [line for (line,) in session.connection().exec_driver_sql(f"EXPLAIN {statement}", parameters)]
    assert sum("using idx_mem_tree_jobs_claim" in line for line in plan) == len(BUILTIN_KINDS)
    assert [line for line in plan if "Seq Scan" in line] == []
