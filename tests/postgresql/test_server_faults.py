"""What a server answers instead of doing its work: each answer is waited out, told once, and burns no attempt."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Event, Thread
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel
from sqlalchemy import ExceptionContext, event, make_url, text

from background import BOUND_S, until, working
from postgresql_server import OwnServer, psycopg_url
from tinycortex import Cortex, Done, JobStatus, NewJob
from tinycortex.errors import StorageError, StorageUnavailableError

MET = 5
"""So often a fault is met before it is lifted: more than once, as a record for each would show."""

Outage = Callable[[OwnServer, str], AbstractContextManager[None]]


class Note(BaseModel):
    text: str = ""


def watch(cortex: Cortex) -> list[str | None]:
    """Return the SQLSTATEs of the storage faults that a queue meets from now on, as a list that grows."""
    met: list[str | None] = []

    def note(context: ExceptionContext) -> None:
        assert isinstance(context.chained_exception, StorageError)
        met.append(getattr(context.original_exception, "sqlstate", None))

    event.listen(cortex.database.engine, "handle_error", note)
    return met


@contextmanager
def server_away(server: OwnServer, _url: str) -> Iterator[None]:
    server.kill()
    try:
        yield
    finally:
        server.start()


@contextmanager
def changed(server: OwnServer, what: str, setting: str, back: str) -> Iterator[None]:
    """Change something for whoever connects anew, which everybody then has to."""
    with psycopg.connect(psycopg_url(server.url_of("postgres")), autocommit=True) as administrator:

        def change(how: str) -> None:
            administrator.execute(f"ALTER {what} {how}".encode())
            # Those, too, that are just connecting, by the old setting, and belong to no database yet.
            others = "backend_type = 'client backend' AND pid <> pg_backend_pid()"
            administrator.execute(
                f"SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE {others}".encode()
            )

        change(setting)
        try:
            yield
        finally:
            change(back)


def no_connection_left(server: OwnServer, _url: str) -> AbstractContextManager[None]:
    """Refuse connections as a server does whose last one is taken."""
    return changed(server, "ROLE ordinary", "CONNECTION LIMIT 0", "CONNECTION LIMIT -1")


def read_only(server: OwnServer, url: str) -> AbstractContextManager[None]:
    """Take no writes, as a standby."""
    name, only = make_url(url).database, "default_transaction_read_only"
    return changed(server, f"DATABASE {name}", f"SET {only} = on", f"RESET {only}")


@contextmanager
def table_locked(_server: OwnServer, url: str) -> Iterator[None]:
    """Keep the jobs locked, as a change of the table's columns does."""
    with psycopg.connect(psycopg_url(url)) as other:
        other.execute("LOCK TABLE mem_tree_jobs IN ACCESS EXCLUSIVE MODE")
        yield


@contextmanager
def statements_timed_out(server: OwnServer, url: str) -> Iterator[None]:
    """End statements that take long, and have all of them take long."""
    name = make_url(url).database
    setting = ("SET statement_timeout = '20ms'", "RESET statement_timeout")
    with changed(server, f"DATABASE {name}", *setting), table_locked(server, url):
        yield


OUTAGES: list[tuple[Outage, set[str | None]]] = [
    (server_away, {None}),
    (no_connection_left, {None}),
    (read_only, {"25006"}),
    (table_locked, {"55P03"}),
    (statements_timed_out, {"57014"}),
]


@pytest.mark.parametrize("way", ["run_sync", "run"])
@pytest.mark.parametrize(("outage", "states"), OUTAGES)
def test_a_worker_outlasts_it(
    open_hurried: Callable[[str], Cortex],
    own_server: OwnServer,
    own_url: str,
    *,
    caplog: pytest.LogCaptureFixture,
    outage: Outage,
    states: set[str | None],
    way: str,
) -> None:
    """It begins under a handler; the result is kept, producers are told, and afterwards the worker goes on."""
    cortex = open_hurried(own_url)
    ran: list[int] = []

    def note(ctx: Any, payload: Note) -> None:
        ran.append(ctx.job.attempts)
        if payload.text == "first":
            over.enter_context(outage(own_server, own_url))
            met.clear()
            begun.set()

    met, begun = watch(cortex), Event()
    cortex.handler("note", payload=Note)(note)
    first = str(cortex.enqueue(NewJob.of("note", Note(text="first"))))
    with ExitStack() as over, working(cortex, way):
        assert begun.wait(BOUND_S)
        until(lambda: len(met) >= MET)
        with pytest.raises(StorageError):
            cortex.enqueue(NewJob.of("note", Note()))
        seen = set(met)
        over.close()
        until(lambda: cortex.get_job(first).status is JobStatus.DONE)
        second = str(cortex.enqueue(NewJob.of("note", Note(text="second"))))
        until(lambda: cortex.get_job(second).status is JobStatus.DONE)
    assert states <= seen
    assert ran == [1, 1]
    assert {(job.status, job.attempts) for job in cortex.jobs.list_jobs()} == {(JobStatus.DONE, 1)}
    records = Counter((record.name, record.levelno, record.exc_info) for record in caplog.records)
    # One for each sort of fault: the connection's end may be one, and what comes of it another.
    assert records.pop(("tinycortex.worker.upkeep", logging.WARNING, None)) <= 2
    assert records.pop(("tinycortex.worker.heartbeat", logging.WARNING, None), 1) == 1
    # One when the listener is cut off, and one when it listens again; an outage may begin and end with a cut.
    assert records.pop(("tinycortex.dialects.postgresql_watch", logging.WARNING, None), 0) <= 4
    assert not records


