"""The processes of the soak: a worker and a producer. ``soak.py`` starts, disturbs and kills them.

A role ends when its standard input does. A worker reads orders from it, one a line: ``clock MS`` steps its
clock to that distance from the machine's, ``full`` lets its connections write no further page, ``room`` ends that.
"""

import asyncio
import logging
import os
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel
from sqlalchemy import event, text
from sqlalchemy.orm import Session

from tinycortex import Cortex, Done, JobContext, JobFailure, NewJob, Settings, StorageError, SystemClock
from tinycortex.config import DatabaseSettings, QueueSettings, SchedulerSettings, WorkerSettings

LEASE_MS = 3_000
TICK_S = 5
BUSY_TIMEOUT_MS = 2_000
REFUSED = "soak_refused"
"""The failure that one job in REFUSED_ONE_IN is made to end with."""
REFUSED_ONE_IN = 500
SLOW_ONE_IN = 300
SLOW_S = 4.0
"""Longer than the lease, so that it ends only when its lease is renewed."""
MAX_ATTEMPTS = 1_000
"""Every kill and every stolen lease takes an attempt, and here they come all the time."""
PAUSE_S = 0.04
LOG_MARK = "record "
_NO_PAGE_MORE, _NO_LIMIT = 1, 2**31

SETTINGS = Settings(
    database=DatabaseSettings(busy_timeout_ms=BUSY_TIMEOUT_MS),
    queue=QueueSettings(lease_ms=LEASE_MS),
    worker=WorkerSettings(recover_ms=1_000, heartbeat_ms=500, disk_full_ms=500),
    scheduler=SchedulerSettings(tick_s=TICK_S),
)


class Number(BaseModel):
    """Who the job is, whatever its row's id: ``<producer's start>-<count>``."""

    name: str
    count: int


class SteppedClock(SystemClock):
    """The machine's clock, ``offset_ms`` away from the truth."""

    offset_ms = 0

    def now_ms(self) -> int:
        """Return the current instant as this process believes it to be (ms)."""
        return super().now_ms() + self.offset_ms


def effect(kind: str, name: str) -> Callable[[Session], object]:
    """Return the writes of a job: one row of the soak's own table, which has no constraint that would hide a double."""
    statement = text("INSERT INTO effects (kind, name) VALUES (:kind, :name)")
    return lambda session: session.execute(statement, {"kind": kind, "name": name})


def register(cortex: Cortex) -> None:
    """Register the handlers: ``first`` in threads, with a follow-up for every other job, and ``then`` on the loop."""

    @cortex.handler("first", payload=Number, max_attempts=MAX_ATTEMPTS)
    def _first(_ctx: JobContext, payload: Number) -> Done:
        if payload.count % REFUSED_ONE_IN == 1:
            raise JobFailure.unrecoverable(REFUSED)
        time.sleep(SLOW_S if payload.count % SLOW_ONE_IN == 0 else random.uniform(0, 0.02))  # noqa: S311
        follow_ups = [NewJob.of("then", payload, dedupe_key=f"then:{payload.name}")] if payload.count % 2 == 0 else []
        return Done(follow_ups=follow_ups, writes=effect("first", payload.name))

    @cortex.handler("then", payload=Number, max_attempts=MAX_ATTEMPTS)
    async def _then(_ctx: JobContext, payload: Number) -> Done:
        await asyncio.sleep(random.uniform(0, 0.02))  # noqa: S311
        return Done(writes=effect("then", payload.name))


def work(url: str, slot: Path, offset_ms: int) -> None:
    """Work until standard input ends, and do what it orders meanwhile."""
    logging.basicConfig(filename=slot.with_suffix(".log"), level=logging.WARNING, format=f"{LOG_MARK}%(message)s")
    clock, stop = SteppedClock(), threading.Event()
    clock.offset_ms = offset_ms
    limit = _NO_LIMIT

    def obey() -> None:
        nonlocal limit
        for line in sys.stdin:
            order, _, argument = line.strip().partition(" ")
            if order == "clock":
                clock.offset_ms = int(argument)
            else:
                limit = _NO_PAGE_MORE if order == "full" else _NO_LIMIT
        stop.set()

    with Cortex.open(url, settings=SETTINGS, clock=clock) as cortex:

        @event.listens_for(cortex.database.engine, "checkout")
        def _limit(connection: sqlite3.Connection, *_rest: object) -> None:
            with suppress(sqlite3.Error):  # never below the pages that there are; raised to no limit by the next one
                connection.execute(f"PRAGMA max_page_count={limit}")

        register(cortex)
        threading.Thread(target=obey, daemon=True).start()
        cortex.run_sync(stop)


def produce(url: str, slot: Path) -> None:
    """Enqueue until standard input ends; note each name with the id that was returned, or with nothing."""
    stop = threading.Event()

    def stop_at_end() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=stop_at_end, daemon=True).start()
    start = time.monotonic_ns()
    notes = os.open(slot.with_suffix(".ids"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with Cortex.open(url, settings=SETTINGS) as cortex:
        register(cortex)
        count = 0
        while not stop.wait(PAUSE_S):
            count += 1
            name = f"{start}-{count}"
            job = NewJob.of("first", Number(name=name, count=count), dedupe_key=f"first:{name}")
            try:
                job_id = cortex.enqueue(job)
            except StorageError:
                job_id = ""  # refused: nothing may be there of it
            os.write(notes, f"{name} {job_id}\n".encode())  # one call, so that a kill leaves no half of a line


if __name__ == "__main__":
    role, database_url, place, *rest = sys.argv[1:]
    if role == "work":
        work(database_url, Path(place), int(rest[0]))
    else:
        produce(database_url, Path(place))
