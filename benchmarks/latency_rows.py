"""The figures of latency.py, which is a program of its own, too, as rows of the table."""

from collections.abc import Iterator

from benchmarks import latency, targets
from benchmarks.backlogs import url_of
from benchmarks.figures import Row
from benchmarks.plan import Plan

_TARGETS = {
    "same process, async": targets.SAME_PROCESS_MS,
    "other process, async": targets.OTHER_PROCESS_MS,
}
_FIGURES = 7


def run(plan: Plan) -> Iterator[Row]:
    """Yield how soon an idle worker starts a job (ms), over all jobs of one worker, and what it costs meanwhile."""
    path = plan.backlogs.copy()
    task = plan.progress.add_task("latency", total=_FIGURES)
    for figure in latency.measure(url_of(path), plan.sizes.samples):
        plan.progress.update(task, description=f"latency: {figure.what}", advance=1, refresh=True)
        yield Row(f"start, {figure.what}", figure.unit, tuple(figure.values), _TARGETS.get(figure.what))
    plan.backlogs.remove(path)
