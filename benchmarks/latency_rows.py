"""The figures of latency.py, which is a program of its own, too, as rows of the table."""

from collections.abc import Iterator, Mapping

from benchmarks import latency, targets
from benchmarks.backlogs import url_of
from benchmarks.figures import Row, Target
from benchmarks.plan import Plan
from benchmarks.servers import postgresql
from tinycortex import schema

_ON_A_FILE = {
    "same process, async": targets.SAME_PROCESS_MS,
    "other process, async": targets.OTHER_PROCESS_MS,
}
_ON_A_SERVER = dict.fromkeys(_ON_A_FILE, targets.ON_A_SERVER_MS)
_FIGURES = 7


def run(plan: Plan) -> Iterator[Row]:
    """Yield how soon an idle worker starts a job (ms), over all jobs of one worker, and what it costs meanwhile."""
    path = plan.backlogs.copy()
    yield from _rows(plan, url_of(path), "start", _ON_A_FILE)
    plan.backlogs.remove(path)


def run_on_postgresql(plan: Plan) -> Iterator[Row]:
    """Yield the same on a PostgreSQL server of the benchmark's own.

    Raises:
        BenchmarkError: there is none that could be started.
    """
    with postgresql() as url:
        schema.upgrade(url)
        yield from _rows(plan, url, "PostgreSQL, start", _ON_A_SERVER)


def _rows(plan: Plan, url: str, what: str, wanted: Mapping[str, Target]) -> Iterator[Row]:
    task = plan.progress.add_task("latency", total=_FIGURES)
    for figure in latency.measure(url, plan.sizes.samples):
        plan.progress.update(task, description=f"latency: {figure.what}", advance=1, refresh=True)
        yield Row(f"{what}, {figure.what}", figure.unit, tuple(figure.values), wanted.get(figure.what))
