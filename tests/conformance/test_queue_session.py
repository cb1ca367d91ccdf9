"""A producer's rows and its job commit together (spec: introduction; design §1.3)."""

import asyncio
from collections.abc import Callable

import pytest
from sqlalchemy import create_engine, select, text
from sqlalchemy.orm import Session

from tinycortex import Cortex, InvalidInputError, JobStatus, NewJob, PayloadError
from tinycortex.models import ChunkRow
from tinycortex.testing import ChunkRowFactory, NewJobFactory


class HostError(Exception):
    """What a host's own code raises."""


def fail_after(cortex: Cortex, produce: Callable[[Session], object]) -> None:
    """Let a producer's transaction fail after ``produce``."""

    def fail() -> None:
        with cortex.transaction() as session:
            produce(session)
            raise HostError

    with pytest.raises(HostError):
        fail()


def chunk_ids(cortex: Cortex) -> list[str]:
    with cortex.database.reading() as session:
        return list(session.scalars(select(ChunkRow.id)))


def test_a_committed_transaction_keeps_row_and_job(cortex: Cortex) -> None:
    """The chunk and its extraction job appear together."""
    with cortex.transaction() as session:
        session.add(ChunkRowFactory.build(id="c1"))
        job_id = cortex.enqueue(NewJobFactory.build(chunk_id="c1"), session=session)
    assert chunk_ids(cortex) == ["c1"]
    assert cortex.get_job(str(job_id)).status is JobStatus.READY


@pytest.mark.parametrize("open_one", ["transaction", "reading"])
def test_a_result_that_nobody_reads_holds_nobody_up(
    cortex: Cortex, open_cortex: Callable[..., Cortex], open_one: str
) -> None:
    """However long somebody keeps it: its snapshot ends with its transaction."""
    for _ in range(3):
        cortex.enqueue(NewJobFactory.build())
    with getattr(cortex.database, open_one)() as session:
        unread = session.execute(text("SELECT id FROM mem_tree_jobs"))
    open_cortex().enqueue(NewJobFactory.build())
    assert cortex.enqueue(NewJobFactory.build()) is not None
    assert len(cortex.jobs.list_jobs()) == 5
    unread.close()


def test_a_rolled_back_transaction_keeps_neither(cortex: Cortex) -> None:
    """When the caller fails after its enqueue, no job is left that has no chunk."""

    def produce(session: Session) -> None:
        session.add(ChunkRowFactory.build(id="c1"))
        cortex.enqueue(NewJobFactory.build(chunk_id="c1"), session=session)

    fail_after(cortex, produce)
    assert chunk_ids(cortex) == []
    assert cortex.jobs.list_jobs() == []


def test_a_rolled_back_transaction_does_not_hold_its_key(cortex: Cortex) -> None:
    """A key that was never committed suppresses nobody."""
    fail_after(cortex, lambda session: cortex.enqueue(NewJobFactory.build(chunk_id="c1"), session=session))
    assert cortex.enqueue(NewJobFactory.build(chunk_id="c1")) is not None


def test_nobody_sees_the_job_before_the_commit(cortex: Cortex) -> None:
    """An open transaction's job can be neither read nor claimed by others."""
    with cortex.transaction() as session:
        job_id = cortex.enqueue(NewJobFactory.build(), session=session)
        assert cortex.jobs.find_job(str(job_id)) is None


def test_a_job_sees_its_twin_of_the_same_transaction(cortex: Cortex) -> None:
    """The dedupe key holds inside one transaction too."""
    with cortex.transaction() as session:
        assert cortex.enqueue_tx(session, NewJobFactory.build(dedupe_key="k")) is not None
        assert cortex.enqueue_tx(session, NewJobFactory.build(dedupe_key="k")) is None


def test_a_suppressed_duplicate_leaves_the_transaction_usable(cortex: Cortex) -> None:
    """A conflict is no error, so what the caller wrote before and writes after it commits."""
    cortex.enqueue(NewJobFactory.build(dedupe_key="k"))
    with cortex.transaction() as session:
        session.add(ChunkRowFactory.build(id="before"))
        assert cortex.enqueue(NewJobFactory.build(dedupe_key="k"), session=session) is None
        session.add(ChunkRowFactory.build(id="after"))
    assert sorted(chunk_ids(cortex)) == ["after", "before"]


