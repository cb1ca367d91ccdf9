"""``tinycortex move``: a whole queue into another database."""

import time
from dataclasses import asdict
from typing import Annotated

import typer

from tinycortex.cli.opening import AsJson, refuse_database_url
from tinycortex.cli.output import print_json, print_line, print_table, progress_bar
from tinycortex.services.move import MoveProgress, MoveStage
from tinycortex.services.move import move as move_queue

_TITLES = {MoveStage.WAIT: "wait for running jobs", MoveStage.COPY: "copy", MoveStage.VERIFY: "verify"}


def move(
    ctx: typer.Context,
    source: Annotated[str, typer.Option("--from", metavar="URL", help="Database to read; nothing is written there.")],
    target: Annotated[
        str, typer.Option("--to", metavar="URL", help="Database without a row; made, and upgraded, when need be.")
    ],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no job of the source is running.")] = False,
    as_json: AsJson = False,
) -> None:
    """Copy every row into an empty database, of whatever engine, and verify all of it before it is kept."""
    refuse_database_url(ctx, "--from and --to")
    started = time.monotonic()
    with progress_bar() as progress:
        tasks = {stage: progress.add_task(title, visible=False) for stage, title in _TITLES.items()}

        def show(seen: MoveProgress) -> None:
            for stage, task in tasks.items():
                progress.update(task, visible=stage is seen.stage)
            progress.update(tasks[seen.stage], completed=seen.done, total=seen.total)

        report = move_queue(source, target, wait=wait, on_progress=show)
    seconds = round(time.monotonic() - started, 3)
    if as_json:
        print_json({**asdict(report), "seconds": seconds})
        return
    moved = [(name, digest.rows, digest.checksum) for name, digest in report.tables.items()]
    print_table(
        ("table", "rows", "checksum"),
        [*moved, ("active dedupe keys", report.active_keys.rows, report.active_keys.checksum)],
    )
    print_line(f"moved from {report.source} to {report.target} in {seconds} s")
