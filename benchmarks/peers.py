"""What users could take instead, beside us in one run: the same jobs, each queue with the settings it has by default.

The peers live in an environment of their own in the user's cache, made when it is first needed.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks import targets
from benchmarks.backlogs import url_of
from benchmarks.drains import drain, fill, new_job, register
from benchmarks.figures import RATIO, Row, ratios
from benchmarks.peer_queues import PEERS, measure
from benchmarks.plan import BenchmarkError, Contestant, Plan
from tinycortex import Cortex

REQUIREMENTS = ("huey==3.5.4", "litequeue==0.9", "persist-queue==1.1.0")
_HUEY = "huey"
_OURS = "tinycortex"
_SCRIPT = Path(__file__).with_name("peer_queues.py")


def run(plan: Plan) -> Iterator[Row]:
    """Yield what each queue enqueues and does in a second, and the ratios of ours to theirs."""
    task = plan.progress.add_task("peers: their environment", total=1)
    python = find_python()
    plan.progress.update(task, advance=1, refresh=True)
    contestants: dict[str, Contestant] = {
        _OURS: partial(_measure_ours, plan),
        **{name: partial(_measure_peer, plan, python, name) for name in PEERS},
    }
    found = plan.interleave("peers", contestants)
    for name in (_OURS, *PEERS):
        yield Row(_enqueue_name(name), "jobs/s", found[_enqueue_name(name)])
        yield Row(_work_name(name), "jobs/s", found[_work_name(name)])
    for name in PEERS:
        target = targets.HUEY if name == _HUEY else None
        compared = ratios(found[_work_name(_OURS)], found[_work_name(name)])
        yield Row(f"{_work_name(_OURS)} ÷ {name}", RATIO, compared, target)


def find_python(requirements: Sequence[str] = REQUIREMENTS) -> Path:
    """Return the interpreter of an environment with ``requirements``, which is made if it is not there yet.

    Raises:
        BenchmarkError: it could not be made, for example without a network.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = f"py{sys.version_info.major}.{sys.version_info.minor}"
    home = cache / "tinycortex-benchmarks" / "-".join((version, *requirements))
    python = home / "bin" / "python"
    if not python.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        # Made elsewhere in whole and then moved, so that one which was broken off is never taken for ready.
        # Only its scripts know where it was made, and nobody calls those.
        with tempfile.TemporaryDirectory(dir=home.parent) as folder:
            fresh = Path(folder) / "environment"
            venv.create(fresh, with_pip=True)
            command = [str(fresh / "bin" / "python"), "-m", "pip", "install", "--quiet", *requirements]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - constants
            if done.returncode != 0:
                raise BenchmarkError(f"the peers could not be installed: {done.stderr.strip()}")
            shutil.move(fresh, home)
    return python


def _measure_ours(plan: Plan) -> dict[str, float]:
    path = plan.backlogs.copy()
    with Cortex.open(url_of(path)) as cortex:
        register(cortex, lambda: None)  # so that payloads are checked
        enqueued = measure(plan.sizes.enqueued, lambda number: cortex.enqueue(new_job(number)))
    fill(path, plan.sizes.drained)
    rate = drain(path, plan.sizes.drained, limit_s=plan.sizes.limit_s)
    plan.backlogs.remove(path)
    return {_enqueue_name(_OURS): enqueued, _work_name(_OURS): rate}


def _measure_peer(plan: Plan, python: Path, name: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=plan.backlogs.folder) as folder:
        command = [str(python), str(_SCRIPT), name, folder, str(plan.sizes.peer_jobs)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - constants
    if done.returncode != 0:
        raise BenchmarkError(f"{name} failed: {done.stderr.strip()}")
    enqueued, worked = json.loads(done.stdout)
    return {_enqueue_name(name): enqueued, _work_name(name): worked}


def _enqueue_name(name: str) -> str:
    return f"{name}: enqueue"


def _work_name(name: str) -> str:
    return f"{name}: jobs done"