def test_a_refused_job_leaves_the_transaction_usable(cortex: Cortex) -> None:
    """A payload is checked before anything is written, so the caller may go on without the job."""
    with cortex.transaction() as session:
        session.add(ChunkRowFactory.build(id="c1"))
        with pytest.raises(PayloadError):
            cortex.enqueue(NewJob(kind="seal", payload_json="{}"), session=session)
    assert chunk_ids(cortex) == ["c1"]


def test_rows_that_the_caller_has_not_flushed_commit_too(cortex: Cortex) -> None:
    """An enqueue between ``add`` and commit loses none of the caller's pending rows."""
    with cortex.transaction() as session, session.no_autoflush:
        session.add(ChunkRowFactory.build(id="c1"))
        cortex.enqueue(NewJobFactory.build(), session=session)
    assert chunk_ids(cortex) == ["c1"]


@pytest.mark.parametrize("commit", [True, False])
def test_a_session_of_the_hosts_own_engine(cortex: Cortex, database_url: str, commit: bool) -> None:
    """Any session on this database will do; its owner decides whether the job is kept."""
    engine = create_engine(database_url)
    with Session(engine) as session:
        session.add(ChunkRowFactory.build(id="c1"))
        job_id = cortex.enqueue(NewJobFactory.build(chunk_id="c1"), session=session)
        if commit:
            session.commit()
        else:
            session.rollback()
    engine.dispose()
    assert (cortex.jobs.find_job(str(job_id)) is not None) is commit
    assert (chunk_ids(cortex) == ["c1"]) is commit


def test_enqueue_does_not_end_the_hosts_transaction(cortex: Cortex, database_url: str) -> None:
    """Enqueue neither commits nor rolls back what is not its own."""
    engine = create_engine(database_url)
    with Session(engine) as session:
        cortex.enqueue(NewJobFactory.build(), session=session)
        assert session.in_transaction()
    engine.dispose()
    assert cortex.jobs.list_jobs() == []


def test_a_savepoint_takes_its_job_back(cortex: Cortex) -> None:
    """What is enqueued in a savepoint goes with it, and the rest stays."""
    with cortex.transaction() as session:
        kept = cortex.enqueue(NewJobFactory.build(), session=session)
        with session.begin_nested() as savepoint:
            dropped = cortex.enqueue(NewJobFactory.build(), session=session)
            savepoint.rollback()
    assert cortex.jobs.find_job(str(kept)) is not None
    assert cortex.jobs.find_job(str(dropped)) is None


def test_many_jobs_in_the_callers_transaction(cortex: Cortex) -> None:
    """The bulk form rolls back with its caller as well."""
    jobs = [NewJobFactory.build(), NewJobFactory.build()]
    fail_after(cortex, lambda session: cortex.enqueue_many(jobs, session=session))
    assert cortex.jobs.list_jobs() == []


def test_a_second_transaction_inside_the_first_is_refused_at_once(cortex: Cortex) -> None:
    """It would wait for the one around it, which waits for it; the error says to hand the session on."""
    with cortex.transaction() as session:
        job_id = cortex.enqueue(NewJobFactory.build(), session=session)
        with pytest.raises(InvalidInputError, match="session=session"):
            cortex.enqueue(NewJobFactory.build())
    assert [job.id for job in cortex.jobs.list_jobs()] == [job_id]


async def _enqueue_after(cortex: Cortex, ended: asyncio.Event) -> str | None:
    await ended.wait()
    return cortex.enqueue(NewJobFactory.build())


def test_a_task_begun_inside_a_transaction_may_enqueue_after_it(cortex: Cortex) -> None:
    """Only a transaction that is still open is in the way."""

    async def main() -> str | None:
        ended = asyncio.Event()
        with cortex.transaction():
            task = asyncio.create_task(_enqueue_after(cortex, ended))
        ended.set()
        return await task

    assert asyncio.run(main()) is not None


def test_many_jobs_vanish_with_a_hosts_own_transaction(cortex: Cortex, database_url: str) -> None:
    """Whatever engine the session is of, and though its driver has begun no transaction yet."""
    host = create_engine(database_url)
    with Session(host) as session:
        cortex.enqueue_many([NewJobFactory.build() for _ in range(3)], session=session)
        session.rollback()
    host.dispose()
    assert cortex.jobs.list_jobs() == []
