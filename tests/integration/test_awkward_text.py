"""Text that could be mistaken for something else: fault messages, and characters that end strings."""

import json
import sqlite3
from contextlib import closing

import pytest
from pydantic import BaseModel

from tinycortex import Cortex, Done, InvalidInputError, JobContext, JobFailure, JobStatus, NewJob
from tinycortex.cli import main

FAULTS = "database disk image is malformed; database is locked; database or disk is full; unable to open database file"


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


def test_a_nul_in_a_row_of_another_program_is_seen_and_harms_nothing(
    cortex: Cortex, database_url: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The payload is shown whole, refused for good, and the next job runs; what we store has no NUL."""
    cortex.handler("note", payload=Note)(lambda _ctx, _payload: None)
    with closing(sqlite3.connect(database_url.removeprefix("sqlite:///"))) as connection, connection:
        connection.execute(
            "INSERT INTO mem_tree_jobs (id, kind, payload_json, available_at_ms, created_at_ms) VALUES (?, ?, ?, 0, 0)",
            ["job:1", "note", '{"text": "before\x00after"}'],
        )
    next_id = str(cortex.enqueue(NewJob.of("note", Note())))
    assert cortex.drain_until_idle() == 2
    job = cortex.get_job("job:1")
    assert (job.status, job.failure_reason) == (JobStatus.FAILED, "malformed_payload")
    assert "\x00" not in str(job.last_error)
    assert cortex.get_job(next_id).status is JobStatus.DONE
    monkeypatch.setattr("sys.argv", ["tinycortex", "--database-url", database_url, "jobs", "show", "job:1", "--json"])
    with pytest.raises(SystemExit):
        main()
    assert json.loads(capfd.readouterr().out)["payload_json"] == '{"text": "before\x00after"}'


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
