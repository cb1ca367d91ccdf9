"""What the command line prints: one JSON document, or a table for a person; nothing secret, no control codes."""

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tinycortex.domain.redact import scrub_for_log


def readable(text: str) -> str:
    """Return ``text`` without control characters, which could otherwise steer the reader's terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def plain(value: object) -> Text:
    """Return ``value`` as text that Rich prints as it stands, brackets and all."""
    return Text(readable("" if value is None else str(value)))


def console() -> Console:
    """Return a console on standard output as it is now."""
    return Console(highlight=False, soft_wrap=True)


def print_json(document: Any) -> None:  # noqa: ANN401 - whatever JSON can hold
    """Print one JSON document."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False, indent=2).encode(errors="replace").decode() + "\n")


def print_line(line: str) -> None:
    """Print one line for a person."""
    console().print(plain(line))


def print_error(message: str) -> None:
    """Print one line on standard error, its secrets masked."""
    line = " ".join(readable(scrub_for_log(message)).split())
    sys.stderr.write(f"error: {line}\n")


def print_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table for a person."""
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*(plain(cell) for cell in row))
    console().print(table)


def progress_bar() -> Progress:
    """Return a progress bar on standard error, which nobody sees unless that is a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def instant(ms: int | None) -> str:
    """Return milliseconds since the epoch as ISO 8601 with its offset, always UTC; a dash for none."""
    if ms is None:
        return "-"
    try:
        return datetime.fromtimestamp(ms / 1000, tz=UTC).isoformat(timespec="milliseconds")
    except (OverflowError, OSError, ValueError):
        return f"{ms} ms"
