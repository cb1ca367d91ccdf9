"""``tinycortex work`` and ``tinycortex tick``: run jobs, and do the scheduler's work once."""

import signal
import sys
import threading
from dataclasses import asdict
from types import FrameType
from typing import Annotated

import typer

from tinycortex.app import Cortex
from tinycortex.cli.opening import AsJson, open_cortex
from tinycortex.cli.output import print_json, print_line, print_table

_DEFERRED_MS = 2_000


def work(
    ctx: typer.Context,
    drain: Annotated[bool, typer.Option("--drain", help="Stop when nothing is due.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run jobs until SIGINT or SIGTERM, or with --drain until none is due."""
    with open_cortex(ctx) as cortex:
        before = cortex.status().by_status
        if drain:
            purged, recovered = cortex.bootstrap()
            performed = cortex.drain_until_idle(wait_ms=_DEFERRED_MS)
            report = {"performed": performed, "purged": purged, "recovered": recovered}
        else:
            _run(cortex)
            report = {}
        after = cortex.status().by_status
        report |= {"done": after["done"] - before["done"], "ready": after["ready"], "failed": after["failed"]}
    if as_json:
        print_json(report)
    else:
        print_table(("what", "how many"), report.items())


def _run(cortex: Cortex) -> None:
    stop = threading.Event()

    def request_stop(number: int, _frame: FrameType | None) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once

    earlier = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    sys.stderr.write(f"working on {cortex.database.masked_url}; stop with Ctrl-C\n")
    sys.stderr.flush()
    try:
        cortex.run_sync(stop)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def tick(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Do the scheduler's periodic work once: recover leases, enqueue the flush, heal, purge."""
    with open_cortex(ctx) as cortex:
        report = cortex.tick()
    if as_json:
        print_json(asdict(report))
        return
    print_line(f"recovered {report.recovered}, purged {report.purged}")
    print_line(f"flush {report.flush_job_id or 'had its turn in this block'}")
    print_line(
        f"healed {report.healed.revived}, superseded {report.healed.superseded}, blocked {report.healed.blocked}"
    )
