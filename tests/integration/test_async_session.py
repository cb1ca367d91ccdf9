"""Enqueue inside an AsyncSession, on SQLite through aiosqlite."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from tinycortex import Cortex, JobStatus, PayloadError
from tinycortex.domain.jobs import NewJob
from tinycortex.models import ChunkRow
from tinycortex.testing import ChunkRowFactory, FakeDelegates, ManualClock, NewJobFactory


@pytest.fixture
def url(make_sqlite: Callable[[bool], str]) -> str:
    return make_sqlite(True)


@pytest.fixture
def cortex(url: str, clock: ManualClock, delegates: FakeDelegates) -> "Callable[[], Cortex]":
    return lambda: Cortex.open(url, clock=clock, delegates=delegates)


@asynccontextmanager
async def async_session(url: str) -> AsyncIterator[AsyncSession]:
    engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
    try:
        async with AsyncSession(engine) as session:
            yield session
    finally:
        await engine.dispose()


def chunk_ids(cortex: Cortex) -> list[str]:
    with cortex.database.reading() as session:
        return list(session.scalars(select(ChunkRow.id)))


@pytest.mark.parametrize("commit", [True, False])
def test_the_job_commits_or_vanishes_with_the_session(cortex: Callable[[], Cortex], url: str, commit: bool) -> None:
    """With an AsyncSession the awaited enqueue belongs to the session's own transaction."""

    async def produce(queue: Cortex) -> str | None:
        async with async_session(url) as session:
            session.add(ChunkRowFactory.build(id="c1"))
            job_id = await queue.enqueue(NewJobFactory.build(chunk_id="c1"), session=session)
            await (session.commit() if commit else session.rollback())
            return job_id

    with cortex() as queue:
        job = queue.jobs.find_job(str(asyncio.run(produce(queue))))
        assert (job is not None and job.status is JobStatus.READY) is commit
        assert (chunk_ids(queue) == ["c1"]) is commit


def test_a_duplicate_is_none(cortex: Callable[[], Cortex], url: str) -> None:
    """A suppressed duplicate is None after the await, as without one."""

    async def produce(queue: Cortex) -> str | None:
        async with async_session(url) as session:
            return await queue.enqueue(NewJobFactory.build(dedupe_key="k"), session=session)

    with cortex() as queue:
        queue.enqueue(NewJobFactory.build(dedupe_key="k"))
        assert asyncio.run(produce(queue)) is None


def test_a_malformed_payload_raises(cortex: Callable[[], Cortex], url: str) -> None:
    """The payload is checked for an AsyncSession as well."""

    async def produce(queue: Cortex) -> None:
        async with async_session(url) as session:
            await queue.enqueue(NewJob(kind="seal", payload_json="{}"), session=session)

    with cortex() as queue, pytest.raises(PayloadError):
        asyncio.run(produce(queue))
