"""What must hold at the end of the soak."""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from soak_roles import LOG_MARK, REFUSED

MOST_GROWTH = 1.3
WARM_AFTER_S = 10.0
"""A worker's first seconds are left out: it has not yet opened and loaded all that it works with."""
MOST_RECORDS_PER_MINUTE = 100
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """A worker's resident memory at one moment, and how long it had run by then."""

    at_s: float
    age_s: float
    rss_kib: int


@dataclass(slots=True)
class Account:
    """What was seen while the soak ran."""

    folder: Path
    minutes: float
    samples: list[Sample] = field(default_factory=list)
    disturbances: dict[str, int] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    left_running: int = 0
    still_running: int = 0
    freed_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the result."""

    name: str
    holds: bool
    detail: str


def read_rss_kib(pid: int) -> int | None:
    """Return the resident memory of a process (KiB); None when it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), None)


def check_all(account: Account, connection: sqlite3.Connection, *, freed_within_s: float) -> list[Check]:
    """Return every check, whether it holds or not."""
    return [
        *check_rows(account, connection),
        check_freed(account, freed_within_s),
        check_integrity(connection),
        check_memory(account),
        check_logs(account),
        check_ends(account),
    ]


def check_rows(account: Account, connection: sqlite3.Connection) -> Iterator[Check]:
    """Compare what was enqueued with the rows, and the rows with their effects."""
    notes = [line.split(" ") for path in account.folder.glob("*.ids") for line in path.read_text().splitlines()]
    returned = {job_id for _name, job_id in notes if job_id}
    refused = {name for name, job_id in notes if not job_id}
    select = "SELECT id, kind, json_extract(payload_json, '$.name'), json_extract(payload_json, '$.count'), status"
    rows = connection.execute(
        f"{select}, failure_reason, last_error FROM mem_tree_jobs WHERE kind IN ('first', 'then')"
    ).fetchall()
    active = connection.execute("SELECT id FROM mem_tree_jobs WHERE status IN ('ready', 'running')").fetchall()
    ended = {row[0] for row in rows if row[4] == "done" or (row[4] == "failed" and row[5] == REFUSED)}
    lost = returned - ended
    failed = sum(row[4] == "failed" for row in rows)
    yield _check("nothing lost", lost, f"{len(returned)} ids returned, {failed} rows failed as they were told to")
    there = {row[2] for row in rows if row[1] == "first"}
    yield _check("refused enqueues wrote nothing", refused & there, f"{len(refused)} refused")
    effects = Counter(connection.execute("SELECT kind, name FROM effects"))
    done = Counter((row[1], row[2]) for row in rows if row[4] == "done")
    wrong = {key for key in done.keys() | effects.keys() if (done[key], effects[key]) != (1, 1)}
    yield _check("effects exactly once", wrong, f"{sum(effects.values())} effects of {sum(done.values())} done rows")
    followed = Counter(row[2] for row in rows if row[1] == "then")
    wanted = Counter(row[2] for row in rows if row[1] == "first" and row[4] == "done" and row[3] % 2 == 0)
    odd = {name for name in followed.keys() | wanted.keys() if followed[name] != wanted[name]}
    yield _check("follow-ups exactly once", odd, f"{sum(followed.values())} follow-ups of {sum(wanted.values())} jobs")
    yield _check("nothing left to do", [row[0] for row in active], "no row ready or running")


def check_freed(account: Account, within_s: float) -> Check:
    """What the last kill left running must run no longer than a lease and a tick."""
    detail = f"{account.left_running} left by the last kill, freed after {account.freed_after_s:.1f} s"
    # With nothing left behind there is nothing that this check has seen.
    holds = account.left_running > 0 and account.still_running == 0 and account.freed_after_s <= within_s
    return Check(
        "no row running after lease + tick", holds, f"{detail}, {account.still_running} never (<= {within_s:g} s)"
    )


def check_integrity(connection: sqlite3.Connection) -> Check:
    """SQLite's own look at every page."""
    lines = [line for (line,) in connection.execute("PRAGMA integrity_check")]
    return Check("integrity_check", lines == ["ok"], "; ".join(lines[:SHOWN]))


def check_memory(account: Account) -> Check:
    """The last third of the run against its first."""
    warm = [sample for sample in account.samples if sample.age_s >= WARM_AFTER_S]
    third = account.minutes * 60 / 3
    first = [sample.rss_kib for sample in warm if sample.at_s <= third]
    last = [sample.rss_kib for sample in warm if sample.at_s >= 2 * third]
    if not first or not last:
        return Check("worker memory flat", holds=False, detail="no samples: run for longer")
    ratio = max(last) / median(first)
    detail = f"{max(last) // 1024} MiB at most / {median(first) / 1024:.0f} MiB = {ratio:.2f} (<= {MOST_GROWTH})"
    return Check("worker memory flat", ratio <= MOST_GROWTH, detail)


def check_logs(account: Account) -> Check:
    """A disturbed worker says so, and does not say it all the time."""
    counts = []
    for path in sorted(account.folder.glob("*.log")):
        lines = path.read_text(encoding="utf-8").splitlines()
        counts.append(sum(line.startswith(LOG_MARK) for line in lines) / account.minutes)
    detail = f"{', '.join(f'{count:.1f}' for count in counts)} per worker per minute (<= {MOST_RECORDS_PER_MINUTE})"
    return Check("log records bounded", max(counts, default=0) <= MOST_RECORDS_PER_MINUTE, detail)


def check_ends(account: Account) -> Check:
    """Nobody but the soak ends a process, and none has anything to say on its standard error."""
    said = [
        f"{path.name}: {text.splitlines()[-1]}" for path in account.folder.glob("*.err") if (text := path.read_text())
    ]
    disturbances = ", ".join(f"{name} {count}" for name, count in sorted(account.disturbances.items()))
    return _check("no process ended by itself", [*account.unexpected, *said], disturbances)


def _check(name: str, wrong: Iterable[object], detail: str) -> Check:
    found = sorted(map(str, wrong))
    shown = "" if not found else f"; {len(found)} wrong: {', '.join(found[:SHOWN])}"
    return Check(name, not found, detail + shown)
