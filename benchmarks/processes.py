"""Several workers, each a process of its own, on one file: what they do together, and how evenly."""

import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import targets
from benchmarks.backlogs import Backlog, url_of
from benchmarks.drains import KIND, register
from benchmarks.figures import RATIO, Row, Series, Target, percentile, ratios
from benchmarks.plan import BenchmarkError, Contestant, Plan
from tinycortex import Cortex
from tinycortex.telemetry import Event, JobClaimed

NUMBERS = (1, 2, 4, 8)
WARM_UP_S = 0.5
"""From the common start to where the figures begin: connections are open by then."""
_PATIENCE_S = 120.0
_WAIT_SHARE = 0.99

SHARE_TARGETS: dict[int, Target | None] = {4: targets.SHARE_OF_WORK, 8: targets.SHARE_OF_WORK}
WAIT_TARGETS: dict[int, Target | None] = {4: targets.CLAIM_WAIT_MS, 8: targets.CLAIM_WAIT_MS}


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker did while it was watched.

    Attributes:
        jobs: handlers started.
        claims_ms: how long each claim took (ms).
        handled: handlers started in all, before and after, too.
    """

    jobs: int
    claims_ms: list[float]
    handled: int


def run(plan: Plan) -> Iterator[Row]:
    """Yield rates of 1 to 8 workers, shares of the work and waits for a claim."""
    contestants: dict[str, Contestant] = {_name(number): partial(_measure, plan, number) for number in NUMBERS}
    yield from _rows(plan.interleave("processes", contestants))


def _rows(found: Series) -> Iterator[Row]:
    alone = found[_name(1)]
    for number in NUMBERS:
        yield Row(_name(number), "jobs/s", found[_name(number)])
        yield Row(_wait_name(number), "ms", found[_wait_name(number)], WAIT_TARGETS.get(number))
    for number in NUMBERS[1:]:
        target = targets.FOUR_PROCESSES if number == 4 else None  # noqa: PLR2004 - where the target stands
        yield Row(f"{_name(number)} ÷ 1", RATIO, ratios(found[_name(number)], alone), target)
        yield Row(_share_name(number), RATIO, found[_share_name(number)], SHARE_TARGETS.get(number))


def _measure(plan: Plan, number: int) -> dict[str, float]:
    rows = plan.sizes.shared
    path = plan.backlogs.copy(Backlog(kinds=(KIND,), ready=rows))
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager, ProcessPoolExecutor(number, mp_context=spawn) as pool:
        start = manager.Barrier(number, timeout=_PATIENCE_S)
        serving = [pool.submit(_serve, path, start, plan.sizes.window_s) for _ in range(number)]
        shares = [one.result() for one in serving]
    plan.backlogs.remove(path)
    if sum(share.handled for share in shares) >= rows:
        raise BenchmarkError(f"{number} workers had run through {rows} jobs before their time was over")
    jobs = [share.jobs for share in shares]
    if max(jobs) == 0:
        raise BenchmarkError(f"{number} workers did nothing within {plan.sizes.window_s:g} s")
    figures = {
        _name(number): sum(jobs) / plan.sizes.window_s,
        _wait_name(number): percentile([took for share in shares for took in share.claims_ms], _WAIT_SHARE),
    }
    return figures if number == 1 else figures | {_share_name(number): min(jobs) / max(jobs)}


def _serve(path: Path, start: threading.Barrier, window_s: float) -> Share:
    """Work on the file, together with the others, until the window is over; a child's part."""
    starts: list[float] = []
    claims: list[tuple[float, float]] = []
    stop = threading.Event()

    def note() -> None:
        starts.append(time.monotonic())

    def note_claim(event: Event) -> None:
        if isinstance(event, JobClaimed):
            claims.append((time.monotonic(), event.claim_ms))

    with Cortex.open(url_of(path)) as cortex:
        register(cortex, note)
        cortex.subscribe(note_claim)
        start.wait()
        begins = time.monotonic() + WARM_UP_S
        ends = begins + window_s
        threading.Timer(WARM_UP_S + window_s, stop.set).start()
        cortex.run_sync(stop)
    return Share(
        jobs=sum(begins <= at < ends for at in starts),
        claims_ms=[took for at, took in claims if begins <= at < ends],
        handled=len(starts),
    )


def _name(number: int) -> str:
    return f"{number} {'process' if number == 1 else 'processes'}"


def _share_name(number: int) -> str:
    return f"{_name(number)}: slowest ÷ fastest share"


def _wait_name(number: int) -> str:
    return f"{_name(number)}: one claim, 99 %"
