"""Processes are killed at random, and every effect is there exactly once.

Ten kills by default; ``--kills 40`` for the long run, ``--kill-seed`` for other victims.
"""

import random
import subprocess
from contextlib import ExitStack

import pytest

from background import outcome, program, until
from tinycortex import Cortex, Database, JobStatus

WORKERS, PRODUCERS = 4, 2

PRODUCE = """
import sys, threading
from sqlalchemy import text
from tinycortex import Cortex, NewJob

url, lane = sys.argv[1], int(sys.argv[2])
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
with Cortex.open(url) as cortex:
    print("up", flush=True)
    with cortex.transaction() as session:
        last = session.scalar(text("SELECT MAX(number) FROM produced WHERE lane = :lane"), {"lane": lane})
    number = lane if last is None else last + 2
    while not stop.wait(0.004):
        with cortex.transaction() as session:
            session.execute(text("INSERT INTO produced VALUES (:lane, :number)"), {"lane": lane, "number": number})
            job = NewJob(kind="first", payload_json=f'{{"number": {number}}}', dedupe_key=f"first:{number}",
                         max_attempts=100)
            assert cortex.enqueue(job, session=session) is not None
        number += 2
"""

WORK = """
import random, sys, threading, time
from pydantic import BaseModel
from sqlalchemy import text
from tinycortex import Cortex, Done, NewJob, Settings
from tinycortex.config import QueueSettings, SchedulerSettings, WorkerSettings

class Number(BaseModel):
    number: int

def effect(kind, number):
    statement = text("INSERT INTO effects VALUES (:kind, :number)")
    return lambda session: session.execute(statement, {"kind": kind, "number": number})

stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
settings = Settings(
    queue=QueueSettings(lease_ms=2_000), worker=WorkerSettings(idle_ms=5), scheduler=SchedulerSettings(tick_s=1)
)
with Cortex.open(sys.argv[1], settings=settings) as cortex:

    @cortex.handler("first", payload=Number)
    def first(ctx, payload):
        time.sleep(random.random() * 0.004)
        then = NewJob(kind="then", payload_json=ctx.job.payload_json, dedupe_key=f"then:{payload.number}",
                      max_attempts=100)
        return Done(follow_ups=[then], writes=effect("first", payload.number))

    @cortex.handler("then", payload=Number)
    async def then(ctx, payload):
        return Done(writes=effect("then", payload.number))

    print("up", flush=True)
    cortex.run_sync(stop)
"""


class Fleet:
    """Workers and producers, each started again when it has been killed."""

    def __init__(self, stack: ExitStack, url: str) -> None:
        self._stack, self._url = stack, url
        roles = [(WORK, "")] * WORKERS + [(PRODUCE, str(lane)) for lane in range(PRODUCERS)]
        self.members = [(role, self.start(*role)) for role in roles]
        for _role, process in self.members:
            wait_until_up(process)

    def start(self, code: str, argument: str) -> subprocess.Popen[str]:
        return self._stack.enter_context(program(code, self._url, argument))

    def kill(self, index: int) -> None:
        role, process = self.members[index]
        assert process.poll() is None, outcome(process)  # nothing but us ends them
        process.kill()
        process.wait()
        self.members[index] = (role, self.start(*role))
        wait_until_up(self.members[index][1])


def wait_until_up(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if process.stdout.readline() != "up\n":
        raise AssertionError(outcome(process))


def count_active(cortex: Cortex) -> int:
    counts = cortex.jobs.count_by_status()
    return counts[JobStatus.READY] + counts[JobStatus.RUNNING]


def count_effects(database: Database, query: str) -> dict[int, int]:
    with database.reading() as session:
        rows = session.connection().exec_driver_sql(query).all()
    return {row[0]: row[1] for row in rows}


@pytest.fixture
def tables(database: Database) -> None:
    """Make the application's own tables; without any constraint, so that what is doubled can be seen."""
    with database.transaction() as session:
        session.connection().exec_driver_sql("CREATE TABLE produced (lane INTEGER, number INTEGER)")
        session.connection().exec_driver_sql("CREATE TABLE effects (kind VARCHAR(10), number INTEGER)")


@pytest.mark.usefixtures("tables")
def test_every_effect_is_there_exactly_once(
    cortex: Cortex, database: Database, database_url: str, pytestconfig: pytest.Config
) -> None:
    """Whoever is killed and whenever: no job is lost, none is doubled, none is left behind."""
    choose = random.Random(pytestconfig.getoption("--kill-seed"))  # noqa: S311 - victims, not secrets
    with ExitStack() as stack:
        fleet = Fleet(stack, database_url)
        for _ in range(pytestconfig.getoption("--kills")):
            with pytest.raises(subprocess.TimeoutExpired):
                fleet.members[0][1].wait(choose.uniform(0.02, 0.5))
            fleet.kill(choose.randrange(len(fleet.members)))
        for _role, producer in fleet.members[WORKERS:]:
            assert outcome(producer) == (0, "", "")  # the end of their input stops them
        for index in range(WORKERS):
            fleet.kill(index)
        until(lambda: count_active(cortex) == 0)
        for _role, worker in fleet.members[:WORKERS]:
            assert outcome(worker) == (0, "", "")
    produced = count_effects(database, "SELECT number, COUNT(*) FROM produced GROUP BY number")
    assert len(produced) > PRODUCERS
    assert set(produced.values()) == {1}
    for kind in ("first", "then"):
        effects = count_effects(database, f"SELECT number, COUNT(*) FROM effects WHERE kind = '{kind}' GROUP BY number")
        assert effects == produced
        assert cortex.jobs.count_by_kind_and_status()[kind, "done"] == len(produced)
    assert {status for _kind, status in cortex.jobs.count_by_kind_and_status()} == {"done"}
    assert database.find_damage() == []
