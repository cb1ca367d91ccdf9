"""Whatever waits, is left out or limited, claims take the rows that the specification's own statement would.

Ten thousand steps in all, each a claim of one or of several, the same every time.
"""

import random
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import delete, insert, text
from sqlalchemy.orm import Session

from tinycortex import RETIRED_JOB_KINDS, Cortex, KindSpec
from tinycortex.domain.kinds import BUILTIN_KINDS
from tinycortex.models import JobRow
from tinycortex.testing import ManualClock

STEPS, STEPS_PER_TRANSACTION = 2_500, 100


class Note(BaseModel):
    text: str = ""


CUSTOM = [
    KindSpec(kind=f"custom_{rank}_{llm_bound}", payload=Note, rank=rank, llm_bound=llm_bound, lease_ms=lease_ms)
    for rank, llm_bound, lease_ms in ((-1, False, None), (2, True, 77), (4, False, 5), (9, True, None))
]
SPECS = [*BUILTIN_KINDS.values(), *CUSTOM]
WORDS = [*(spec.kind for spec in SPECS), *RETIRED_JOB_KINDS, "unknown"]


def plain_order(session: Session, now_ms: int, specs: list[KindSpec]) -> list[tuple[str, str]]:
    """Return id and kind of every due row, sorted as the specification's statement does; ties by id."""
    if not specs:
        return []
    ranks = " ".join(f"WHEN '{spec.kind}' THEN {spec.rank}" for spec in specs)
    wanted = ", ".join(f"'{spec.kind}'" for spec in specs)
    rows = session.execute(
        text(
            "SELECT id, kind FROM mem_tree_jobs WHERE status = 'ready' AND available_at_ms <= :now "
            f"AND kind NOT IN ('topic_route', 'digest_daily') AND kind IN ({wanted}) "
            f"ORDER BY CASE kind {ranks} END, available_at_ms, id"
        ),
        {"now": now_ms},
    )
    return [(row.id, row.kind) for row in rows]


def one_after_another(due: list[tuple[str, str]], limit: int, permits: int | None, specs: list[KindSpec]) -> list[str]:
    """Return what single claims take, each of which leaves the LLM-bound kinds out once the permits have run out."""
    llm_bound = {spec.kind for spec in specs if spec.llm_bound}
    taken: list[str] = []
    for _ in range(limit):
        allowed = [row for row in due if row[0] not in taken and (permits != 0 or row[1] not in llm_bound)]
        if not allowed:
            break
        job_id, kind = allowed[0]
        taken.append(job_id)
        if permits is not None and kind in llm_bound:
            permits -= 1
    return taken


def add_rows(session: Session, chance: random.Random, now_ms: int) -> None:
    due_ms = [now_ms + chance.choice([-3, -2, -1, 0, 0, 1, 2, 40]) for _ in range(chance.randint(1, 8))]
    rows: list[dict[str, Any]] = [
        {
            "id": f"job:{chance.random()}",
            "kind": chance.choice(WORDS),
            "payload_json": "{}",
            "available_at_ms": due,
            "created_at_ms": now_ms,
        }
        for due in due_ms
    ]
    session.execute(insert(JobRow), rows)


@pytest.mark.parametrize("seed", range(10_000 // STEPS))
def test_claims_take_what_the_plain_statement_would(cortex: Cortex, clock: ManualClock, seed: int) -> None:
    """One claim of several is several claims of one, and each takes the row that ``ORDER BY CASE kind`` finds."""
    chance = random.Random(seed)  # noqa: S311 - a test needs it the same every time
    taken = batches = limited = 0
    for _ in range(STEPS // STEPS_PER_TRANSACTION):
        with cortex.transaction() as session:
            session.execute(delete(JobRow))  # what nothing claims would pile up, and the plain statement reads it all
            for _ in range(STEPS_PER_TRANSACTION):
                now_ms = clock.now_ms()
                if chance.random() < 0.5:
                    add_rows(session, chance, now_ms)
                wanted = chance.sample(SPECS, chance.choice([0, 3, len(SPECS), len(SPECS)]))
                due = plain_order(session, now_ms, wanted)
                limit, permits = chance.choice([1, 1, 2, 5, 9]), chance.choice([None, 0, 1, 2, 3, 9])
                if limit == 1 and permits is None:
                    job = cortex.jobs.claim_next(kinds=wanted, session=session)
                    found = [] if job is None else [job.id]
                else:
                    jobs = cortex.jobs.claim_many(limit, kinds=wanted, llm_limit=permits, session=session)
                    found = [job.id for job in jobs]
                assert found == one_after_another(due, limit, permits, wanted)
                taken += len(found)
                batches += len(found) > 1
                limited += found != [job_id for job_id, _kind in due[:limit]]
                clock.advance(chance.choice([0, 0, 0, 1]))
    # It was no walk through an empty table: many claims took several rows, and the permits made a difference to many.
    assert taken > STEPS
    assert min(batches, limited) > STEPS / 10
