"""``tinycortex work``, ``scheduler`` and ``tick``: run jobs, and do the scheduler's work for ever or once."""

import sys
import threading
from collections.abc import Collection
from concurrent.futures import wait
from dataclasses import asdict
from typing import Annotated, NoReturn

import typer
from pydantic import ValidationError

from tinycortex.app import Cortex
from tinycortex.cli.opening import AsJson, open_cortex, settings_of
from tinycortex.cli.output import print_error, print_json, print_line, print_table
from tinycortex.cli.signals import stopped_by_signals
from tinycortex.config import Settings
from tinycortex.errors import UnknownKindError
from tinycortex.threads import SerialThread

_DEFERRED_MS = 2_000
_LOOK_EVERY_S = 0.025
_WRONG_USAGE = 2


def work(
    ctx: typer.Context,
    concurrency: Annotated[
        int | None, typer.Option(min=1, max=1_000, help="Jobs at a time. Default: TINYCORTEX_WORKER__CONCURRENCY.")
    ] = None,
    kinds: Annotated[str | None, typer.Option(metavar="KIND,…", help="Run only jobs of these kinds.")] = None,
    worker_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Readable part of the worker's name. Default: host and process id.")
    ] = None,
    no_scheduler: Annotated[
        bool, typer.Option("--no-scheduler", help="Leave the periodic work to another process.")
    ] = False,
    drain: Annotated[
        bool, typer.Option("--drain", help="Run one job after another, and stop when none is due.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run jobs until SIGINT or SIGTERM, or with --drain until none is due; a second signal ends it at once."""
    if drain and concurrency is not None:
        _refuse("--drain runs one job at a time; leave --concurrency out")
    settings = _named(settings_of(ctx), worker_id)
    with stopped_by_signals() as stop, open_cortex(ctx, settings) as cortex:
        wanted = None if kinds is None else _known(cortex, kinds)
        before = cortex.status().by_status
        report = {}
        if drain:
            report = _drain(cortex, stop, wanted)
        else:
            _announce(f"working on {cortex.database.masked_url}")
            cortex.run_sync(stop, concurrency=concurrency, kinds=wanted, scheduler=not no_scheduler)
        after = cortex.status().by_status
        report |= {"done": after["done"] - before["done"], "ready": after["ready"], "failed": after["failed"]}
        if as_json:
            print_json(report)
        else:
            print_table(("what", "how many"), report.items())


def _refuse(message: str) -> NoReturn:
    print_error(message)
    raise typer.Exit(_WRONG_USAGE)


def _named(settings: Settings, worker_id: str | None) -> Settings:
    if worker_id is None:
        return settings
    try:
        worker = settings.worker.model_validate({**settings.worker.model_dump(), "id": worker_id})
    except ValidationError as error:
        _refuse(f"--worker-id: {error.errors()[0]['msg'].removeprefix('Value error, ')}")
    return settings.model_copy(update={"worker": worker})


def _known(cortex: Cortex, kinds: str) -> Collection[str]:
    try:
        return cortex.registry.check_kinds([kind.strip() for kind in kinds.split(",")]) or ()
    except UnknownKindError as error:
        _refuse(f"--kinds: {error}")


def _announce(what: str) -> None:
    sys.stderr.write(f"{what}; stop with Ctrl-C\n")
    sys.stderr.flush()


def _drain(cortex: Cortex, stop: threading.Event, kinds: Collection[str] | None) -> dict[str, int]:
    """Drain in a thread, so that a job which outlives the grace can be given back from here."""
    performed: list[None] = []
    purged, recovered = cortex.bootstrap()
    draining = SerialThread("tinycortex-drain").submit(
        lambda: cortex.drain_until_idle(
            wait_ms=_DEFERRED_MS, on_step=lambda: performed.append(None), kinds=kinds, stop=stop
        )
    )
    while not draining.done() and not stop.is_set():
        wait({draining}, timeout=_LOOK_EVERY_S)
    wait({draining}, timeout=cortex.settings.worker.shutdown_grace_s)
    if draining.done():
        draining.result()
    else:
        cortex.close()  # cancels what runs, and gives it back
    return {"performed": len(performed), "purged": purged, "recovered": recovered}


def scheduler(ctx: typer.Context) -> None:
    """Do the scheduler's periodic work until SIGINT or SIGTERM, and run no job; a second signal ends it at once."""
    with stopped_by_signals() as stop, open_cortex(ctx) as cortex:
        _announce(f"ticking every {cortex.settings.scheduler.tick_s} s on {cortex.database.masked_url}")
        cortex.run_scheduler(stop)


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
