"""Whatever part of the write-ahead log a crash leaves, the file keeps every promise.

A crash leaves the database file, and the log up to some byte. So the log of a day's work is cut at the end of each of
its frames, and within some, and the pair is opened as the next process would open it.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import make_url, text
from sqlalchemy.orm import Session

from tinycortex import Cortex, Defer, Done, Job, JobContext, JobFailure, JobStatus, NewJob
from tinycortex.testing import ManualClock

JOBS = 5
MINUTE_MS = 60_000
LOG_HEADER, FRAME_HEADER = 32, 24
AUTOCHECKPOINT_PAGES = 1_000
TABLES = ("mem_tree_jobs", "orders", "effects")


class Order(BaseModel):
    number: int


@dataclass
class Day:
    """What is left of a day's work.

    Attributes:
        file: the database file, which the log has not been written back into.
        log: the write-ahead log.
        accepted: number of each job, and the length of the log when its enqueue had returned.
    """

    file: bytes
    log: bytes = b""
    accepted: dict[int, int] = field(default_factory=dict)

    @property
    def frame_bytes(self) -> int:
        return FRAME_HEADER + int.from_bytes(self.log[8:12], "big")

    def list_ends(self) -> list[int]:
        """List the ends of the header and of each frame."""
        return list(range(LOG_HEADER, len(self.log) + 1, self.frame_bytes))

    def commits_at(self, end: int) -> bool:
        """Tell whether the frame that ends there is the last of a transaction: only such a one says a size."""
        start = end - self.frame_bytes
        return start >= LOG_HEADER and self.log[start + 4 : start + 8] != bytes(4)


def register(cortex: Cortex, clock: ManualClock) -> None:
    """Handle orders: each has its effect and one follow-up, which has its own; some are put off or fail at first."""

    def effect(number: int, what: str) -> Any:
        def write(session: Session) -> None:
            session.execute(text("INSERT INTO effects VALUES (:number, :what)"), {"number": number, "what": what})

        return write

    @cortex.handler("order", payload=Order)
    def handle(ctx: JobContext, payload: Order) -> Done | Defer:
        if payload.number % 3 == 1 and ctx.job.attempts == 1 and ctx.job.deferred_since_ms is None:
            return Defer(until_ms=clock.now_ms() + MINUTE_MS, reason="not yet")
        if payload.number % 3 == 2 and ctx.job.attempts == 1:
            raise JobFailure.transient("not yet")
        invoice = NewJob.of("invoice", payload, dedupe_key=f"invoice:{payload.number}")
        return Done(follow_ups=[invoice], writes=effect(payload.number, "order"))

    @cortex.handler("invoice", payload=Order)
    def invoice(_ctx: JobContext, payload: Order) -> Done:
        return Done(writes=effect(payload.number, "invoice"))


def work(cortex: Cortex, clock: ManualClock, day: Day, log: Path) -> None:
    """Take orders, some with a row of the producer's own, and work on them in between and afterwards."""
    for number in range(JOBS):
        job = NewJob.of("order", Order(number=number), dedupe_key=f"order:{number}")
        if number % 2:
            cortex.enqueue(job)
        else:
            with cortex.transaction() as session:
                session.execute(text("INSERT INTO orders VALUES (:number)"), {"number": number})
                cortex.enqueue(job, session=session)
        day.accepted[number] = log.stat().st_size
        if number % 2:
            cortex.run_once()
    for _ in range(3):
        cortex.drain_until_idle()
        clock.advance(2 * MINUTE_MS)


@pytest.fixture
def day(cortex: Cortex, clock: ManualClock, database_url: str) -> Day:
    """A day's work, all of it in the log."""
    path = Path(str(make_url(database_url).database))
    log = path.with_name(f"{path.name}-wal")
    register(cortex, clock)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (number INTEGER)")
        connection.execute("CREATE TABLE effects (number INTEGER, what TEXT)")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    day = Day(file=path.read_bytes())
    work(cortex, clock, day, log)
    day.log = log.read_bytes()
    assert cortex.jobs.count_by_status()[JobStatus.DONE] == 2 * JOBS
    assert [cortex.jobs.list_jobs(kind="order")[-1 - number].claim_token for number in range(3)] == [1, 2, 2]
    # Else the log would have been written back in part, and would no longer tell the whole story.
    assert path.read_bytes() == day.file
    assert len(day.list_ends()) < AUTOCHECKPOINT_PAGES
    return day


