"""Whether a worker grows with the jobs it has done: its resident memory after few and after many, in one process."""

import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks import targets
from benchmarks.backlogs import Backlog, url_of
from benchmarks.drains import KIND, register
from benchmarks.figures import RATIO, Row, readable_count
from benchmarks.plan import Plan
from tinycortex import Cortex

_STATUS = Path("/proc/self/status")
_KIB_PER_MIB = 1024


def run(plan: Plan) -> Iterator[Row]:
    """Yield both sizes and their ratio, of one worker: it is no matter of the machine's mood, and takes long."""
    few, many = plan.sizes.few_jobs, plan.sizes.many_jobs
    task = plan.progress.add_task(f"memory: {readable_count(many)} jobs", total=1)
    path = plan.backlogs.copy(Backlog(kinds=(KIND,), ready=max(many, *plan.sizes.backlogs)))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        after_few, after_many = pool.submit(_serve, path, few, many).result()
    plan.backlogs.remove(path)
    plan.progress.update(task, advance=1, refresh=True)
    yield Row(f"worker after {readable_count(few)} jobs", "MiB", (after_few,))
    yield Row(f"worker after {readable_count(many)} jobs", "MiB", (after_many,))
    what = f"worker after {readable_count(many)} jobs ÷ {readable_count(few)}"
    yield Row(what, RATIO, (after_many / after_few,), targets.MEMORY)


def _serve(path: Path, few: int, many: int) -> tuple[float, float]:
    """Do ``many`` jobs and return the memory at both numbers (MiB); a child's part."""
    stop = threading.Event()
    handled = 0
    found: dict[int, float] = {}

    def note() -> None:  # on one loop, so nothing is lost
        nonlocal handled
        handled += 1
        if handled in {few, many}:
            found[handled] = _resident_mib()
            if handled == many:
                stop.set()

    with Cortex.open(url_of(path)) as cortex:
        register(cortex, note)
        cortex.run_sync(stop)
    return found[few], found[many]


def _resident_mib() -> float:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / _KIB_PER_MIB
