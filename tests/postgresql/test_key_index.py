"""The partial index of active keys is what an enqueue names, and a finished row never stands in its way."""

from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import event

from tinycortex import Cortex, Database, JobStatus, NewJob
from tinycortex.testing import JobRowFactory, insert_rows


class Note(BaseModel):
    text: str = ""


@pytest.mark.parametrize("mode", ["ignore", "rerun"])
def test_an_enqueue_infers_the_index_from_its_predicate(cortex: Cortex, mode: Any) -> None:
    """As the server stores it, with casts and an array, it is still the one that the statement spells."""
    plans: list[str] = []

    def explain(_connection: Any, cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
        if "INSERT INTO mem_tree_jobs" in statement:
            with cursor.connection.cursor() as asking:
                asking.execute(f"EXPLAIN {statement}".encode(), parameters)
                plans.append("\n".join(line for (line,) in asking.fetchall()))

    cortex.handler("note", payload=Note, on_duplicate=mode)(lambda _ctx, _payload: None)
    event.listen(cortex.database.engine, "before_cursor_execute", explain)
    cortex.enqueue(NewJob(kind="note", payload_json="{}", dedupe_key="k"))
    (plan,) = plans
    assert "Conflict Arbiter Indexes: idx_mem_tree_jobs_dedupe_active" in plan


def test_finished_rows_block_nobody(cortex: Cortex, database: Database) -> None:
    """However many have the key; the first active one does."""
    for status in ("done", "failed", "cancelled"):
        for _ in range(2):
            insert_rows(database, JobRowFactory.build(kind="note", dedupe_key="k", status=status))
    job = NewJob(kind="note", payload_json="{}", dedupe_key="k")
    assert cortex.enqueue_many([job, job])[0] is not None
    assert cortex.enqueue(job) is None
    assert cortex.jobs.count_by_status()[JobStatus.READY] == 1
