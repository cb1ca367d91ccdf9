"""A connection that breaks during COMMIT: nobody can say whether the transaction was kept, and it does not matter."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import text

from background import until, working
from lossy_proxy import LossyProxy
from tinycortex import Cortex, Done, JobFailure, JobStatus, NewJob
from tinycortex.errors import StorageUnavailableError

CLAIM = "SET status = 'running'"
DONE = "SET status = 'done'"
RETRY = "SET status = 'ready', available_at_ms"


class Note(BaseModel):
    text: str = ""


@pytest.fixture
def proxy(database_url: str) -> Iterator[LossyProxy]:
    with LossyProxy(database_url) as proxy:
        yield proxy


@pytest.fixture
def far(open_hurried: Callable[[str], Cortex], proxy: LossyProxy) -> Cortex:
    """A queue whose connections go through the proxy."""
    return open_hurried(proxy.url)


def write(session: Any) -> None:
    session.execute(text("INSERT INTO effects VALUES (1)"))


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("word", [CLAIM, DONE])
def test_a_job_runs_once_and_is_settled_once(
    far: Cortex, cortex: Cortex, proxy: LossyProxy, effects: Callable[[], int], *, kept: bool, word: str
) -> None:
    """Kept or not, and though no lease ends meanwhile: one run, one effect, one follow-up, one attempt."""
    ran: list[int] = []

    def note(ctx: Any, _payload: Note) -> Done:
        ran.append(ctx.job.attempts)
        return Done(writes=write, follow_ups=[NewJob(kind="then", payload_json="{}")])

    far.handler("note", payload=Note)(note)
    job_id = str(far.enqueue(NewJob.of("note", Note())))
    proxy.lose(kept=kept, after=word)
    with working(far):
        until(lambda: proxy.lost and cortex.get_job(job_id).status is JobStatus.DONE)
    assert (ran, cortex.get_job(job_id).attempts, effects()) == ([1], 1, 1)
    assert len(cortex.jobs.list_jobs(kind="then")) == 1


@pytest.mark.parametrize("kept", [True, False])
def test_jobs_that_end_together_are_each_settled_once(
    far: Cortex, cortex: Cortex, proxy: LossyProxy, caplog: pytest.LogCaptureFixture, kept: bool
) -> None:
    """What one statement settles, with all follow-ups, and what is claimed in the same transaction."""
    ran: list[str] = []
    far.handler("note", payload=Note)(
        lambda _ctx, payload: ran.append(payload.text) or Done(follow_ups=[NewJob.of("then", payload)])  # type: ignore[func-returns-value]  # None, on purpose
    )
    numbers = [str(number) for number in range(100)]
    far.enqueue_many(NewJob.of("note", Note(text=number)) for number in numbers)
    proxy.lose(kept=kept, after=DONE)
    with working(far):
        until(lambda: proxy.lost and cortex.jobs.count_by_kind_and_status().get(("note", "done")) == 100)
    assert sorted(ran) == sorted(numbers)
    follow_ups = cortex.jobs.list_jobs(kind="then", limit=1_000)
    assert sorted(job.payload_json for job in follow_ups) == sorted(Note(text=n).model_dump_json() for n in numbers)
    assert {job.attempts for job in cortex.jobs.list_jobs(kind="note", limit=1_000)} == {1}
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kept", [True, False])
def test_a_failed_attempt_is_counted_once(far: Cortex, cortex: Cortex, proxy: LossyProxy, kept: bool) -> None:
    """The retry is as far off as after one failure, and no attempt more is burnt."""

    def note(_ctx: Any, _payload: Note) -> None:
        raise JobFailure.transient("net")

    far.handler("note", payload=Note)(note)
    job_id = str(far.enqueue(NewJob.of("note", Note())))
    proxy.lose(kept=kept, after=RETRY)
    with working(far):
        until(lambda: proxy.lost and cortex.get_job(job_id).status is JobStatus.READY)
    assert cortex.get_job(job_id).attempts == 1


@pytest.mark.parametrize("kept", [True, False])
def test_a_producer_that_tries_again_has_one_job(far: Cortex, cortex: Cortex, proxy: LossyProxy, kept: bool) -> None:
    """Its key suppresses the second one where the first was kept."""
    job = NewJob(kind="note", payload_json="{}", dedupe_key="once")
    proxy.lose(kept=kept, after="INSERT INTO mem_tree_jobs")
    with pytest.raises(StorageUnavailableError):
        far.enqueue(job)
    assert (far.enqueue(job) is None) is kept
    assert len(cortex.jobs.list_jobs()) == 1
