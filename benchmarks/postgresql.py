"""PostgreSQL: a claim by what lies in the queue, and default workers beside pgqueuer's, in one run."""

import multiprocessing
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from sqlalchemy import make_url

from benchmarks import targets
from benchmarks.backlogs import Backlog
from benchmarks.drains import KIND, register
from benchmarks.figures import RATIO, Row, ratios, readable_count
from benchmarks.peers import find_python
from benchmarks.plan import BenchmarkError, Contestant, Plan, Sizes
from benchmarks.postgresql_databases import Databases, server
from tinycortex import Cortex, JobKind

REQUIREMENTS = ("pgqueuer[asyncpg]==1.6.0",)
BATCH = 10
NUMBERS = (1, 4)
_SCRIPT = Path(__file__).with_name("pgqueuer_peer.py")
_MIXED = tuple(kind.value for kind in JobKind)
_PATIENCE_S = 120.0
_QUIET_S = 1.0
"""A worker that has started nothing for so long has nothing left."""


def run(plan: Plan) -> Iterator[Row]:
    """Yield the median of a claim by backlog, the rates of one and four workers, and of as many of pgqueuer's."""
    task = plan.progress.add_task("postgresql: the server and the peer's environment", total=2)
    python = find_python(REQUIREMENTS)
    plan.progress.update(task, advance=1, refresh=True)
    with server() as databases:
        plan.progress.update(task, advance=1, refresh=True)
        yield from _run_claims(plan, databases)
        yield from _run_workers(plan, databases, python)


def backlogs(sizes: Sizes) -> dict[str, Backlog]:
    """Return what lies in the queues that are claimed from: few ready rows, many, and few behind many to come."""
    few, many = min(sizes.backlogs), max(sizes.backlogs)
    return {
        _ready(few): Backlog(kinds=_MIXED, ready=few),
        _ready(many): Backlog(kinds=_MIXED, ready=many),
        _behind(few, many): Backlog(kinds=_MIXED, ready=few, aside=many),
    }


def _run_claims(plan: Plan, databases: Databases) -> Iterator[Row]:
    found_in = backlogs(plan.sizes)
    building = plan.progress.add_task("postgresql: filling the databases", total=len(found_in))
    with ExitStack() as stack:
        queues: dict[str, Cortex] = {}
        for what, backlog in found_in.items():
            queues[what] = stack.enter_context(Cortex.open(databases.make(backlog)))
            plan.progress.update(building, advance=1, refresh=True)
        found = plan.interleave("postgresql", {"claims, all in turns": partial(_measure_claims, plan, queues)})
    few, *others = found_in
    for what in found_in:
        yield Row(f"PostgreSQL: claim, {what}", "ms", found[what])
    for what in others:
        grown = ratios(found[what], found[few])
        yield Row(f"PostgreSQL: claim, {what} ÷ {few}", RATIO, grown, targets.CLAIM_BY_BACKLOG)


def _measure_claims(plan: Plan, queues: Mapping[str, Cortex]) -> dict[str, float]:
    """Claim from each queue in turns, one committed claim at a time, and give everything back."""
    took_ms: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(plan.sizes.claims + 1):
        for what, cortex in queues.items():
            began = time.perf_counter()
            job = cortex.jobs.claim_next(worker_id="benchmark")
            took = (time.perf_counter() - began) * 1_000
            if job is None:
                raise BenchmarkError(f"{what}: there was nothing to claim")
            if number > 0:  # the first opens the connection
                took_ms[what].append(took)
    for cortex in queues.values():
        cortex.jobs.release_running_locks("benchmark")
    return {what: median(values) for what, values in took_ms.items()}


def _run_workers(plan: Plan, databases: Databases, python: Path) -> Iterator[Row]:
    contestants: dict[str, Contestant] = {}
    for number in NUMBERS:
        contestants[_ours(number)] = partial(_measure_ours, plan, databases, number)
        contestants[_theirs(number)] = partial(_measure_theirs, plan, databases, python, number)
    found = plan.interleave("postgresql", contestants)
    for name in contestants:
        yield Row(name, "jobs/s", found[name])
    most = max(NUMBERS)
    yield Row(f"{_ours(most)} ÷ 1", RATIO, ratios(found[_ours(most)], found[_ours(1)]))
    for number in NUMBERS:
        compared = ratios(found[_ours(number)], found[_theirs(number)])
        target = targets.PGQUEUER if number == most else None
        yield Row(f"{_ours(number)} ÷ pgqueuer, batch {BATCH}", RATIO, compared, target)


def _measure_ours(plan: Plan, databases: Databases, number: int) -> dict[str, float]:
    jobs = plan.sizes.drained
    url = databases.make(Backlog(kinds=(KIND,), ready=jobs))
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager, ProcessPoolExecutor(number, mp_context=spawn) as pool:
        start = manager.Barrier(number, timeout=_PATIENCE_S)
        serving = [pool.submit(_serve, url, start) for _ in range(number)]
        starts = [at for one in serving for at in one.result()]
    if len(starts) != jobs:
        raise BenchmarkError(f"{_ours(number)}: {len(starts)} handlers were started for {jobs} jobs")
    return {_ours(number): (jobs - 1) / (max(starts) - min(starts))}


def _serve(url: str, start: threading.Barrier) -> list[float]:
    """Work until nothing is left, and return when each handler started (monotonic, s); a child's part."""
    starts: list[float] = []
    stop = threading.Event()

    def watch() -> None:
        seen = -1
        while seen < len(starts) or not starts:
            seen = len(starts)
            time.sleep(_QUIET_S)
        stop.set()

    with Cortex.open(url) as cortex:
        register(cortex, lambda: starts.append(time.monotonic()))
        start.wait()
        threading.Thread(target=watch, daemon=True).start()
        cortex.run_sync(stop)
    return starts


def _measure_theirs(plan: Plan, databases: Databases, python: Path, number: int) -> dict[str, float]:
    url = make_url(databases.make()).set(drivername="postgresql").render_as_string(hide_password=False)
    command = [str(python), str(_SCRIPT), url, str(plan.sizes.drained), str(number), str(BATCH)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - constants
    if done.returncode != 0:
        raise BenchmarkError(f"pgqueuer failed: {done.stderr.strip()}")
    return {_theirs(number): float(done.stdout)}


def _processes(number: int) -> str:
    return f"{number} {'process' if number == 1 else 'processes'}"


def _ours(number: int) -> str:
    return f"PostgreSQL: {_processes(number)}"


def _theirs(number: int) -> str:
    return f"PostgreSQL: pgqueuer, batch {BATCH}, {_processes(number)}"


def _ready(ready: int) -> str:
    return f"{readable_count(ready)} ready"


def _behind(ready: int, aside: int) -> str:
    return f"{_ready(ready)}, {readable_count(aside)} not yet due"
