"""What a claim costs, by what lies in the queue: each backlog's median, through the repository's public method."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median

from sqlalchemy.orm import Session

from benchmarks import targets
from benchmarks.backlogs import Backlog, url_of
from benchmarks.drains import KIND, register
from benchmarks.figures import RATIO, Row, ratios, readable_count
from benchmarks.plan import BenchmarkError, Plan, Sizes
from tinycortex import Cortex, JobKind, KindSpec

_WORKER = "benchmark"
_MIXED = tuple(kind.value for kind in JobKind)


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
        queues: list[tuple[Case, Cortex]] = []
        for case in found_in:
            cortex = stack.enter_context(Cortex.open(url_of(plan.backlogs.find(case.backlog))))
            register(cortex, lambda: None)
            queues.append((case, cortex))
            plan.progress.update(building, advance=1, refresh=True)
        found = plan.interleave("claim_backlog", {"all in turns": partial(_measure, plan, queues)})
    for case in found_in:
        yield Row(f"claim, {case.what}", "ms", found[case.what])
    for name, target in ((_mixed, targets.CLAIM_BY_BACKLOG), (_one_kind, None)):
        grown = ratios(found[name(many)], found[name(few)])
        yield Row(f"claim, {name(many)} ÷ {readable_count(few)}", RATIO, grown, target)
    inside = ratios(found[_inside(_mixed(many))], found[_inside(_mixed(few))])
    yield Row(f"claim, {_inside(_mixed(many))} ÷ {readable_count(few)}", RATIO, inside)


def _measure(plan: Plan, queues: Sequence[tuple[Case, Cortex]]) -> dict[str, float]:
    """Claim from each queue in turns, with a commit each and then without, and give everything back."""
    alone: defaultdict[str, list[float]] = defaultdict(list)
    inside: dict[str, list[float]] = {}
    for number in range(plan.sizes.claims + 1):
        for case, cortex in queues:
            took_ms = _claim(case, cortex)
            if number > 0:  # the first opens the connection and prepares the statement
                alone[case.what].append(took_ms)
    for case, cortex in queues:  # no commit, and so no disk, is in these: one after the other is close enough
        with cortex.transaction() as session:
            inside[case.what] = [_claim(case, cortex, session) for _number in range(plan.sizes.claims)]
        cortex.jobs.release_running_locks(_WORKER)  # the files are everybody's
    medians = {what: median(values) for what, values in alone.items()}
    return medians | {_inside(what): median(values) for what, values in inside.items()}


def _claim(case: Case, cortex: Cortex, session: Session | None = None) -> float:
    """Claim once, and return how long it took (ms)."""
    kinds = [spec for spec in cortex.list_kinds() if case.wants(spec)]
    began = time.perf_counter()
    job = cortex.jobs.claim_next(kinds=kinds, worker_id=_WORKER, session=session)
    took_ms = (time.perf_counter() - began) * 1_000
    if (job is None) != case.leaves_own:
        raise BenchmarkError(f"{case.what}: claimed {job}")
    return took_ms


def _inside(what: str) -> str:
    return f"{what}, in an open transaction"


def _mixed(ready: int) -> str:
    return f"{readable_count(ready)} ready of mixed kinds"


def _one_kind(ready: int) -> str:
    return f"{readable_count(ready)} ready of one kind"
