"""What a handler is given beside its payload."""

from dataclasses import dataclass

from tinycortex.delegates import QueueDelegates
from tinycortex.domain.clock import Clock
from tinycortex.domain.jobs import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """One run of one job.

    Attributes:
        job: the claimed row.
        delegates: the heavy work of the built-in kinds.
        clock: the queue's clock.
    """

    job: Job
    delegates: QueueDelegates
    clock: Clock
