"""Statements go straight to the driver; who listens to the engine, or asks for a log, sees them all the same."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event

from tinycortex import Cortex, Job
from tinycortex.errors import TransactionEndedError
from tinycortex.testing import NewJobFactory

Seen = list[str]
Watching = Callable[[Cortex, Seen], Callable[[], None]]


def listen(cortex: Cortex, seen: Seen) -> Callable[[], None]:
    """Listen as a tracer does."""

    def note(_connection: object, _cursor: object, statement: str, *_rest: Any) -> None:
        seen.append(statement)

    event.listen(cortex.database.engine, "before_cursor_execute", note)
    return lambda: event.remove(cortex.database.engine, "before_cursor_execute", note)


def log(_cortex: Cortex, seen: Seen) -> Callable[[], None]:
    """Have SQLAlchemy log what it runs."""
    logger, handler = logging.getLogger("sqlalchemy.engine.Engine"), logging.Handler(logging.INFO)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)

    def end() -> None:
        logger.removeHandler(handler)
        logger.setLevel(before)

    return end


def claim(cortex: Cortex) -> Job:
    """Enqueue a job, and claim it."""
    cortex.enqueue(NewJobFactory.build())
    job = cortex.jobs.claim_next()
    assert job is not None
    return job


@pytest.mark.parametrize("watch", [listen, log])
def test_whoever_looks_sees_every_statement(cortex: Cortex, watch: Watching) -> None:
    """From the moment on that somebody looks; the rows are the same either way."""
    seen: Seen = []
    unseen = claim(cortex)
    end = watch(cortex, seen)
    try:
        job = claim(cortex)
        assert cortex.jobs.mark_done(job)
    finally:
        end()
    verbs = [statement.split()[0] for statement in seen if "mem_tree_jobs" in statement]
    assert [verb for verb in verbs if verb != "SELECT"] == ["INSERT", "UPDATE", "UPDATE"]
    assert [type(getattr(job, name)) for name in Job.__slots__] == [
        type(getattr(unseen, name)) for name in Job.__slots__
    ]


def end_behind_our_back(cortex: Cortex) -> None:
    """Write, have the driver roll back, and write again."""
    with cortex.database.transaction() as session:
        cortex.enqueue(NewJobFactory.build(), session=session)
        driver: Any = session.connection().connection.dbapi_connection
        driver.rollback()
        cortex.enqueue(NewJobFactory.build(), session=session)


@pytest.mark.parametrize("watch", [lambda _cortex, _seen: lambda: None, listen])
def test_nothing_is_written_after_the_end(cortex: Cortex, watch: Watching) -> None:
    """A transaction that was ended behind our back takes no statement more, whichever way it would have gone."""
    end = watch(cortex, [])
    try:
        with pytest.raises(TransactionEndedError):
            end_behind_our_back(cortex)
    finally:
        end()
    assert cortex.jobs.claim_next() is None
