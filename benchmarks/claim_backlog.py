"""What a claim costs, by what lies in the queue: each backlog's median, through the repository's public method."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median

from benchmarks import targets
from benchmarks.backlogs import Backlog, url_of
from benchmarks.drains import KIND, register
from benchmarks.figures import RATIO, Row, ratios, readable_count
from benchmarks.plan import BenchmarkError, Contestant, Plan, Sizes
from tinycortex import Cortex, JobKind, KindSpec

_WORKER = "benchmark"
_MS = 1_000
_MIXED = tuple(kind.value for kind in JobKind)
_INSIDE = "inside a transaction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A backlog, and the kinds that are claimed from it.

    Attributes:
        what: its name.
        backlog: what lies in the queue.
        leaves_llm: LLM-bound kinds are left out, as while the gate is shut.
        leaves_own: the one kind of the backlog is left out, so that there is nothing to claim.
    """

    what: str
    backlog: Backlog
    leaves_llm: bool = False
    leaves_own: bool = False

    def wants(self, spec: KindSpec) -> bool:
        """Tell whether ``spec`` is claimed."""
        return not (self.leaves_llm and spec.llm_bound) and not (self.leaves_own and spec.kind == KIND)


def cases(sizes: Sizes) -> list[Case]:
    """Return every case; the first is the smallest backlog of mixed kinds."""
    few, many = min(sizes.backlogs), max(sizes.backlogs)
    mixed = [Case(what=_mixed(ready), backlog=Backlog(kinds=_MIXED, ready=ready)) for ready in sizes.backlogs]
    one_kind = [Case(what=_one_kind(ready), backlog=Backlog(kinds=(KIND,), ready=ready)) for ready in (few, many)]
    return [
        *mixed,
        *one_kind,
        Case(
            what=f"{readable_count(few)} ready, {readable_count(sizes.aside)} not yet due in front",
            backlog=Backlog(kinds=_MIXED, ready=few, aside=sizes.aside),
        ),
        Case(
            what=f"{readable_count(few)} ready, {readable_count(sizes.behind)} done behind",
            backlog=Backlog(kinds=_MIXED, ready=few, behind=sizes.behind),
        ),
        Case(
            what=f"{_mixed(many)}, LLM-bound ones left out",
            backlog=Backlog(kinds=_MIXED, ready=many),
            leaves_llm=True,
        ),
        Case(
            what=f"{_one_kind(many)}, which is left out",
            backlog=Backlog(kinds=(KIND,), ready=many),
            leaves_own=True,
        ),
    ]


def run(plan: Plan) -> Iterator[Row]:
    """Yield the median of a claim in each case, and how it grows with the backlog."""
    few, many = min(plan.sizes.backlogs), max(plan.sizes.backlogs)
    found_in = cases(plan.sizes)
    building = plan.progress.add_task("claim_backlog: building the files", total=len(found_in))
    with ExitStack() as stack:
        contestants: dict[str, Contestant] = {}
        for case in found_in:
            cortex = stack.enter_context(Cortex.open(url_of(plan.backlogs.find(case.backlog))))
            register(cortex, lambda: None)
            contestants[case.what] = partial(_measure, plan, case, cortex)
            plan.progress.update(building, advance=1, refresh=True)
        found = plan.interleave("claim_backlog", contestants)
    for case in found_in:
        yield Row(f"claim, {case.what}", "ms", found[case.what])
    for name, target in ((_mixed, targets.CLAIM_BY_BACKLOG), (_one_kind, None)):
        grown = ratios(found[name(many)], found[name(few)])
        yield Row(f"claim, {name(many)} ÷ {readable_count(few)}", RATIO, grown, target)
    inside = ratios(found[f"{_mixed(many)}, {_INSIDE}"], found[f"{_mixed(few)}, {_INSIDE}"])
    yield Row(f"claim {_INSIDE}, {_mixed(many)} ÷ {readable_count(few)}", RATIO, inside)


def _measure(plan: Plan, case: Case, cortex: Cortex) -> dict[str, float]:
    """Claim, alone and without the commit, and give everything back, since the file is everybody's."""
    kinds = [spec for spec in cortex.list_kinds() if case.wants(spec)]
    alone: list[float] = []
    inside: list[float] = []
    for number in range(plan.sizes.claims + 1):
        began = time.perf_counter()
        job = cortex.jobs.claim_next(kinds=kinds, worker_id=_WORKER)
        if number > 0:  # the first opens the connection and prepares the statement
            alone.append(time.perf_counter() - began)
        if (job is None) != case.leaves_own:
            raise BenchmarkError(f"{case.what}: claimed {job}")
    with cortex.transaction() as session:
        for _number in range(plan.sizes.claims):
            began = time.perf_counter()
            cortex.jobs.claim_next(kinds=kinds, worker_id=_WORKER, session=session)
            inside.append(time.perf_counter() - began)
    cortex.jobs.release_running_locks(_WORKER)
    return {case.what: median(alone) * _MS, f"{case.what}, {_INSIDE}": median(inside) * _MS}


def _mixed(ready: int) -> str:
    return f"{readable_count(ready)} ready of mixed kinds"


def _one_kind(ready: int) -> str:
    return f"{readable_count(ready)} ready of one kind"
