"""Notices between processes: when they are sent, who hears them, and what becomes of a worker that hears none."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NoReturn

import psycopg
import pytest
from pydantic import BaseModel
from sqlalchemy import make_url, text

from background import until, working
from tinycortex import Cortex, Database, JobStatus, NewJob, Settings, schema
from tinycortex.config import DatabaseSettings, WorkerSettings
from tinycortex.dialects import postgresql_watch
from tinycortex.dialects.postgresql_watch import NotificationWatch
from tinycortex.domain.clock import SystemClock

OpenCortex = Callable[..., Cortex]

PATIENT = WorkerSettings(idle_ms=600_000)
"""Whoever is not woken up sleeps through any test."""

LISTENERS = "FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%LISTEN %' AND query LIKE 'DO%'"

FENCE = "a fence"


class Note(BaseModel):
    text: str = ""


class Ear:
    """Hears all notices of a queue."""

    def __init__(self, connection: "psycopg.Connection[Any]", channel: str) -> None:
        self._connection = connection
        self._channel = channel
        connection.execute(f"LISTEN {channel}".encode())

    def hear(self, *queues: Cortex) -> int:
        """Return how many notices ``queues`` have sent since the last call."""
        for cortex in queues:
            until_announced(cortex)
        self._connection.execute("SELECT pg_notify(%s, %s)", [self._channel, FENCE])
        heard = 0
        for notice in self._connection.notifies():
            if notice.payload == FENCE:
                break
            heard += 1
        return heard


@pytest.fixture
def administrator(database_url: str) -> Iterator["psycopg.Connection[Any]"]:
    """A connection of nobody that has to do with the queue."""
    url = make_url(database_url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def ear(administrator: "psycopg.Connection[Any]") -> Ear:
    row = administrator.execute(postgresql_watch._CHANNEL.encode()).fetchone()
    assert row is not None
    return Ear(administrator, row[0])


@pytest.fixture
def idler(open_cortex: OpenCortex) -> Cortex:
    """A queue, whose worker will have nothing to do."""
    return with_handler(open_cortex(Settings(worker=PATIENT), clock=SystemClock()))


def with_handler(cortex: Cortex) -> Cortex:
    cortex.handler("note", payload=Note)(lambda _ctx, _payload: None)
    return cortex


def until_idle(cortex: Cortex) -> None:
    """Return when the worker has done the first tick's flush, waits, and is told of what comes."""
    until(lambda: cortex.jobs.list_jobs(status=JobStatus.DONE) and cortex._wakeup._idle and cortex._wakeup.is_live)


def until_done(cortex: Cortex, job_id: str | None) -> None:
    until(lambda: cortex.get_job(str(job_id)).status is JobStatus.DONE)


def until_announced(cortex: Cortex) -> None:
    """Return when whatever the queue had to announce is announced."""
    cortex._wakeup._herald.submit(int).result()


def note() -> NewJob:
    return NewJob.of("note", Note())


def test_a_notice_follows_the_commit(cortex: Cortex, ear: Ear) -> None:
    """None is sent before it, and none after a rollback; one transaction sends one."""
    cortex.enqueue(note())
    assert ear.hear(cortex) == 1
    with cortex.transaction() as session:
        cortex.enqueue(note(), session=session)
        cortex.enqueue_many([note(), note()], session=session)
        assert ear.hear(cortex) == 0
    assert ear.hear(cortex) == 1
    with cortex.transaction() as session:
        cortex.enqueue(note(), session=session)
        session.rollback()
    assert ear.hear(cortex) == 0


def test_what_leaves_no_work_behind_sends_nothing(cortex: Cortex, ear: Ear) -> None:
    """A suppressed duplicate, a claim, a settlement."""
    first = NewJob.of("note", Note(), dedupe_key="n")
    with_handler(cortex).enqueue(first)
    assert ear.hear(cortex) == 1
    assert cortex.enqueue(first) is None
    assert cortex.run_once()
    assert ear.hear(cortex) == 0


def test_a_burst_sends_few_notices(cortex: Cortex, ear: Ear) -> None:
    """However many commits there are, they are announced by what fits between them, and the last one is, too."""
    for _ in range(200):
        cortex.enqueue(note())
    assert 1 <= ear.hear(cortex) < 200


def test_a_closing_queue_has_announced_everything(open_cortex: OpenCortex, cortex: Cortex, ear: Ear) -> None:
    """A program may enqueue and end."""
    one = open_cortex()
    one.enqueue(note())
    one.close()
    assert ear.hear(cortex) == 1


def test_ones_own_notices_wake_nobody(cortex: Cortex, open_cortex: OpenCortex) -> None:
    """This process's workers know already."""
    watch = cortex.database.watch()
    assert watch.wait(0)  # connected just now
    cortex.enqueue(note())
    until_announced(cortex)
    assert not watch.wait(0.05)
    open_cortex().enqueue(note())
    assert watch.wait(60)
    watch.close()


