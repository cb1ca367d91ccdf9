"""The command line: one benchmark or all of them, as one table."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import claim_backlog, latency_rows, memory, peers, postgresql, raw, startup, statements, throughput
from benchmarks.backlogs import Backlogs
from benchmarks.chart import draw
from benchmarks.figures import Row, Verdict
from benchmarks.plan import QUICK, BenchmarkError, Plan, Sizes
from benchmarks.report import document_of, table_of

DOCS = Path(__file__).parents[1] / "docs"

_PIPE_WIDTH = 150
"""Where nothing says how wide the page is (characters)."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Name(StrEnum):
    """What can be run."""

    ALL = "all"
    RAW = "raw"
    CLAIM_BACKLOG = "claim_backlog"
    THROUGHPUT = "throughput"
    LATENCY = "latency"
    POSTGRESQL_LATENCY = "postgresql_latency"
    PEERS = "peers"
    MEMORY = "memory"
    STARTUP = "startup"
    STATEMENTS = "statements"
    POSTGRESQL = "postgresql"


BENCHMARKS: dict[Name, Callable[[Plan], Iterator[Row]]] = {
    Name.RAW: raw.run,
    Name.CLAIM_BACKLOG: claim_backlog.run,
    Name.THROUGHPUT: throughput.run,
    Name.LATENCY: latency_rows.run,
    Name.POSTGRESQL_LATENCY: latency_rows.run_on_postgresql,
    Name.PEERS: peers.run,
    Name.MEMORY: memory.run,
    Name.STARTUP: startup.run,
    Name.STATEMENTS: statements.run,
    Name.POSTGRESQL: postgresql.run,
}

_PARTS = [name for name in BENCHMARKS if name is not Name.RAW]
"""What ``all`` runs: throughput has the bare driver beside it in each round."""


@app.command()
def main(
    name: Annotated[Name, typer.Argument(help="Which benchmark.")],
    *,
    rounds: Annotated[int, typer.Option(min=1, help="How often each contestant measures.")] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: a smoke run, whose figures say nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for performance.json and performance.svg; docs for all in full size, else none."),
    ] = None,
    memory_jobs: Annotated[int | None, typer.Option(min=1, help="Jobs of the memory benchmark's worker.")] = None,
) -> None:
    """Measure, and print one table; the exit code is 1 when a figure misses its target in full size."""
    sizes = QUICK if quick else Sizes()
    if memory_jobs is not None:
        sizes = replace(sizes, few_jobs=min(sizes.few_jobs, memory_jobs), many_jobs=memory_jobs)
    with tempfile.TemporaryDirectory() as folder, _progress() as progress:
        plan = Plan(rounds=rounds, sizes=sizes, backlogs=Backlogs(Path(folder)), progress=progress)
        wanted = _PARTS if name is Name.ALL else [name]
        try:
            results = {part.value: list(BENCHMARKS[part](plan)) for part in wanted}
        except BenchmarkError as error:
            raise typer.BadParameter(str(error)) from error
    document = document_of(results, rounds=rounds, is_quick=quick)
    if as_json:
        sys.stdout.write(_text_of(document))
    else:
        _print(table_of(results))
    rows = [row for found in results.values() for row in found]
    folder_out = DOCS if out is None and name is Name.ALL and not quick else out
    if folder_out is not None:
        folder_out.mkdir(parents=True, exist_ok=True)
        (folder_out / "performance.json").write_text(_text_of(document), encoding="utf-8")
        (folder_out / "performance.svg").write_text(draw(rows), encoding="utf-8")
    missed = any(row.verdict is Verdict.MISSED for row in rows)
    raise typer.Exit(code=int(missed and not quick))


def _print(table: Table) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    console.print(table)


def _progress() -> Progress:
    console = Console(stderr=True)
    # It is drawn only when a step begins: a thread that draws beside would take its share of the processor.
    return Progress(
        TextColumn("{task.description}", markup=False),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        disable=not console.is_terminal,
    )


def _text_of(document: dict[str, object]) -> str:
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"
