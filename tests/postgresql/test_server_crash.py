"""A server is killed under four workers and started again: they go on by themselves, and every effect is there once."""

from contextlib import ExitStack
from typing import Any

import psycopg
from sqlalchemy import make_url

from background import outcome, program, until
from postgresql_server import OwnServer, psycopg_url
from tinycortex import Cortex, NewJob

JOBS, WORKERS, AT_A_TIME = 5_000, 4, 32

WORK = """
import sys, threading
from pydantic import BaseModel
from sqlalchemy import text
from tinycortex import Cortex, Done, Settings
from tinycortex.config import QueueSettings, WorkerSettings

class Number(BaseModel):
    number: int

EFFECT = text("INSERT INTO effects VALUES (:number)")

stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
settings = Settings(
    queue=QueueSettings(lease_ms=5_000), worker=WorkerSettings(idle_ms=20, io_ms=50, busy_ms=20, recover_ms=500)
)
with Cortex.open(sys.argv[1], settings=settings) as cortex:

    @cortex.handler("note", payload=Number)
    async def note(ctx, payload):
        return Done(writes=lambda session: session.execute(EFFECT, {"number": payload.number}))

    cortex.run_sync(stop, concurrency=int(sys.argv[2]))
"""


def test_every_effect_is_there_exactly_once(own_server: OwnServer, own_url: str) -> None:
    """What was synced is there, what was not is done again, and leases alone explain an attempt more."""
    with psycopg.connect(psycopg_url(own_url)) as owner:
        owner.execute("CREATE TABLE effects (number INTEGER)")  # without any constraint, so that a double can be seen
    with Cortex.open(own_url) as cortex:
        cortex.enqueue_many(NewJob(kind="note", payload_json=f'{{"number": {number}}}') for number in range(JOBS))
    with ExitStack() as processes:
        workers = [processes.enter_context(program(WORK, own_url, str(AT_A_TIME))) for _ in range(WORKERS)]
        with connect(own_server, own_url) as administrator:
            until(lambda: ask(administrator, "SELECT COUNT(*) > 1000 FROM effects"))
        own_server.kill()
        own_server.start()
        with connect(own_server, own_url) as administrator:
            until(lambda: ask(administrator, f"SELECT NOT EXISTS ({ACTIVE})"))
            effects = administrator.execute("SELECT number FROM effects ORDER BY number").fetchall()
            found = administrator.execute("SELECT status, attempts FROM mem_tree_jobs WHERE kind = 'note'").fetchall()
        outcomes = [outcome(worker) for worker in workers]  # the end of their input stops them
    assert effects == [(number,) for number in range(JOBS)]
    assert {status for status, _attempts in found} == {"done"}
    assert len(found) == JOBS
    assert max(attempts for _status, attempts in found) <= 2
    assert sum(attempts - 1 for _status, attempts in found) <= WORKERS * AT_A_TIME
    assert [(code, out) for code, out, _err in outcomes] == [(0, "")] * WORKERS
    assert max(err.count("trying again") for _code, _out, err in outcomes) == 1


ACTIVE = "SELECT FROM mem_tree_jobs WHERE kind = 'note' AND status IN ('ready', 'running')"


def connect(server: OwnServer, url: str) -> psycopg.Connection[Any]:
    return psycopg.connect(psycopg_url(server.url_of(str(make_url(url).database))), autocommit=True)


def ask(administrator: psycopg.Connection[Any], question: str) -> bool:
    return administrator.execute(question.encode()).fetchone() == (True,)
