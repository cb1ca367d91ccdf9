"""The peers, each with the settings that it has by default; runs in their own environment, and needs nothing of ours.

    python peer_queues.py NAME FOLDER JOBS

Prints a JSON list: jobs enqueued, and jobs done, in a second. Every enqueue, and every take and every end of a
job, is a call of its own.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 300.0


def measure_huey(folder: Path, jobs: int) -> tuple[float, float]:
    """Measure huey with its own consumer, which has one worker thread by default."""
    from huey import SqliteHuey  # noqa: PLC0415 - each peer is imported alone

    queue = SqliteHuey(filename=str(folder / "huey.db"))
    starts: list[float] = []
    over = threading.Event()

    def noop(_chunk_id: str) -> None:
        starts.append(time.perf_counter())
        if len(starts) == jobs:
            over.set()

    task = queue.task()(noop)
    enqueued = measure(jobs, lambda number: task(f"c-{number}"))
    consumer = queue.create_consumer()
    consumer.start()
    try:
        if not over.wait(PATIENCE_S):
            raise TimeoutError(f"huey did {len(starts)} of {jobs} jobs in {PATIENCE_S:g} s")
    finally:
        consumer.stop(graceful=True)
    return enqueued, (jobs - 1) / (starts[-1] - starts[0])


def measure_litequeue(folder: Path, jobs: int) -> tuple[float, float]:
    """Measure litequeue, which has no worker: a loop takes a job and ends it."""
    from litequeue import LiteQueue  # noqa: PLC0415 - as above

    queue = LiteQueue(str(folder / "litequeue.db"))

    def take(_number: int) -> None:
        queue.done(queue.pop().message_id)

    return measure(jobs, lambda number: queue.put(f'{{"chunk_id":"c-{number}"}}')), measure(jobs, take)


def measure_persist_queue(folder: Path, jobs: int) -> tuple[float, float]:
    """Measure persist-queue's queue with acknowledgement, which has no worker either."""
    from persistqueue import SQLiteAckQueue  # noqa: PLC0415 - as above

    queue = SQLiteAckQueue(str(folder / "persist-queue"))
    return (
        measure(jobs, lambda number: queue.put({"chunk_id": f"c-{number}"})),
        measure(jobs, lambda _number: queue.ack(queue.get())),
    )


def measure(jobs: int, call: Callable[[int], object]) -> float:
    """Return how often ``call`` can be made in a second."""
    began = time.perf_counter()
    for number in range(jobs):
        call(number)
    return jobs / (time.perf_counter() - began)


PEERS: dict[str, Callable[[Path, int], tuple[float, float]]] = {
    "huey": measure_huey,
    "litequeue": measure_litequeue,
    "persist-queue": measure_persist_queue,
}

if __name__ == "__main__":
    name, place, count = sys.argv[1:]
    sys.stdout.write(json.dumps(PEERS[name](Path(place), int(count))) + "\n")
