"""How soon an idle worker starts a job, and what it costs while it has none. Settings are the defaults.

    python -m benchmarks.latency --rounds 100
    python -m benchmarks.latency --json
    python -m benchmarks.latency --engine postgresql
    python -m benchmarks.latency --url postgresql+psycopg://user@host/empty

Every time is taken from just before the call of ``enqueue``, so the commit is part of it.
"""

import argparse
import json
import multiprocessing
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median, quantiles

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from benchmarks.servers import SERVERS
from tinycortex import Cortex, JobContext, NewJob, schema

DELAY_MS = 300
IDLE_S = 10.0
BETWEEN_S = (0.05, 0.35)
"""Pause between two jobs: the worker is idle again, and where it is in its own pauses is left to chance."""
BOUND_S = 60.0
NS_PER_MS = 1_000_000
KINDS = ("plain", "async")
SAME_PROCESS_MS = 5.0
OTHER_PROCESS_MS = 60.0
ON_A_SERVER_MS = 8.0
"""From either process, where commits are announced."""


class Stamp(BaseModel):
    """When the job should start at the earliest, by the system-wide monotonic clock (ns)."""

    due_ns: int


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result; a share is one value, a time one for each job."""

    what: str
    unit: str
    values: list[float]
    target: float

    @property
    def p50(self) -> float:
        """The median."""
        return median(self.values)

    @property
    def p95(self) -> float | None:
        """The 95th percentile; None for a share."""
        return quantiles(self.values, n=20, method="inclusive")[18] if len(self.values) > 1 else None

    def as_dict(self) -> dict[str, str | float | None]:
        """Return what JSON shows of it."""
        return {
            "what": self.what,
            "unit": self.unit,
            "p50": self.p50,
            "p95": self.p95,
            "target": self.target,
            "holds": self.holds,
        }

    @property
    def holds(self) -> bool:
        """Whether the worse of the two figures is below the target."""
        return (self.p50 if self.p95 is None else self.p95) < self.target


@contextmanager
def worker(url: str) -> Iterator[tuple[Cortex, "queue.SimpleQueue[float]"]]:
    """Run a worker in this process during the block; yield its queue, and how late each job started (ms)."""
    late: queue.SimpleQueue[float] = queue.SimpleQueue()
    stop = threading.Event()
    with Cortex.open(url) as cortex:

        @cortex.handler("plain", payload=Stamp)
        def _plain(_ctx: JobContext, payload: Stamp) -> None:
            late.put((time.monotonic_ns() - payload.due_ns) / NS_PER_MS)

        @cortex.handler("async", payload=Stamp)
        async def _async(_ctx: JobContext, payload: Stamp) -> None:
            late.put((time.monotonic_ns() - payload.due_ns) / NS_PER_MS)

        serving = threading.Thread(target=cortex.run_sync, args=(stop,))
        serving.start()
        try:
            time.sleep(1)  # the chores of its start are over
            yield cortex, late
        finally:
            stop.set()
            serving.join()


def enqueue_now(cortex: Cortex, kind: str) -> None:
    """Enqueue a job that is due at once."""
    cortex.enqueue(NewJob.of(kind, Stamp(due_ns=time.monotonic_ns())))


def enqueue_delayed(cortex: Cortex, kind: str) -> None:
    """Enqueue a job that comes due after ``DELAY_MS``."""
    stamp = Stamp(due_ns=time.monotonic_ns() + DELAY_MS * NS_PER_MS)
    job = NewJob(kind=kind, payload_json=stamp.model_dump_json(), available_at_ms=cortex.clock.now_ms() + DELAY_MS)
    cortex.enqueue(job)


def produce(url: str, asked: "multiprocessing.SimpleQueue[str | None]") -> None:
    """Enqueue a job of each kind that is asked for; another process's part."""
    with Cortex.open(url) as cortex:
        while (kind := asked.get()) is not None:
            enqueue_now(cortex, kind)


@contextmanager
def producer(url: str) -> Iterator[Callable[[str], None]]:
    """Run a producer in another process during the block; yield what tells it to enqueue."""
    spawn = multiprocessing.get_context("spawn")
    asked: multiprocessing.SimpleQueue[str | None] = spawn.SimpleQueue()
    process = spawn.Process(target=produce, args=(url, asked))
    process.start()
    try:
        yield asked.put
    finally:
        asked.put(None)
        process.join()


def sample(rounds: int, late: "queue.SimpleQueue[float]", enqueue: Callable[[], None]) -> list[float]:
    """Return how late each of ``rounds`` jobs starts on an idle worker (ms)."""
    found: list[float] = []
    chance = random.Random(0)  # noqa: S311 - pauses, not secrets
    for number in range(rounds + 1):
        enqueue()
        took = late.get(timeout=BOUND_S)
        if number > 0:  # the first one opens connections and starts threads
            found.append(took)
        time.sleep(chance.uniform(*BETWEEN_S))
    return found


def measure(url: str, rounds: int) -> Iterator[Figure]:
    """Yield every figure as soon as it is known."""
    is_server = not url.startswith("sqlite")
    same_ms = ON_A_SERVER_MS if is_server else SAME_PROCESS_MS
    other_ms = ON_A_SERVER_MS if is_server else OTHER_PROCESS_MS
    with worker(url) as (cortex, late):
        before = time.process_time()
        time.sleep(IDLE_S)
        share = (time.process_time() - before) / IDLE_S * 100
        yield Figure("idle worker, of a core", "%", [share], 1)
        for kind in KINDS:
            took = sample(rounds, late, lambda: enqueue_now(cortex, kind))  # noqa: B023 - called at once
            yield Figure(f"same process, {kind}", "ms", took, same_ms)
        with producer(url) as ask:
            for kind in KINDS:
                took = sample(rounds, late, lambda: ask(kind))  # noqa: B023 - called at once
                yield Figure(f"other process, {kind}", "ms", took, other_ms)
        for kind in KINDS:
            took = sample(rounds, late, lambda: enqueue_delayed(cortex, kind))  # noqa: B023 - called at once
            yield Figure(f"due in {DELAY_MS} ms, {kind}: late by", "ms", took, 50)


def main() -> None:
    """Measure, and print a table or JSON; the exit code is 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="jobs per figure")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--engine", choices=SERVERS, default="sqlite", help="measure on a new database of this engine")
    where.add_argument("--url", help="measure on this database, which is upgraded first")
    options = parser.parse_args()
    with ExitStack() as stack:
        url = options.url or stack.enter_context(SERVERS[options.engine]())
        schema.upgrade(url)
        figures = list(measure(url, options.rounds))
    console = Console()
    if options.json:
        console.print_json(json.dumps([figure.as_dict() for figure in figures]))
    else:
        table = Table("what", "unit", "p50", "p95", "target", "")
        for figure in figures:
            p95 = "" if figure.p95 is None else f"{figure.p95:.2f}"
            verdict = "ok" if figure.holds else "MISSED"
            table.add_row(figure.what, figure.unit, f"{figure.p50:.2f}", p95, f"< {figure.target:g}", verdict)
        console.print(table)
    raise SystemExit(not all(figure.holds for figure in figures))


if __name__ == "__main__":
    main()
