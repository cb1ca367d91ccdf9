"""How many jobs are enqueued and done in a second, beside the bare driver."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

from benchmarks import processes, raw, targets
from benchmarks.backlogs import url_of
from benchmarks.drains import ADD_EFFECT, Body, drain, fill, new_job, nothing, one_follow_up, one_write, register
from benchmarks.figures import RATIO, Row, Target, ratios
from benchmarks.plan import Contestant, Plan
from tinycortex import Cortex

ENQUEUE = "enqueue"
ENQUEUE_TX = "enqueue, in the caller's transaction"
BULK = "enqueue_many"
_BARE_ENQUEUE = "bare driver, FULL: enqueue"
ONE_AT_A_TIME = "one at a time"
DEFAULT_WORKER = "default worker"
PLAIN = "plain def"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """One way to drain a queue.

    Attributes:
        what: its name.
        body: what each handler does.
        plain: the handler is a plain function, which runs in a thread, instead of an asynchronous one.
        concurrency: jobs at a time; the default when None.
        target: the ratio to the bare driver.
    """

    what: str
    body: Body = nothing
    plain: bool = False
    concurrency: int | None = None
    target: Target | None = None


DRAINS = (
    Drain(what=ONE_AT_A_TIME, concurrency=1, target=targets.ONE_AT_A_TIME),
    Drain(what=f"{ONE_AT_A_TIME}, {PLAIN}", concurrency=1, plain=True),
    Drain(what=DEFAULT_WORKER, target=targets.DEFAULT_WORKER),
    Drain(what=f"{DEFAULT_WORKER}, one follow-up a job", body=one_follow_up, target=targets.FOLLOW_UPS),
    Drain(what=f"{DEFAULT_WORKER}, writes=", body=one_write),
    Drain(what=f"{DEFAULT_WORKER}, {PLAIN}", plain=True),
)


def run(plan: Plan) -> Iterator[Row]:
    """Yield rates, and their ratios to the bare driver's in the same rounds."""
    yield from _run_enqueues(plan)
    yield from _run_drains(plan)
    yield from processes.run(plan)


def _run_enqueues(plan: Plan) -> Iterator[Row]:
    found = plan.interleave("throughput", {"enqueue, one of each in turns": partial(_measure_enqueues, plan)})
    for name, values in found.items():
        yield Row(name, "jobs/s", values)
    for name, target in ((ENQUEUE, targets.ENQUEUE_TIME), (ENQUEUE_TX, None)):
        yield Row(f"{name}: time ÷ bare driver, FULL", RATIO, ratios(found[_BARE_ENQUEUE], found[name]), target)


def _run_drains(plan: Plan) -> Iterator[Row]:
    # The bare driver runs before each of them, so that the two sides of a ratio are close together.
    contestants: dict[str, Contestant] = {}
    for way in DRAINS:
        contestants[_bare_name(way)] = partial(_measure_bare, plan, way)
        contestants[way.what] = partial(_measure_drain, plan, way)
    found = plan.interleave("throughput", contestants)
    yield Row(
        "bare driver, NORMAL: claim + settle",
        "jobs/s",
        tuple(chain.from_iterable(found[_bare_name(way)] for way in DRAINS)),
    )
    yield Row(BULK, "rows/s", found[BULK], targets.BULK)
    for way in DRAINS:
        yield Row(way.what, "jobs/s", found[way.what])
    for way in DRAINS:
        compared = ratios(found[way.what], found[_bare_name(way)])
        yield Row(f"{way.what} ÷ bare driver, NORMAL", RATIO, compared, way.target)


def _enqueue_with_a_row(cortex: Cortex, number: int) -> None:
    """Enqueue one job in a transaction that the caller opens for a row of its own."""
    with cortex.transaction() as session:
        session.execute(ADD_EFFECT, {"chunk_id": f"c-{number}"})
        cortex.enqueue(new_job(number), session=session)


def _measure_enqueues(plan: Plan) -> dict[str, float]:
    """Enqueue one job each way in turns: what a sync of the disk costs changes within seconds."""
    bare_path, path = plan.backlogs.new_path(), plan.backlogs.copy()
    with raw.open_queue(bare_path, "FULL") as connection, Cortex.open(url_of(path)) as cortex:
        register(cortex, lambda: None)  # so that payloads are checked
        ways: dict[str, Callable[[int], object]] = {
            _BARE_ENQUEUE: partial(raw.enqueue, connection),
            ENQUEUE: lambda number: cortex.enqueue(new_job(number)),
            ENQUEUE_TX: partial(_enqueue_with_a_row, cortex),
        }
        took_s = dict.fromkeys(ways, 0.0)
        for number in range(plan.sizes.enqueued + 1):
            for name, way in ways.items():
                began = time.perf_counter()
                way(number)
                if number > 0:  # the first opens the connection and prepares the statement
                    took_s[name] += time.perf_counter() - began
    plan.backlogs.remove(bare_path)
    plan.backlogs.remove(path)
    return {name: plan.sizes.enqueued / took for name, took in took_s.items()}


def _measure_drain(plan: Plan, way: Drain) -> dict[str, float]:
    jobs = plan.sizes.drained if way.concurrency is None else plan.sizes.single_jobs
    path = plan.backlogs.copy()
    bulk = fill(path, jobs)
    rate = drain(path, jobs, limit_s=plan.sizes.limit_s, body=way.body, plain=way.plain, concurrency=way.concurrency)
    plan.backlogs.remove(path)
    # Every drain needs its rows; one of them tells how soon they are there.
    return {way.what: rate, BULK: bulk} if way.what == DEFAULT_WORKER else {way.what: rate}


def _measure_bare(plan: Plan, way: Drain) -> dict[str, float]:
    return {_bare_name(way): raw.measure_drain(plan)}


def _bare_name(way: Drain) -> str:
    return f"bare driver beside {way.what}"
