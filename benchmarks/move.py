"""A whole queue moved from SQLite to PostgreSQL and back, by the clock and by the checksums.

    python -m benchmarks.move
    python -m benchmarks.move --jobs 20000 --chunks 5000 --json

The server is one of the run's own; with --url the queue goes into that database instead, which must be empty. The
exit code is 0 only when both moves, and so all three databases, have the same checksums.
"""

import argparse
import json
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.backlogs import Backlog, Backlogs, url_of
from benchmarks.postgresql_databases import server
from tinycortex import JobKind, MoveReport, move

WORDS = [
    "the",
    "agent",
    "kept",
    "a",
    "note",
    "of",
    "what",
    "Ada",
    "said",
    "in",
    "Zürich",
    "—",
    "東京",
    "😀",
    "and",
    "when",
]
WORDS_PER_CHUNK = 150
INSERT_CHUNK = """
INSERT INTO mem_tree_chunks (id, source_kind, source_id, owner, timestamp_ms, time_range_start_ms, time_range_end_ms,
  content, token_count, seq_in_source, created_at_ms, lifecycle_status)
VALUES (?, 'chat', ?, 'ada', ?, ?, ?, ?, ?, ?, ?, 'admitted')
"""


def chunks_of(number: int) -> Iterator[tuple[object, ...]]:
    """Yield so many chunks of about a kilobyte, the same ones every time."""
    chance = random.Random(number)  # noqa: S311 - words, not secrets
    for chunk in range(number):
        content = " ".join(chance.choices(WORDS, k=WORDS_PER_CHUNK))
        source, at_ms = f"chat:{chunk // 1_000}", 1_780_000_000_000 + chunk
        yield f"chunk-{chunk:08d}", source, at_ms, at_ms, at_ms, content, WORDS_PER_CHUNK, chunk % 1_000, at_ms


def make_source(folder: Path, jobs: int, chunks: int) -> str:
    """Make a file with so many jobs, half of them done, and so many chunks, and return its URL."""
    kinds = tuple(kind.value for kind in JobKind)
    path = Backlogs(folder).copy(Backlog(kinds=kinds, behind=jobs // 2, ready=jobs - jobs // 2))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany(INSERT_CHUNK, chunks_of(chunks))
    return url_of(path)


@contextmanager
def find_target(given: str | None) -> Iterator[str]:
    """Yield the URL of an empty PostgreSQL database."""
    if given is not None:
        yield given
        return
    with server() as databases:
        yield databases.make()


def move_timed(source: str, target: str) -> tuple[MoveReport, float]:
    """Move, and return the report and how long it took (s)."""
    began = time.perf_counter()
    report = move(source, target)
    return report, time.perf_counter() - began


def main() -> int:
    """Make a queue, move it there and back, print what it took, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200_000, help="jobs of the queue (200000)")
    parser.add_argument("--chunks", type=int, default=50_000, help="chunks of the queue (50000)")
    parser.add_argument("--url", help="an empty PostgreSQL database; without it a server is started")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, find_target(options.url) as target:
        source = make_source(Path(folder), options.jobs, options.chunks)
        there, there_s = move_timed(source, target)
        back, back_s = move_timed(target, url_of(Path(folder) / "back.db"))
    are_equal = (there.tables, there.active_keys) == (back.tables, back.active_keys)
    sums = {**there.tables, "active dedupe keys": there.active_keys}
    sums_back = {**back.tables, "active dedupe keys": back.active_keys}
    if options.json:
        tables = {
            name: {"rows": sums[name].rows, "there": sums[name].checksum, "back": sums_back[name].checksum}
            for name in sums
        }
        document = {"there_s": round(there_s, 2), "back_s": round(back_s, 2), "equal": are_equal, "tables": tables}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        console = Console()
        table = Table("table", "rows", "SQLite → PostgreSQL", "PostgreSQL → SQLite", box=None)
        for name, digest in sums.items():
            if digest.rows:
                table.add_row(name, f"{digest.rows:,}", digest.checksum, sums_back[name].checksum)
        console.print(table)
        console.print(
            f"there in {there_s:.1f} s, back in {back_s:.1f} s; checksums {'equal' if are_equal else 'DIFFER'}"
        )
    return 0 if are_equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