def test_a_database_that_takes_no_writes_is_not_written_to(
    open_hurried: Callable[[str], Cortex], own_server: OwnServer, own_url: str
) -> None:
    """Not by a connection either that has served readers before."""
    with read_only(own_server, own_url):
        cortex = open_hurried(own_url)
        assert cortex.jobs.list_jobs() == []
        with pytest.raises(StorageUnavailableError, match="read-only"):
            cortex.enqueue(NewJob.of("note", Note()))
    assert cortex.enqueue(NewJob.of("note", Note())) is not None


NOT_THE_JOBS = ["40001", "40P01", "55P03", "57014", "25006", "53200", "53300", "57P01", "57P03", "08006"]


@pytest.mark.parametrize("where", ["writes", "handler"])
def test_an_answer_that_says_nothing_of_the_job_burns_no_attempt(
    hurried: Cortex, effects: Callable[[], int], where: str
) -> None:
    """In the settlement the result waits and is written once; in a handler's own transaction the job comes again."""
    answers = set(NOT_THE_JOBS)
    ran: Counter[str] = Counter()

    def write(session: Any, state: str) -> None:
        session.execute(text("INSERT INTO effects VALUES (1)"))
        if state in answers:
            answers.remove(state)
            refuse(session, state)

    def note(_ctx: Any, payload: Note) -> Done:
        ran[payload.text] += 1
        if where == "writes":
            return Done(writes=lambda session: write(session, payload.text))
        with hurried.transaction() as session:
            write(session, payload.text)
        return Done()

    hurried.handler("note", payload=Note)(note)
    hurried.enqueue_many(NewJob.of("note", Note(text=state)) for state in NOT_THE_JOBS)
    with working(hurried):
        until(lambda: hurried.jobs.count_by_kind_and_status().get(("note", "done")) == len(NOT_THE_JOBS))
    assert {job.attempts for job in hurried.jobs.list_jobs(kind="note")} == {1}
    assert ran == dict.fromkeys(NOT_THE_JOBS, 1 if where == "writes" else 2)
    assert effects() == len(NOT_THE_JOBS)


def refuse(session: Any, state: str) -> None:
    """Have the server answer with an error."""
    session.execute(text(f"DO $$ BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '{state}'; END $$"))


@pytest.mark.parametrize("state", ["22012", "23505", "42P01", "P0001"])
def test_an_answer_to_what_was_asked_is_a_failed_attempt(
    cortex: Cortex, effects: Callable[[], int], state: str
) -> None:
    """A statement that cannot work is the handler's own affair."""

    def write(session: Any) -> None:
        session.execute(text("INSERT INTO effects VALUES (1)"))
        refuse(session, state)

    cortex.handler("note", payload=Note)(lambda _ctx, _payload: Done(writes=write))
    job_id = str(cortex.enqueue(NewJob.of("note", Note())))
    assert cortex.run_once()
    job = cortex.get_job(job_id)
    assert (job.status, job.attempts, effects()) == (JobStatus.READY, 1, 0)
    assert "refused" in str(job.last_error)


def test_a_deadlock_with_another_program_costs_a_moment(
    open_hurried: Callable[[str], Cortex], own_server: OwnServer, own_url: str
) -> None:
    """The settlement is the one that the server undoes; its result is written when the other one has ended."""
    cortex = open_hurried(own_url)
    ran: list[int] = []
    name = str(make_url(own_url).database)
    with psycopg.connect(psycopg_url(own_server.url_of(name))) as other:
        other.execute("CREATE TABLE counters AS SELECT number, 0 AS value FROM generate_series(1, 2) AS number")
        other.execute("GRANT ALL ON counters TO ordinary")
        other.commit()
        other.execute("SET deadlock_timeout = '60s'")  # it does not look, and so is not the one that is undone
        other.execute("UPDATE counters SET value = value + 10 WHERE number = 2")

        def finish() -> None:
            other.execute("UPDATE counters SET value = value + 10 WHERE number = 1")
            other.commit()

        finishing = Thread(target=finish)

        def write(session: Any) -> None:
            session.execute(text("UPDATE counters SET value = value + 1 WHERE number = 1"))
            if not ended:
                ended.append(1)
                finishing.start()
                until(lambda: is_waiting(own_server, name))
            session.execute(text("UPDATE counters SET value = value + 1 WHERE number = 2"))

        def note(ctx: Any, _payload: Note) -> Done:
            ran.append(ctx.job.attempts)
            return Done(writes=write)

        ended: list[int] = []
        met = watch(cortex)
        cortex.handler("note", payload=Note)(note)
        job_id = str(cortex.enqueue(NewJob.of("note", Note())))
        with working(cortex):
            until(lambda: cortex.get_job(job_id).status is JobStatus.DONE)
        finishing.join(BOUND_S)
        values = other.execute("SELECT value FROM counters").fetchall()
    assert met == ["40P01"]
    assert (ran, cortex.get_job(job_id).attempts, values) == ([1], 1, [(11,), (11,)])


def is_waiting(server: OwnServer, name: str) -> bool:
    """Tell whether a connection to the database waits for a row."""
    with psycopg.connect(psycopg_url(server.url_of(name))) as administrator:
        waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = %s AND wait_event_type = 'Lock'"
        return administrator.execute(waiting, [name]).fetchone() is not None
