"""What ends together is settled together, and each job gets its own result all the same."""

import asyncio
from collections.abc import Callable

import pytest
from pydantic import BaseModel
from sqlalchemy import event
from sqlalchemy.orm import Session

from background import until, working
from tinycortex import Cortex, Done, JobContext, JobFailure, JobStatus, NewJob

TOGETHER = 8


class Note(BaseModel):
    number: int = 0


class Other(BaseModel):
    text: str


def refused_follow_up() -> Done:
    return Done(follow_ups=[NewJob(kind="other", payload_json="{}")])


def failing_writes() -> Done:
    def write(_session: Session) -> None:
        raise ValueError("no")

    return Done(writes=write)


def failure() -> Done:
    raise JobFailure.transient("busy")


def run_together(cortex: Cortex, bad: Callable[[], Done]) -> list[str]:
    """Have eight handlers end in one turn of the loop, the fourth of them as ``bad`` says; return the jobs' ids."""
    begun: list[int] = []
    all_begun: list[asyncio.Event] = []

    async def handler(_ctx: JobContext, payload: Note) -> Done:
        if not all_begun:
            all_begun.append(asyncio.Event())
        begun.append(payload.number)
        if len(begun) == TOGETHER:
            all_begun[0].set()
        await all_begun[0].wait()
        return bad() if payload.number == 3 else Done()

    cortex.handler("other", payload=Other)(lambda _ctx, _payload: None)
    cortex.handler("note", payload=Note)(handler)
    ids = cortex.enqueue_many(NewJob.of("note", Note(number=number)) for number in range(TOGETHER))
    with working(cortex):
        until(lambda: {cortex.get_job(str(job_id)).status for job_id in ids}.isdisjoint({JobStatus.RUNNING}) and begun)
    return [str(job_id) for job_id in ids]


@pytest.mark.parametrize("bad", [refused_follow_up, failing_writes, failure])
def test_one_bad_result_takes_no_neighbour_down(cortex: Cortex, bad: Callable[[], Done]) -> None:
    """Seven are done; the eighth is a failed attempt with its own reason."""
    jobs = [cortex.get_job(job_id) for job_id in run_together(cortex, bad)]
    assert [job.status for job in jobs] == [
        JobStatus.READY if number == 3 else JobStatus.DONE for number in range(TOGETHER)
    ]
    assert (jobs[3].attempts, jobs[3].last_error is None) == (1, False)


def test_what_ends_together_commits_together(cortex: Cortex) -> None:
    """Eight jobs cost no eight commits."""
    statements: list[str] = []
    event.listen(
        cortex.database.engine,
        "before_cursor_execute",
        lambda _c, _cursor, statement, *_r: statements.append(statement),
    )
    run_together(cortex, Done)
    settled = [number for number, statement in enumerate(statements) if "status = 'done'" in statement]
    assert len(settled) >= TOGETHER
    between = statements[settled[0] : settled[TOGETHER - 1]]
    assert "BEGIN IMMEDIATE" not in between
