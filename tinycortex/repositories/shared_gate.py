"""The shared gate: how many LLM-bound jobs all processes run at a time, and until when a provider wants none.

A permit is nothing of its own: it is a running row that was claimed as LLM-bound and whose lease is not over.
So it is taken with the claim, given back with the settlement, renewed with the lease, and a killed holder's
comes back when its lease ends.
"""

from typing import NamedTuple

from sqlalchemy import text
from sqlalchemy.orm import Session

from tinycortex.db import Database
from tinycortex.domain.clock import Clock
from tinycortex.repositories.execution import execute

# The index (status, available_at_ms) finds the running rows, as many as all workers run at a time.
LOOK = text(
    """
    SELECT
      (SELECT COUNT(*) FROM mem_tree_jobs
       WHERE status = 'running' AND llm_bound = 1 AND CAST(locked_until_ms AS BIGINT) >= :now_ms) AS held,
      (SELECT closed_until_ms FROM tinycortex_gate WHERE name = 'llm') AS closed_until_ms
    """
)

_CLOSE = text(
    """
    INSERT INTO tinycortex_gate (name, closed_until_ms) VALUES ('llm', :until_ms)
    ON CONFLICT (name) DO UPDATE SET closed_until_ms = excluded.closed_until_ms
    WHERE tinycortex_gate.closed_until_ms < excluded.closed_until_ms
    """
)


class GateState(NamedTuple):
    """The shared gate at one instant.

    Attributes:
        held: permits that are out.
        free: permits that may be taken; none while the gate is closed.
        closed_until_ms: when it opens (ms, UTC); None when it is open.
    """

    held: int
    free: int
    closed_until_ms: int | None


class SharedGate:
    """Lets at most ``permits`` LLM-bound rows of one database be running under a lease.

    Args:
        database: where the rows are.
        clock: what leases and cooldowns are compared with.
        permits: how many; zero is read as one, and None stands for no such limit: then nothing is asked or written.
    """

    def __init__(self, database: Database, clock: Clock, permits: int | None = None) -> None:
        self._database = database
        self._clock = clock
        self.permits = None if permits is None else max(permits, 1)

    @property
    def is_shared(self) -> bool:
        """Tell whether there is a limit."""
        return self.permits is not None

    def look(self, *, session: Session | None = None) -> GateState:
        """Return the state of the gate."""
        now_ms = self._clock.now_ms()
        with self._database.reading_within(session) as tx:
            found = execute(tx, LOOK, {"now_ms": now_ms}).one()
        if found.closed_until_ms is not None and found.closed_until_ms > now_ms:
            return GateState(found.held, 0, found.closed_until_ms)
        return GateState(found.held, max((self.permits or 0) - found.held, 0), None)

    def take_turn(self, session: Session) -> int:
        """Return how many LLM-bound rows the transaction may lease; that of another claim is waited for.

        It has to be the last but the claim that it does: whoever waits here may hold what the next statement needs.
        """
        self._database.take_turns(session, "llm permits")
        return self.look(session=session).free

    def close_for(self, cooldown_ms: int, session: Session) -> None:
        """Have no LLM-bound row leased for ``cooldown_ms``; a gate that is closed for longer stays so."""
        if self.is_shared and cooldown_ms > 0:
            execute(session, _CLOSE, {"until_ms": self._clock.now_ms() + cooldown_ms})
