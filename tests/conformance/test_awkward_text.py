"""Text that could be mistaken for something else: fault messages, and characters that end strings."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import text

from tinycortex import Cortex, Done, InvalidInputError, JobContext, JobFailure, JobStatus, NewJob
from tinycortex.errors import SourceError

FAULTS = "database disk image is malformed; database is locked; database or disk is full; unable to open database file"

REFUSED = ["a\x00b", "a\ud800b", "\udfffb"]


class Note(BaseModel):
    text: str = ""


def test_a_text_about_storage_faults_is_only_text(database_url: str) -> None:
    """An e-mail that quotes the messages goes all the way to a summary, and no fault is seen in it."""
    with Cortex.open(database_url) as cortex:
        cortex.ingestor.ingest_text("email", "inbox", f"Ada wrote to Grace: {FAULTS}.\n", timestamp_ms=1)
        cortex.drain_until_idle()
        cortex.enqueue_flush_stale(0)
        cortex.drain_until_idle()
        jobs = cortex.jobs.list_jobs()
        with cortex.database.reading() as session:
            statement = "SELECT content FROM mem_tree_summaries"
            summaries = session.connection().exec_driver_sql(statement).scalars().all()
    assert {job.status for job in jobs} == {JobStatus.DONE}
    assert {job.attempts for job in jobs} == {1}
    assert any(FAULTS in summary for summary in summaries)


def test_a_nul_in_what_a_handler_plans_costs_only_its_attempt(cortex: Cortex) -> None:
    """A follow-up that no database holds is refused where it is built, and the reason is on the row, mended."""

    def note(_ctx: JobContext, _payload: Note) -> Done:
        try:
            return Done(follow_ups=[NewJob.of("note", Note(), dedupe_key="a\x00b")])
        except InvalidInputError as error:
            raise JobFailure.unrecoverable("bad\x00key", f"a\x00b: {error}") from error

    cortex.handler("note", payload=Note)(note)
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    assert cortex.run_once()
    job = cortex.get_job(job_id)
    assert (job.status, job.failure_reason) == (JobStatus.FAILED, "bad\ufffdkey")
    assert "a\ufffdb: " in str(job.last_error)
    assert "\x00" not in str(job.last_error)


def test_a_nul_that_is_written_as_an_escape_comes_back(cortex: Cortex) -> None:
    """In JSON it is six plain characters, which every database holds."""
    seen: list[str] = []
    cortex.handler("note", payload=Note)(lambda _ctx, payload: seen.append(payload.text))
    job_id = str(cortex.enqueue(NewJob.of("note", Note(text="a\x00b"))))
    assert "\x00" not in cortex.get_job(job_id).payload_json
    assert cortex.run_once()
    assert seen == ["a\x00b"]


@pytest.mark.parametrize("bad", REFUSED)
def test_what_not_every_database_holds_is_refused_at_the_door(cortex: Cortex, bad: str) -> None:
    """Payload, key, and a document's text: nothing is written, and the message does not show the text."""
    attempts: list[Callable[[], Any]] = [
        lambda: NewJob(kind="note", payload_json=f'{{"text": "{bad}"}}'),
        lambda: NewJob(kind="note", payload_json="{}", dedupe_key=bad),
        lambda: cortex.ingestor.ingest_text("chat", bad, "text", timestamp_ms=1),
        lambda: cortex.ingestor.ingest_text("chat", "room", f"Ada asked Grace: {bad}", timestamp_ms=1),
    ]
    for attempt in attempts:
        with pytest.raises((InvalidInputError, SourceError)) as refused:
            attempt()
        assert bad not in str(refused.value)
    assert cortex.jobs.list_jobs() == []


@pytest.mark.parametrize("bad", REFUSED)
def test_what_a_handler_raises_is_kept_mended(cortex: Cortex, bad: str) -> None:
    """The reason of a failure is never lost for a character in it."""

    def note(_ctx: JobContext, _payload: Note) -> None:
        raise ValueError(bad)

    cortex.handler("note", payload=Note)(note)
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    assert cortex.run_once()
    job = cortex.get_job(job_id)
    mended = "".join("\N{REPLACEMENT CHARACTER}" if char in "\x00\ud800\udfff" else char for char in bad)
    assert (job.status, job.attempts, job.last_error) == (JobStatus.READY, 1, f"ValueError: {mended}")


@pytest.mark.parametrize("bad", REFUSED)
def test_what_writes_cannot_store_costs_only_its_attempt(cortex: Cortex, bad: str) -> None:
    """An application's own text is its affair; the settlement of others goes on."""
    with cortex.transaction() as session:
        session.execute(text("CREATE TABLE kept (note VARCHAR(10))"))

    def write(session: Any) -> None:
        session.execute(text("INSERT INTO kept VALUES (:note)"), {"note": bad})
        raise ValueError("an engine that stores it does not get away with it")

    cortex.handler("note", payload=Note)(lambda _ctx, _payload: Done(writes=write))
    cortex.handler("other", payload=Note)(lambda _ctx, _payload: None)
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    other_id = str(cortex.enqueue(NewJob.of("other", Note())))
    assert cortex.drain_until_idle() == 2
    job = cortex.get_job(job_id)
    assert (job.status, job.attempts) == (JobStatus.READY, 1)
    assert cortex.get_job(other_id).status is JobStatus.DONE
    with cortex.database.reading() as session:
        assert session.execute(text("SELECT COUNT(*) FROM kept")).scalar_one() == 0