def test_schemas_of_one_database_do_not_wake_each_other(database_url: str) -> None:
    """Each holds a queue of its own, however long its name is."""
    names = ["a" * 63, "b" * 63]
    with ExitStack() as stack:
        queues = []
        for name in names:
            schema.upgrade(database_url, schema=name)
            settings = Settings(database=DatabaseSettings(url=database_url, schema_name=name))
            queues.append(stack.enter_context(Cortex.open(database_url, settings=settings)))
        one, other = queues
        watch = one.database.watch()
        stack.callback(watch.close)
        assert watch.wait(0)  # connected just now
        other.enqueue(note())
        until_announced(other)
        assert not watch.wait(0.05)
        same = stack.enter_context(Cortex.open(database_url, settings=one.settings))
        same.enqueue(note())
        assert watch.wait(60)


def test_a_listener_that_is_cut_off_listens_again(
    idler: Cortex,
    open_cortex: OpenCortex,
    administrator: "psycopg.Connection[Any]",
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And looks at once for what it may have missed; the log tells of the loss once, and of its end once."""
    producer = open_cortex()
    with caplog.at_level(logging.INFO, logger="tinycortex.dialects"), working(idler):
        for number in (1, 2):
            until_idle(idler)
            assert administrator.execute(f"SELECT pg_terminate_backend(pid) {LISTENERS}".encode()).rowcount == 1
            until_done(idler, producer.enqueue(note()))
            until(lambda: len(caplog.records) == 2 * number)  # noqa: B023 - called at once
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "workers are not told of new jobs, and look for themselves",
        "workers are told of new jobs again",
    ] * 2


def test_a_server_that_is_away_is_asked_at_growing_pauses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Never more than ten seconds apart, never all listeners at once, with one record, and no secret in it."""
    now_s, asked_at = [1_000.0], []
    monkeypatch.setattr(postgresql_watch, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def refuse() -> NoReturn:
        asked_at.append(now_s[0])
        raise psycopg.OperationalError("no route, password=hunter2hunter2")

    def sleep(timeout_s: float, _connection: object = None) -> None:
        now_s[0] += timeout_s

    watch = NotificationWatch(refuse, "me")
    monkeypatch.setattr(watch, "_sleep", sleep)
    while len(asked_at) < 12:
        assert not watch.wait(1)
        assert not watch.is_live
    watch.close()
    pauses = [after - before for before, after in pairwise(asked_at)]
    for number, pause_s in enumerate(pauses):
        longest_s = min(0.1 * 2**number, 10)
        assert longest_s / 2 <= pause_s <= longest_s + 1e-6
    assert len(set(pauses)) > len(pauses) / 2
    (record,) = caplog.records
    assert "hunter2" not in record.getMessage()


def test_without_notices_workers_look_for_themselves(
    open_cortex: OpenCortex, database_url: str, administrator: "psycopg.Connection[Any]", ear: Ear
) -> None:
    """Nobody listens, nobody notifies, and jobs of others run all the same."""
    quiet = DatabaseSettings(url=database_url, notify=False)
    settings = Settings(database=quiet, worker=WorkerSettings(idle_ms=20))
    cortex, producer = with_handler(open_cortex(settings, clock=SystemClock())), open_cortex(settings)
    with working(cortex):
        for _ in range(3):
            until(lambda: cortex.jobs.list_jobs(status=JobStatus.DONE) and cortex._wakeup._idle)
            until_done(cortex, producer.enqueue(note()))
        listeners = administrator.execute(f"SELECT pid {LISTENERS}".encode()).fetchall()
        assert listeners == []
    assert ear.hear(cortex, producer) == 0


@pytest.mark.parametrize("notify", [True, False])
def test_without_notices_nothing_is_prepared(open_cortex: OpenCortex, database_url: str, notify: bool) -> None:
    """A pooler that hands out a session for one transaction would execute what another session has prepared."""
    cortex = open_cortex(Settings(database=DatabaseSettings(url=database_url, notify=notify)))
    with cortex.database.engine.connect() as connection:
        for _ in range(10):
            connection.execute(text("SELECT 1"))
        prepared = connection.execute(text("SELECT count(*) FROM pg_prepared_statements")).scalar_one()
    assert (prepared > 0) == notify


def test_without_notices_a_session_holds_nothing(empty_database_url: str) -> None:
    """What a session is told at its start a pooler refuses, and what it is told later stays behind in it."""
    database = Database(DatabaseSettings(url=empty_database_url, schema_name="elsewhere", notify=False))
    for block in (database.transaction, database.reading):
        with block() as session:
            driver: Any = session.connection().connection.dbapi_connection
            assert driver.info.options == ""
            wanted = [("lock_timeout", "15s"), ("search_path", "elsewhere")]
            assert [(name, session.execute(text(f"SHOW {name}")).scalar_one()) for name, _value in wanted] == wanted
    with driver.cursor() as cursor:
        assert cursor.execute("SHOW lock_timeout").fetchone() == ("0",)
    database.dispose()
