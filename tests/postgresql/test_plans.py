"""What the server plans for the queue's statements, and how long it keeps to that."""

from sqlalchemy import text

from tinycortex import Cortex

CLAIMS = 20
"""More than after which a driver has a statement prepared, and the server thinks of one plan for all values."""

PLANS = text(
    "SELECT sum(generic_plans), sum(custom_plans) FROM pg_prepared_statements WHERE statement LIKE '%claim_token%'"
)


def test_no_claim_keeps_to_a_plan_that_was_made_for_an_empty_queue(cortex: Cortex) -> None:
    """By such a plan each claim would read and sort the whole of a backlog that comes later."""
    for _ in range(CLAIMS):
        assert cortex.jobs.claim_many(16) == []
    with cortex.transaction() as session:  # in the session that has claimed
        generic, custom = session.execute(PLANS).one()
    assert generic == 0
    assert custom > 0
