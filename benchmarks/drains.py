"""A worker that drains a queue of jobs that do nothing, through the public face and with default settings."""

import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel
from sqlalchemy import text

from benchmarks.backlogs import url_of
from benchmarks.plan import BenchmarkError
from tinycortex import Cortex, Done, JobContext, JobStatus, NewJob

KIND = "noop"
"""A kind that is not LLM-bound."""

LEFT_BEHIND = "noop_later"
"""The kind of follow-ups: nobody here handles it, so that each job of a drain has exactly one."""

ADD_EFFECT = text("INSERT INTO effects (chunk_id) VALUES (:chunk_id)")


class Chunk(BaseModel):
    """The payload of every job."""

    chunk_id: str


Body = Callable[[Chunk], Done | None]
"""What a handler does, and what it returns."""


def nothing(_payload: Chunk) -> None:
    """Do nothing."""


def one_follow_up(payload: Chunk) -> Done:
    """Leave one job behind."""
    return Done(follow_ups=[NewJob.of(LEFT_BEHIND, payload, dedupe_key=f"later:{payload.chunk_id}")])


def one_write(payload: Chunk) -> Done:
    """Write one row of the program's own with the settlement."""
    return Done(writes=lambda session: session.execute(ADD_EFFECT, {"chunk_id": payload.chunk_id}))


def new_job(number: int) -> NewJob:
    """Return a job like those of the bare driver: a small payload, and a key that no other has."""
    return NewJob.of(KIND, Chunk(chunk_id=f"c-{number}"), dedupe_key=f"k:{uuid.uuid4()}")


def fill(path: Path, jobs: int) -> float:
    """Enqueue ``jobs`` in one call, in the queue at ``path``; return the rows/s, the making of the jobs included."""
    with Cortex.open(url_of(path)) as cortex:
        register(cortex, lambda: None)  # so that payloads are checked
        began = time.perf_counter()
        cortex.enqueue_many(new_job(number) for number in range(jobs))
        return jobs / (time.perf_counter() - began)


def register(cortex: Cortex, note: Callable[[], object], *, body: Body = nothing, plain: bool = False) -> None:
    """Register the handler of ``KIND``; ``note`` is called at each start, ``plain`` ones run in threads."""

    def handle(_ctx: JobContext, payload: Chunk) -> Done | None:
        note()
        return body(payload)

    async def handle_async(_ctx: JobContext, payload: Chunk) -> Done | None:
        note()
        return body(payload)

    decorate = cortex.handler(KIND, payload=Chunk)
    if plain:
        decorate(handle)
    else:
        decorate(handle_async)


def drain(
    path: Path,
    jobs: int,
    *,
    limit_s: float,
    body: Body = nothing,
    plain: bool = False,
    concurrency: int | None = None,
) -> float:
    """Drain the queue at ``path`` and return the jobs/s between the first handler's start and the last's.

    Args:
        path: the file.
        jobs: how many jobs are in it.
        limit_s: the worker is stopped then, whatever is left (s).
        body: what each handler does.
        plain: the handler is a plain function instead of an asynchronous one.
        concurrency: jobs at a time; the default when None.

    Raises:
        BenchmarkError: it ran next to nothing, or what it ran is not done.
    """
    stop = threading.Event()
    starts: list[float] = []

    def note() -> None:
        starts.append(time.perf_counter())  # the one step that threads cannot lose
        if len(starts) >= jobs:
            stop.set()

    with Cortex.open(url_of(path)) as cortex:
        register(cortex, note, body=body, plain=plain)
        limit = threading.Timer(limit_s, stop.set)
        limit.start()
        try:
            cortex.run_sync(stop, concurrency=concurrency)
        finally:
            limit.cancel()
        done = cortex.jobs.count_by_status()[JobStatus.DONE]
    if len(starts) < 2 or done < len(starts):  # noqa: PLR2004 - a rate lies between two
        raise BenchmarkError(f"{len(starts)} handlers were started, and {done} jobs are done")
    return (len(starts) - 1) / (max(starts) - min(starts))
