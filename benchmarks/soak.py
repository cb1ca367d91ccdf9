"""Workers and producers are killed, locked out, deprived of room and told wrong times; then every row is accounted for.

    python benchmarks/soak.py --minutes 10
    python benchmarks/soak.py --minutes 2 --seed 7 --json

Three workers and two producers share one file. The exit code is 0 only when every check holds.
"""

import argparse
import json
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from soak_checks import Account, Check, Sample, check_all, read_rss_kib
from soak_roles import BUSY_TIMEOUT_MS, LEASE_MS, TICK_S

from tinycortex import schema

WORKERS, PRODUCERS = 3, 2
HOUR_MS = 3_600_000
STEPS_MS = (-2 * HOUR_MS, 0, 2 * HOUR_MS)
AHEAD_MS = 3 * HOUR_MS
"""Where the clocks stand for the drain: what a worker in the future enqueued is due by then."""
LOCK_S = 20.0
FULL_S = 5.0
EVERY_S = {"kill": (2.0, 10.0), "lock": (30.0, 70.0), "clock": (3.0, 12.0), "full": (10.0, 30.0)}
"""Pauses between two disturbances of a kind, least and most."""
DRAIN_S = 180.0
STOP_S = 60.0
LOOK_S = 0.05
KILL_ATTEMPTS = 20
SELECT_RUNNING = "SELECT id, claim_token FROM mem_tree_jobs WHERE status = 'running'"

ROLES = Path(__file__).with_name("soak_roles.py")


