"""What a run found, as a table for a person and as JSON."""

import os
import platform
import sqlite3
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from rich.table import Table
from rich.text import Text

from benchmarks.figures import Row, Target, Verdict, readable

STYLES = {Verdict.GOAL: "green", Verdict.HOLDS: "yellow", Verdict.MISSED: "bold red"}

Results = Mapping[str, Sequence[Row]]
"""The rows of each benchmark, by its name."""


def table_of(results: Results) -> Table:
    """Return the table: median, least and greatest value of each row, and what it should be."""
    table = Table("benchmark", "what", "unit", box=None, pad_edge=False)
    for head in ("median", "spread", "at least", "goal"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, rows in results.items():
        for number, row in enumerate(rows):
            verdict = row.verdict
            table.add_row(
                Text(name if number == 0 else ""),
                Text(row.what),
                row.unit,
                readable(row.median),
                f"{readable(row.low)} - {readable(row.high)}" if len(row.values) > 1 else "",
                *_target_cells(row.target),
                Text("" if verdict is None else verdict.value, style="" if verdict is None else STYLES[verdict]),
            )
        table.add_section()
    return table


def document_of(results: Results, *, rounds: int, is_quick: bool) -> dict[str, Any]:
    """Return what JSON holds: the machine, the run, and every row with all its values."""
    return {
        "tinycortex": version("tinycortex"),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "sqlalchemy": version("sqlalchemy"),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "rounds": rounds,
        "quick": is_quick,
        "rows": [{"benchmark": name, **_document_of_row(row)} for name, rows in results.items() for row in rows],
    }


def _target_cells(target: Target | None) -> tuple[str, str]:
    if target is None:
        return "", ""
    return f"{target.sign} {readable(target.bound)}", f"{target.sign} {readable(target.goal)}"


def _document_of_row(row: Row) -> dict[str, Any]:
    described: dict[str, Any] = {
        "what": row.what,
        "unit": row.unit,
        "median": _rounded(row.median),
        "values": [_rounded(value) for value in row.values],
    }
    if row.target is None:
        return described
    direction = "at_least" if row.target.rising else "at_most"
    return described | {direction: row.target.bound, "goal": row.target.goal, "verdict": row.verdict}


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
