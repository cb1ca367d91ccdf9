"""What a handler returns: an outcome and what is to commit with it (spec: Job outcomes).

A handler says what should happen; the settlement makes it happen, in one transaction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tinycortex.domain.jobs import NewJob, check_instant
from tinycortex.errors import InvalidInputError

Writes = Callable[[Any], object]
"""Called with the settlement's SQLAlchemy ``Session``; what it writes commits with the settlement, once.

A settlement that the database could not take is tried again, and calls it again. It must neither commit
nor roll back. Whatever it raises undoes the whole settlement and counts as a failed attempt. It is typed
``Any`` here because the domain knows no SQLAlchemy.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """An outcome with its follow-up jobs and database writes; see :class:`Done` and :class:`Defer`.

    Attributes:
        follow_ups: jobs enqueued in the settlement's transaction; one whose key is active is left out.
        writes: database writes of the same transaction.
    """

    follow_ups: Sequence[NewJob] = ()
    writes: Writes | None = None

    def __post_init__(self) -> None:
        follow_ups = tuple(self.follow_ups)
        if strangers := [job for job in follow_ups if not isinstance(job, NewJob)]:
            raise InvalidInputError(f"follow_ups takes NewJob values, not {type(strangers[0]).__name__}")
        if self.writes is not None and not callable(self.writes):
            raise InvalidInputError(f"writes is called with the session, so it must be callable, not {self.writes!r}")
        object.__setattr__(self, "follow_ups", follow_ups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(JobPlan):
    """The handler ran to completion; the row settles ``done``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defer(JobPlan):
    """The handler chose not to make progress yet; the row waits, and no attempt is burnt.

    Attributes:
        until_ms: earliest instant of the next claim (ms, UTC), put no earlier than 50 ms from now.
        reason: kept in ``last_error``.
        progress: this run got something done, so the seven days that a job may spend deferring begin anew.
        cooldown: a provider asked to be left alone: no other LLM-bound job begins before ``until_ms``, or within a
            week, whichever is sooner; none of this process, or of all that share ``queue.llm_permits_global``.
    """

    until_ms: int
    reason: str
    progress: bool = False
    cooldown: bool = False

    def __post_init__(self) -> None:
        # Named, not super(): a slotted dataclass is a second class, which the bare form would not find.
        JobPlan.__post_init__(self)
        check_instant("until_ms", self.until_ms)
        if not isinstance(self.reason, str):
            raise InvalidInputError(f"a defer's reason is a string, not {type(self.reason).__name__}")


JobOutcome = Done | Defer
"""The two ways a handler can succeed."""