@dataclass(slots=True)
class Member:
    """One of the processes, started anew whenever it is killed."""

    role: str
    url: str
    slot: Path
    process: subprocess.Popen[str] = field(init=False)
    started_at: float = field(init=False)

    def start(self, offset_ms: int = 0) -> None:
        """Start the process, with its clock that far from the machine's."""
        with self.slot.with_suffix(".err").open("a", encoding="utf-8") as errors:
            self.process = subprocess.Popen(  # noqa: S603 - a script beside this one
                [sys.executable, str(ROLES), self.role, self.url, str(self.slot), str(offset_ms)],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                text=True,
            )
        self.started_at = time.monotonic()

    def kill(self) -> None:
        """Kill the process; its order pipe goes with it."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    def order(self, line: str) -> None:
        """Tell a worker what to do."""
        if self.process.stdin is not None:
            with suppress(OSError):  # it has ended, and is found so
                self.process.stdin.write(f"{line}\n")
                self.process.stdin.flush()

    def stop(self) -> None:
        """Have the process end by itself; its code is looked at later."""
        if self.process.stdin is not None:
            self.process.stdin.close()
            self.process.stdin = None
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)


class Soak:
    """The processes, and what is done to them until the time is over."""

    def __init__(self, folder: Path, seed: int, minutes: float) -> None:
        self.random = random.Random(seed)  # noqa: S311 - victims, not secrets
        self.path = folder / "chunks.db"
        self.length_s = minutes * 60
        url = f"sqlite:///{self.path}"
        schema.upgrade(url)
        with closing(self.connect()) as connection:
            connection.execute("CREATE TABLE effects (kind TEXT, name TEXT)")
        self.workers = [Member("work", url, folder / f"worker{number}") for number in range(WORKERS)]
        self.producers = [Member("produce", url, folder / f"producer{number}") for number in range(PRODUCERS)]
        self.members = [*self.workers, *self.producers]
        self.account = Account(folder=folder, minutes=minutes)
        self._disturb: dict[str, Callable[[], None]] = {
            "kill": self._kill,
            "lock": self._lock,
            "clock": self._step,
            "full": self._fill,
        }
        self._waiting: list[tuple[float, Callable[[], None]]] = []
        self._locker: sqlite3.Connection | None = None

    def connect(self) -> sqlite3.Connection:
        """Open the file beside the queue."""
        return sqlite3.connect(self.path, isolation_level=None, timeout=BUSY_TIMEOUT_MS / 1000)

    def run(self, on_look: Callable[[float], object]) -> None:
        """Disturb until the time is over, then let everything drain."""
        with ExitStack() as stack:
            for member in self.members:
                member.start()
                stack.callback(member.kill)
            begun = time.monotonic()
            for name in self._disturb:
                self._do_later(name)
            while (passed := time.monotonic() - begun) < self.length_s:
                on_look(passed)
                self._look_after(passed)
                time.sleep(LOOK_S)
            self._drain()
            for worker in self.workers:
                worker.stop()
            self._note_ended(expected=0)

    def _do_later(self, name: str) -> None:
        def do() -> None:
            self.account.disturbances[name] = self.account.disturbances.get(name, 0) + 1
            self._disturb[name]()
            self._do_later(name)

        self._wait(self.random.uniform(*EVERY_S[name]), do)

    def _wait(self, wait_s: float, do: Callable[[], None]) -> None:
        self._waiting.append((time.monotonic() + wait_s, do))

    def _look_after(self, passed: float) -> None:
        now = time.monotonic()
        due = [entry for entry in self._waiting if entry[0] <= now]
        self._waiting = [entry for entry in self._waiting if entry[0] > now]
        for _at, do in due:
            do()
        self._note_ended(expected=None)
        samples = self.account.samples
        if not samples or passed - samples[-1].at_s >= 1:
            for worker in self.workers:
                rss = read_rss_kib(worker.process.pid)
                if rss is not None:
                    samples.append(Sample(at_s=passed, age_s=now - worker.started_at, rss_kib=rss))

    def _note_ended(self, expected: int | None) -> None:
        """Note every process that ended, or did not, against what was expected of it; nobody but us ends one."""
        for member in self.members:
            if member.role == "produce" and expected == 0:
                continue  # looked at when they were stopped
            if (code := member.process.poll()) != expected:
                self.account.unexpected.append(f"{member.slot.name} ended with {code}")
                if expected is None:
                    member.start()

    def _kill(self) -> None:
        victim = self.random.choice(self.members)
        victim.kill()
        victim.start()

    def _lock(self) -> None:
        if self._locker is not None:
            return
        connection = self.connect()
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            connection.close()
            return
        self._locker = connection
        self._wait(LOCK_S, self._unlock)

    def _unlock(self) -> None:
        if self._locker is not None:
            self._locker.rollback()
            self._locker.close()
            self._locker = None

    def _step(self) -> None:
        self.random.choice(self.workers).order(f"clock {self.random.choice(STEPS_MS)}")

    def _fill(self) -> None:
        worker = self.random.choice(self.workers)
        worker.order("full")
        self._wait(FULL_S, lambda: worker.order("room"))

    def _drain(self) -> None:
        """Kill every worker once more, stop the producers, and wait until new workers have done everything."""
        self._unlock()
        with closing(self.connect()) as connection:
            left = self._kill_at_work(connection)
            self.account.left_running = len(left)
            for producer in self.producers:
                producer.stop()
                if producer.process.poll() != 0:
                    self.account.unexpected.append(f"{producer.slot.name} ended with {producer.process.poll()}")
            for worker in self.workers:
                worker.start(AHEAD_MS)
            begun = time.monotonic()
            active = "SELECT COUNT(*) FROM mem_tree_jobs WHERE status IN ('ready', 'running')"
            while time.monotonic() - begun < DRAIN_S:
                if left and not left.intersection(connection.execute(SELECT_RUNNING)):
                    left.clear()
                    self.account.freed_after_s = time.monotonic() - begun
                if not left and connection.execute(active).fetchone() == (0,):
                    break
                time.sleep(LOOK_S)
        self.account.still_running = len(left)

    def _kill_at_work(self, connection: sqlite3.Connection) -> set[tuple[str, int]]:
        """Kill all workers at once, and anew until it leaves claims behind; return those claims."""
        for attempt in range(KILL_ATTEMPTS):
            if attempt > 0:
                for worker in self.workers:
                    worker.start()
            give_up = time.monotonic() + STOP_S
            while not connection.execute(SELECT_RUNNING).fetchall() and time.monotonic() < give_up:
                time.sleep(0.001)
            for worker in self.workers:
                worker.process.kill()  # all of them, before any of them is waited for
            for worker in self.workers:
                worker.kill()
            if left := set(connection.execute(SELECT_RUNNING)):
                return left
        return set()


def main() -> None:
    """Run the soak and print a line for each check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=None, help="the same seed plans the same disturbances")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--keep", type=Path, default=None, help="an empty folder for the files, which then stay")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    console = Console(soft_wrap=True)
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(folder.absolute(), seed, options.minutes)
        with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
            task = progress.add_task(f"seed {seed}", total=soak.length_s)
            soak.run(lambda passed: progress.update(task, completed=passed))
        with closing(soak.connect()) as connection:
            checks = check_all(soak.account, connection, freed_within_s=LEASE_MS / 1000 + TICK_S)
    report(console, checks, seed, as_json=options.json)
    raise SystemExit(not all(check.holds for check in checks))


def report(console: Console, checks: list[Check], seed: int, *, as_json: bool) -> None:
    """Print what was found, and the seed to repeat it with."""
    if as_json:
        found = {check.name: {"holds": check.holds, "detail": check.detail} for check in checks}
        console.print_json(json.dumps({"seed": seed, "checks": found}))
        return
    for check in checks:
        console.print(
            f"{'ok  ' if check.holds else 'FAIL'} {check.name}: {check.detail}", markup=False, highlight=False
        )
    console.print(f"repeat with --seed {seed}", highlight=False)


if __name__ == "__main__":
    main()
