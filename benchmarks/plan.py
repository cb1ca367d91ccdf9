"""A plan: how much is measured, where, and in which order."""

import gc
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.progress import Progress

from benchmarks.backlogs import Backlogs
from benchmarks.figures import Series

Contestant = Callable[[], Mapping[str, float]]
"""Measures once, and returns its figures by name."""


class BenchmarkError(RuntimeError):
    """What was measured is not what should have been, so that there is no figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much each benchmark does in one round.

    Attributes:
        raw_jobs: jobs of the bare driver at NORMAL.
        raw_full_jobs: the same at FULL, where each transaction waits for the disk.
        enqueued: jobs enqueued one at a time, each way.
        single_jobs: jobs drained one at a time.
        drained: jobs drained by a default worker, and rows of a bulk enqueue.
        limit_s: how long a drain may last; what was done by then is the figure (s).
        shared: rows that several workers share, more than they can do in ``window_s``.
        window_s: how long several workers are watched (s).
        claims: claims of one backlog.
        backlogs: numbers of ready rows, ascending.
        aside: rows that are not due yet in front of others.
        behind: rows that are done, behind others.
        peer_jobs: jobs of each peer.
        samples: jobs of each latency figure.
        few_jobs: jobs after which the memory of a worker is first read.
        many_jobs: jobs after which it is read again.
    """

    raw_jobs: int = 3_000
    raw_full_jobs: int = 1_000
    enqueued: int = 500
    single_jobs: int = 5_000
    drained: int = 20_000
    limit_s: float = 6
    shared: int = 150_000
    window_s: float = 4
    claims: int = 200
    backlogs: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    aside: int = 100_000
    behind: int = 1_000_000
    peer_jobs: int = 3_000
    samples: int = 50
    few_jobs: int = 10_000
    many_jobs: int = 1_000_000


QUICK = Sizes(
    raw_jobs=300,
    raw_full_jobs=50,
    enqueued=50,
    single_jobs=200,
    drained=1_000,
    limit_s=2,
    shared=20_000,
    window_s=1,
    claims=50,
    backlogs=(1_000, 10_000),
    aside=1_000,
    behind=10_000,
    peer_jobs=200,
    samples=3,
    few_jobs=200,
    many_jobs=600,
)
"""Sizes that show whether everything runs; their figures say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a benchmark is given.

    Attributes:
        rounds: how often each contestant measures.
        sizes: how much it does each time.
        backlogs: the database files.
        progress: shows a person where the run is.
    """

    rounds: int
    sizes: Sizes
    backlogs: Backlogs
    progress: Progress

    def interleave(self, title: str, contestants: Mapping[str, Contestant]) -> Series:
        """Let the contestants measure in turns, A B A B …, and return their figures, one value a round."""
        found: defaultdict[str, list[float]] = defaultdict(list)
        task = self.progress.add_task(title, total=self.rounds * len(contestants))
        for _round in range(self.rounds):
            for name, contestant in contestants.items():
                self.progress.update(task, description=f"{title}: {name}", refresh=True)
                gc.collect()  # nobody pays for what another left behind
                for figure, value in contestant().items():
                    found[figure].append(value)
                self.progress.advance(task)
        self.progress.update(task, description=title, refresh=True)
        return {figure: tuple(values) for figure, values in found.items()}
