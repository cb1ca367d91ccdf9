"""A schema of the queue's own, and two queues in two schemas of one database."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel

from background import until
from postgresql_server import psycopg_url
from tinycortex import Cortex, JobStatus, NewJob, Settings, schema
from tinycortex.config import DatabaseSettings, WorkerSettings
from tinycortex.errors import SchemaMissingError
from tinycortex.testing import FakeDelegates

Run = Callable[..., tuple[int, str, str]]
OpenIn = Callable[[str | None], Cortex]


class Note(BaseModel):
    text: str = ""


@pytest.fixture
def owner(empty_database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(psycopg_url(empty_database_url), autocommit=True) as connection:
        yield connection


@pytest.fixture
def open_in(empty_database_url: str) -> Iterator[OpenIn]:
    """Open a queue in a schema, made when it is not there; closed at the end."""
    with ExitStack() as opened:

        def open_one(name: str | None) -> Cortex:
            schema.upgrade(empty_database_url, schema=name)
            settings = Settings(
                database=DatabaseSettings(url=empty_database_url, schema_name=name), worker=WorkerSettings(idle_ms=5)
            )
            return opened.enter_context(Cortex.open(empty_database_url, settings=settings, delegates=FakeDelegates()))

        yield open_one


def list_tables(owner: psycopg.Connection[Any]) -> dict[str, set[str]]:
    rows = owner.execute(
        "SELECT table_schema, table_name FROM information_schema.tables WHERE table_schema IN ('public', 'a', 'b')"
    ).fetchall()
    return {name: {table for where, table in rows if where == name} for name, _table in rows}


def test_every_command_works_in_a_schema_of_its_own(
    run: Run, empty_database_url: str, owner: psycopg.Connection[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upgrade, enqueue, work, look, check, and down again; nothing is ever made in another schema."""
    monkeypatch.setenv("TINYCORTEX_DATABASE__URL", empty_database_url)
    monkeypatch.setenv("TINYCORTEX_DATABASE__SCHEMA", "a")
    assert run("db", "upgrade")[0] == 0
    assert set(list_tables(owner)) == {"a"}
    note = tmp_path / "note.md"
    note.write_text("# Note\n\nAda asked Grace for the figures. They are due on Friday.\n")
    assert run("ingest", str(note))[0] == 0
    assert run("work", "--drain")[0] == 0
    assert json.loads(run("status", "--json")[1])["by_status"]["done"] > 0
    assert run("doctor")[0] == 0
    assert run("db", "check")[0] == 0
    assert run("db", "current")[1].strip() == schema.HEAD
    schema.downgrade(empty_database_url, "base", schema="a")
    assert run("db", "current")[0] == 1
    assert set(list_tables(owner)) == {"a"}


def test_two_queues_do_not_see_each_other(open_in: OpenIn) -> None:
    """The same key is active in both, each worker runs its own job only, and a wake-up of the other is a hint."""
    queues = {name: open_in(name) for name in (None, "a", "b")}
    ran: dict[str | None, list[str]] = {name: [] for name in queues}
    stop = threading.Event()
    for name, queue in queues.items():
        queue.handler("note", payload=Note)(lambda _ctx, payload, name=name: ran[name].append(payload.text))
        assert queue.enqueue(NewJob.of("note", Note(text=f"of {name}"), dedupe_key="same")) is not None
    threads = [threading.Thread(target=queues[name].run_sync, args=(stop,)) for name in (None, "a")]
    for thread in threads:
        thread.start()
    until(lambda: ran[None] and ran["a"])
    stop.set()
    for thread in threads:
        thread.join()
    assert ran == {None: ["of None"], "a": ["of a"], "b": []}
    assert [job.status for job in queues["b"].jobs.list_jobs()] == [JobStatus.READY]


def test_a_downgrade_of_one_leaves_the_other(open_in: OpenIn, empty_database_url: str) -> None:
    """Each has a version table of its own."""
    kept = open_in("b")
    kept.enqueue(NewJob(kind="note", payload_json="{}"))
    open_in("a")
    schema.downgrade(empty_database_url, "base", schema="a")
    assert schema.current(empty_database_url, schema="a") is None
    assert schema.check(empty_database_url, schema="b") == []
    assert len(kept.jobs.list_jobs()) == 1


def test_a_schema_without_tables_is_told(empty_database_url: str, open_in: OpenIn) -> None:
    """Those of another schema are not taken for them."""
    open_in(None)
    settings = Settings(database=DatabaseSettings(url=empty_database_url, schema_name="a"))
    with pytest.raises(SchemaMissingError):
        Cortex.open(empty_database_url, settings=settings)


@pytest.mark.parametrize("name", [None, "a"])
def test_the_offline_script_makes_an_empty_database_ready(
    empty_database_url: str, owner: psycopg.Connection[Any], name: str | None
) -> None:
    """It is run as it stands, by whoever may; what it made checks clean."""
    owner.execute(schema.sql(empty_database_url, schema=name).encode())
    assert schema.check(empty_database_url, schema=name) == []
    assert set(list_tables(owner)) == {name or "public"}