def leave(folder: Path, day: Day, log: bytes) -> Path:
    """Write the pair of files that a crash leaves."""
    folder.mkdir()
    path = folder / "chunks.db"
    path.write_bytes(day.file)
    path.with_name("chunks.db-wal").write_bytes(log)
    return path


def rows_of(path: Path) -> list[list[Any]]:
    """Return every row that SQLite recovers; the file must be sound."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return [connection.execute(f"SELECT * FROM {table} ORDER BY rowid").fetchall() for table in TABLES]


@contextmanager
def opened(path: Path, clock: ManualClock) -> Iterator[Cortex]:
    with Cortex.open(f"sqlite:///{path}", clock=clock) as cortex:
        register(cortex, clock)
        yield cortex


def jobs_by_number(cortex: Cortex, kind: str) -> dict[int, list[Job]]:
    found: dict[int, list[Job]] = {}
    for job in cortex.jobs.list_jobs(kind=kind):
        found.setdefault(Order.model_validate_json(job.payload_json).number, []).append(job)
    return found


def effects(cortex: Cortex) -> Counter[tuple[int, str]]:
    with cortex.database.reading() as session:
        return Counter((row.number, row.what) for row in session.execute(text("SELECT number, what FROM effects")))


def check(cortex: Cortex, day: Day, cut: int) -> None:
    """Nothing accepted is lost, and no part of a settlement or of a producer's transaction is there alone."""
    orders, invoices, done = jobs_by_number(cortex, "order"), jobs_by_number(cortex, "invoice"), effects(cortex)
    assert {number for number, end in day.accepted.items() if end <= cut} <= set(orders)
    with cortex.database.reading() as session:
        produced = set(session.execute(text("SELECT number FROM orders")).scalars())
    assert produced == {number for number in orders if number % 2 == 0}
    for number, (job, *twins) in orders.items():
        is_done = job.status is JobStatus.DONE
        assert not twins
        assert done[number, "order"] == is_done
        assert len(invoices.get(number, [])) == is_done
    for number, (job, *_twins) in invoices.items():
        assert done[number, "invoice"] == (job.status is JobStatus.DONE)
    assert sum(done.values()) == done.total() <= 2 * len(orders)


def finish(cortex: Cortex, clock: ManualClock) -> None:
    """Do what the next process does: recover what the crash left claimed, and work until nothing is left."""
    clock.advance(6 * MINUTE_MS)
    cortex.recover_stale_locks()
    for _ in range(3):
        cortex.drain_until_idle()
        clock.advance(2 * MINUTE_MS)
    numbers = set(jobs_by_number(cortex, "order"))
    assert effects(cortex) == Counter((number, what) for number in numbers for what in ("order", "invoice"))
    assert {job.status for job in cortex.jobs.list_jobs()} <= {JobStatus.DONE}


def test_each_state_that_a_crash_can_leave_keeps_every_promise(day: Day, tmp_path: Path, clock: ManualClock) -> None:
    """After each transaction: what was accepted is there, nothing is half done, and the rest is done exactly once."""
    commits = [0, *(end for end in day.list_ends() if day.commits_at(end))]
    assert len(commits) > 4 * JOBS
    for cut in commits:
        path = leave(tmp_path / f"cut-{cut}", day, day.log[:cut])
        with opened(path, clock) as cortex:
            assert cortex.database.find_damage() == []
            check(cortex, day, cut)
            finish(cortex, clock)


def test_a_transaction_is_there_whole_or_not_at_all(day: Day, tmp_path: Path) -> None:
    """A cut between or within its frames leaves what stood before it; so does a frame that was written in part."""
    ends = [0, *day.list_ends()]
    known = rows_of(leave(tmp_path / "empty", day, b""))
    states = 0
    for start, end in pairwise(ends):
        torn = {
            "cut in its header": day.log[: start + FRAME_HEADER // 2],
            "cut in its page": day.log[: (start + end) // 2],
            "written in part": day.log[: (start + end) // 2] + bytes(end - (start + end) // 2),
        }
        for how, log in torn.items() if day.commits_at(end) else ():
            assert rows_of(leave(tmp_path / f"{end} {how}", day, log)) == known, how
        after = rows_of(leave(tmp_path / f"{end}", day, day.log[:end]))
        if day.commits_at(end):
            states += after != known
            known = after
        assert after == known
    assert states > 4 * JOBS
