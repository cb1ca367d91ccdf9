"""What waits for the disk: whatever somebody was promised, and with ``durability=strict`` all the rest too."""

from collections.abc import Callable

import pytest
from pydantic import BaseModel
from sqlalchemy import Connection, event
from sqlalchemy.orm import Session

from tinycortex import Cortex, Done, JobStatus, NewJob, Settings
from tinycortex.config import DatabaseSettings

OpenCortex = Callable[..., Cortex]

NORMAL, FULL = 1, 2
"""What ``PRAGMA synchronous`` says."""


class Note(BaseModel):
    text: str = ""


def write(_session: Session) -> None:
    pass


def synced(cortex: Cortex, do: Callable[[], object]) -> set[int]:
    """Return how durable the commits of ``do`` are."""
    seen: set[int] = set()

    def look(connection: Connection) -> None:
        if connection.get_execution_options().get("tinycortex_begin") is None:  # no reader
            seen.add(int(connection.exec_driver_sql("PRAGMA synchronous").scalar_one()))

    event.listen(cortex.database.engine, "commit", look)
    do()
    event.remove(cortex.database.engine, "commit", look)
    return seen


@pytest.mark.parametrize(
    ("settings", "of_a_worker"),
    [
        (DatabaseSettings(), NORMAL),
        (DatabaseSettings(durability="strict"), FULL),
        (DatabaseSettings(journal_mode="truncate"), FULL),
    ],
    ids=["jobs", "strict", "truncate"],
)
def test_what_was_promised_is_on_the_disk(
    open_cortex: OpenCortex, settings: DatabaseSettings, of_a_worker: int
) -> None:
    """An enqueue always, also after a worker's turn on the same connections; a claim and a settlement at will."""
    cortex = open_cortex(Settings(database=settings))
    cortex.handler("note", payload=Note)(lambda _ctx, _payload: None)
    for _ in range(2):
        assert synced(cortex, lambda: cortex.enqueue(NewJob.of("note", Note()))) == {FULL}
        assert synced(cortex, cortex.run_once) == {of_a_worker}
    assert cortex.jobs.count_by_status()[JobStatus.DONE] == 2


def test_what_a_handler_writes_is_on_the_disk(open_cortex: OpenCortex) -> None:
    """Its own rows may be the program's word to somebody."""
    cortex = open_cortex()
    cortex.handler("note", payload=Note)(lambda _ctx, _payload: Done(writes=write))
    cortex.enqueue(NewJob.of("note", Note()))
    assert synced(cortex, cortex.run_once) == {NORMAL, FULL}  # the claim, the settlement
