"""pgqueuer's workers on one PostgreSQL database; runs in an environment of its own, and needs nothing of ours.

    python pgqueuer_peer.py URL JOBS PROCESSES BATCH

Installs its tables, enqueues, and drains with so many processes, each with its default settings but for the batch.
Prints the jobs done in a second, between the first handler's start and the last's.
"""

import asyncio
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from threading import Barrier

KIND = "noop"
ENQUEUED_AT_A_TIME = 1_000
PATIENCE_S = 120.0


async def fill(url: str, jobs: int) -> None:
    """Install the tables and enqueue ``jobs`` of one kind."""
    import asyncpg  # noqa: PLC0415 - only this environment has it
    from pgqueuer.db import AsyncpgDriver  # noqa: PLC0415 - as above
    from pgqueuer.queries import Queries  # noqa: PLC0415 - as above

    connection = await asyncpg.connect(url)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    for first in range(0, jobs, ENQUEUED_AT_A_TIME):
        numbers = range(first, min(jobs, first + ENQUEUED_AT_A_TIME))
        payloads = [f'{{"chunk_id":"c-{number}"}}'.encode() for number in numbers]
        await queries.enqueue([KIND] * len(payloads), payloads, [0] * len(payloads))
    await connection.execute("VACUUM ANALYZE")
    await connection.close()


async def serve(url: str, batch: int, start: Barrier) -> list[float]:
    """Work until the queue is empty, and return when each handler started (monotonic, s)."""
    import asyncpg  # noqa: PLC0415 - as above
    from pgqueuer import PgQueuer  # noqa: PLC0415 - as above
    from pgqueuer.db import AsyncpgDriver  # noqa: PLC0415 - as above
    from pgqueuer.types import QueueExecutionMode  # noqa: PLC0415 - as above

    starts: list[float] = []
    connection = await asyncpg.connect(url)
    worker = PgQueuer(AsyncpgDriver(connection))

    async def handle(_job: object) -> None:
        starts.append(time.monotonic())

    worker.entrypoint(KIND)(handle)
    start.wait()
    await worker.qm.run(batch_size=batch, mode=QueueExecutionMode.drain)
    await connection.close()
    return starts


def serve_alone(url: str, batch: int, start: Barrier) -> list[float]:
    """Be one process of several."""
    return asyncio.run(serve(url, batch, start))


if __name__ == "__main__":
    where = sys.argv[1]
    jobs, processes, batch = map(int, sys.argv[2:])
    asyncio.run(fill(where, jobs))
    spawn = get_context("spawn")
    with spawn.Manager() as manager, ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        together = manager.Barrier(processes, timeout=PATIENCE_S)
        serving = [pool.submit(serve_alone, where, batch, together) for _ in range(processes)]
        starts = [at for one in serving for at in one.result()]
    if len(starts) != jobs:
        raise SystemExit(f"{len(starts)} of {jobs} jobs were started")
    sys.stdout.write(f"{(jobs - 1) / (max(starts) - min(starts))}\n")
