"""One queue across event loops, threads, forks and time zones."""

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import BaseModel

from background import outcome, program
from tinycortex import Cortex, JobStatus, NewJob
from tinycortex.cli import main
from tinycortex.testing import ManualClock, NewJobFactory

OpenCortex = Callable[..., Cortex]

FORK = """
import os, sys, threading, warnings
from pydantic import BaseModel
from sqlalchemy import event
from tinycortex import Cortex, NewJob

warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)

class Note(BaseModel):
    number: int = 0

def work(cortex, who):
    for number in range(who * 25, who * 25 + 25):
        cortex.enqueue(NewJob.of("note", Note(number=number), dedupe_key=f"note:{number}"))
        cortex.run_once()
    cortex.close()

cortex = Cortex.open(sys.argv[1])
opened = []
event.listen(cortex.database.engine, "connect", lambda *_: opened.append(os.getpid()))

@cortex.handler("note", payload=Note)
async def note(ctx, payload):
    assert "tinycortex-heartbeat" in {thread.name for thread in threading.enumerate()}  # alive, of this process
    sys.stdout.write(f"{payload.number}\\n")
    sys.stdout.flush()

cortex.enqueue(NewJob.of("note", Note(number=1_000)))
assert cortex.run_once()  # connections, the loop's thread, the heartbeat and the worker's lock are all there
children = []
for who in range(1, 5):
    child = os.fork()
    if child == 0:
        work(cortex, who)
        assert os.getpid() in opened  # a connection must not cross a fork
        sys.exit(0)
    children.append(child)
work(cortex, 0)
for child in children:
    assert os.waitpid(child, 0)[1] == 0
with cortex:
    while cortex.run_once():
        pass
"""

DST_CHANGES = [datetime(2024, 4, 6, tzinfo=UTC), datetime(2024, 9, 28, tzinfo=UTC), datetime(2024, 3, 10, tzinfo=UTC)]
"""Days in which the clocks of Auckland (the first two) or of Los Angeles are set."""


class Note(BaseModel):
    number: int = 0


def check_integrity(database_url: str) -> None:
    with closing(sqlite3.connect(database_url.removeprefix("sqlite:///"))) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_parent_and_forked_children_write_to_one_file(cortex: Cortex, database_url: str) -> None:
    """Each opens connections, threads and a worker's lock of its own; every job runs once, and the file is sound."""
    with program(FORK, database_url) as parent:
        code, out, err = outcome(parent)
    assert (code, err) == (0, "")
    assert sorted(int(number) for number in out.split()) == [*range(125), 1_000]
    assert cortex.jobs.count_by_status()[JobStatus.DONE] == 126
    check_integrity(database_url)


def test_one_queue_works_through_one_event_loop_after_another(cortex: Cortex) -> None:
    """What a loop leaves behind is no burden to the next, with an asynchronous handler and the whole worker."""
    ran: list[int] = []
    loops: list[asyncio.AbstractEventLoop] = []
    stops: list[asyncio.Event] = []

    async def note(_ctx: object, payload: Note) -> None:
        ran.append(payload.number)
        loops.append(asyncio.get_running_loop())
        stops[-1].set()

    async def main() -> None:
        stops.append(asyncio.Event())
        await cortex.run(stops[-1])

    cortex.handler("note", payload=Note)(note)
    for number in range(3):
        cortex.enqueue(NewJob.of("note", Note(number=number)))
        asyncio.run(main())
    assert ran == [0, 1, 2]
    assert len(set(loops)) == 3


def test_eight_threads_use_one_queue(cortex: Cortex, database_url: str) -> None:
    """Enqueuing, working, reading, cancelling: no thread is told that something belongs to another one."""
    ran: list[int] = []
    errors: list[BaseException] = []
    cortex.handler("note", payload=Note)(lambda _ctx, payload: ran.append(payload.number))

    def use(who: int) -> None:
        try:
            for number in range(who * 10, who * 10 + 10):
                cortex.enqueue(NewJob.of("note", Note(number=number)))
                cortex.run_once()
                cortex.status()
            cortex.cancel(str(cortex.enqueue(NewJob.of("later", Note()))))
        except BaseException as error:  # noqa: BLE001 - none is right
            errors.append(error)

    threads = [threading.Thread(target=use, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cortex.drain_until_idle()
    assert errors == []
    assert sorted(ran) == list(range(80))
    check_integrity(database_url)


# Time zones


# Spelt out as rules, so that they hold on a machine without a table of zones.
ZONES = {"UTC": "UTC0", "Auckland": "NZST-12NZDT,M9.5.0,M4.1.0/3", "Los Angeles": "PST8PDT,M3.2.0,M11.1.0"}


@pytest.fixture(params=ZONES)
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let the machine's local time be that of a zone."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", ZONES[request.param])
        time.tzset()
        yield str(request.param)
    time.tzset()


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("day", DST_CHANGES)
def test_a_day_has_eight_flushes_wherever_it_is(cortex: Cortex, clock: ManualClock, day: datetime) -> None:
    """Blocks are cut in UTC, also on a day on which the local clock is set."""
    start_ms = int(day.timestamp() * 1000)
    clock.set(start_ms)
    for _ in range(24 * 4):
        cortex.tick()
        cortex.drain_until_idle()
        clock.advance(15 * 60_000)
    flushes = cortex.jobs.list_jobs(kind="flush_stale")
    assert [job.dedupe_key for job in reversed(flushes)] == [
        f"flush_stale:{day:%Y-%m-%d}-h{block}" for block in range(8)
    ]
    assert [job.created_at_ms for job in reversed(flushes)] == [start_ms + block * 10_800_000 for block in range(8)]


def test_an_instant_is_shown_with_its_offset(
    zone: str,
    cortex: Cortex,
    database_url: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever reads a time knows which one it is."""
    job_id = str(cortex.enqueue(NewJobFactory.build(available_at_ms=1_700_000_000_123)))
    monkeypatch.setattr("sys.argv", ["tinycortex", "--database-url", database_url, "jobs", "show", job_id])
    with pytest.raises(SystemExit):
        main()
    assert "2023-11-14T22:13:20.123+00:00" in capfd.readouterr().out, zone


@pytest.mark.usefixtures("zone")
def test_the_machines_clock_is_the_epochs(database_url: str) -> None:
    """A stored time is milliseconds of UTC, whatever the local time is."""
    before_ms = time.time_ns() // 1_000_000
    with Cortex.open(database_url) as cortex:
        job = cortex.get_job(str(cortex.enqueue(NewJobFactory.build())))
    assert before_ms <= job.created_at_ms <= time.time_ns() // 1_000_000


def test_a_file_has_the_same_time_in_every_zone(zone: str, cortex: Cortex, tmp_path: Path) -> None:
    """The time of an ingested file is that of its last change, in UTC."""
    note = tmp_path / "note.md"
    note.write_text("Ada asked Grace for the figures of the quarter.\n")
    os.utime(note, (1_700_000_000, 1_700_000_000))
    (source,) = cortex.ingestor.list_sources([note]).sources
    cortex.ingestor.ingest_file(source)
    with cortex.database.reading() as session:
        stored = session.connection().exec_driver_sql("SELECT DISTINCT timestamp_ms FROM mem_tree_chunks").scalars()
        assert stored.all() == [1_700_000_000_000], zone
