"""A connection that breaks, at whatever moment: the worker goes on by itself, and nothing is lost or done twice."""

import logging
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel
from sqlalchemy import text

from background import until, working
from tinycortex import Cortex, Done, JobStatus, NewJob
from tinycortex.errors import StorageUnavailableError

CLAIM = "SET status = 'running'"
SETTLEMENT = "SET status = 'done'"

Administrator = psycopg.Connection[Any]


class Note(BaseModel):
    text: str = ""


def end_backend(administrator: Administrator, pid: int) -> None:
    """Have the server end one connection, and return when it has."""
    assert administrator.execute("SELECT pg_terminate_backend(%s, 60000)", [pid]).fetchone() == (True,)


def end_all(administrator: Administrator) -> None:
    """Have the server end every connection to this database but the administrator's."""
    others = "datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    for (pid,) in administrator.execute(f"SELECT pid FROM pg_stat_activity WHERE {others}").fetchall():
        administrator.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])


def write(session: Any) -> None:
    session.execute(text("INSERT INTO effects VALUES (1)"))


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("word", [CLAIM, SETTLEMENT, "INSERT INTO effects"])
def test_a_connection_that_breaks_costs_nothing(
    hurried: Cortex,
    administrator: Administrator,
    *,
    effects: Callable[[], int],
    at_statement: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    moment: str,
    word: str,
) -> None:
    """In a claim or in a settlement, before its statement or before its commit: one run, one effect, one record."""
    ran: list[int] = []

    def note(ctx: Any, _payload: Note) -> Done:
        ran.append(ctx.job.attempts)
        return Done(writes=write)

    hurried.handler("note", payload=Note)(note)
    job_id = str(hurried.enqueue(NewJob.of("note", Note())))
    broken: list[int] = []

    def end(connection: psycopg.Connection[Any]) -> None:
        broken.append(connection.info.backend_pid)
        end_backend(administrator, connection.info.backend_pid)

    at_statement(hurried, moment, word, end)
    with working(hurried):
        until(lambda: hurried.get_job(job_id).status is JobStatus.DONE)
    job = hurried.get_job(job_id)
    assert (len(broken), ran, job.attempts, effects()) == (1, [1], 1, 1)
    (record,) = caplog.records
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)
    assert "trying again every 5 ms" in record.getMessage()


@pytest.mark.parametrize("way", ["run_sync", "run"])
def test_connections_that_break_under_a_handler_are_not_its_affair(
    hurried: Cortex, administrator: Administrator, effects: Callable[[], int], way: str
) -> None:
    """It ends as it would have, and its result is written through another connection."""
    ran: list[int] = []

    def note(ctx: Any, _payload: Note) -> Done:
        ran.append(ctx.job.attempts)
        end_all(administrator)
        return Done(writes=write)

    hurried.handler("note", payload=Note)(note)
    job_id = str(hurried.enqueue(NewJob.of("note", Note())))
    with working(hurried, way):
        until(effects)
    job = hurried.get_job(job_id)
    assert (ran, job.status, job.attempts, effects()) == ([1], JobStatus.DONE, 1, 1)


def test_a_handler_that_meets_the_broken_connection_is_put_off(hurried: Cortex, administrator: Administrator) -> None:
    """The database's fault is not its own: it runs again, and its attempt is not burnt."""
    ran: list[int] = []

    def note(ctx: Any, _payload: Note) -> None:
        ran.append(ctx.job.attempts)
        with hurried.transaction() as session:
            if len(ran) == 1:
                end_backend(administrator, session.connection().connection.driver_connection.info.backend_pid)  # type: ignore[union-attr]  # psycopg's
            session.execute(text("SELECT 1"))

    hurried.handler("note", payload=Note)(note)
    job_id = str(hurried.enqueue(NewJob.of("note", Note())))
    with working(hurried):
        until(lambda: hurried.get_job(job_id).status is JobStatus.DONE)
    assert (ran, hurried.get_job(job_id).attempts) == ([1, 1], 1)


def test_a_producer_is_told_and_may_try_again(
    hurried: Cortex, administrator: Administrator, at_statement: Callable[..., None]
) -> None:
    """What broke before its commit has written nothing."""
    at_statement(
        hurried, "after", "INSERT INTO mem_tree_jobs", lambda found: end_backend(administrator, found.info.backend_pid)
    )
    job = NewJob(kind="note", payload_json="{}", dedupe_key="once")
    with pytest.raises(StorageUnavailableError):
        hurried.enqueue(job)
    assert hurried.enqueue(job) is not None
    assert len(hurried.jobs.list_jobs()) == 1


def test_a_pool_of_broken_connections_is_not_noticed(hurried: Cortex, administrator: Administrator) -> None:
    """An idle connection that the server has closed is replaced before it is used, without an error to anybody."""
    hurried.enqueue(NewJob(kind="note", payload_json="{}"))
    end_all(administrator)
    assert hurried.enqueue(NewJob(kind="note", payload_json="{}")) is not None
    assert len(hurried.jobs.list_jobs()) == 2
