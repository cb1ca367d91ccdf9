"""The events: what has happened, as values. Each is told after the commit of what it tells.

Instants and durations are in ms. A job may carry what its producer put into it: mind where you write it.
"""

from dataclasses import dataclass

from tinycortex.domain.jobs import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of every event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsEnqueued(Event):
    """New rows; a duplicate that an active twin suppressed is none.

    Attributes:
        ids: their ids, in the order in which they were asked for.
        kinds: the kind of each.
    """

    ids: tuple[str, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobClaimed(Event):
    """A worker has leased a row.

    Attributes:
        job: the claim.
        waited_ms: how long the row had been due, by the queue's clock.
        claim_ms: how long the claim took, its commit included, by the monotonic clock.
    """

    job: Job
    waited_ms: int
    claim_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReleased(Event):
    """A claim was given back unused, its attempt too.

    Attributes:
        job: the claim.
    """

    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettled(Event):
    """A run has ended; which of the five below says how.

    Attributes:
        job: the claim that ended; for a row that was cancelled before it ran, the row.
        handler_ms: how long its handler ran, by the monotonic clock; None when a handler of this worker did not.
        reason: why, where there is a reason to give; None when done.
    """

    job: Job
    handler_ms: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDone(JobSettled):
    """The run did what it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDeferred(JobSettled):
    """The run asked to come back later, and its attempt was given back.

    Attributes:
        until_ms: when the row is due again (UTC).
    """

    until_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRetried(JobSettled):
    """The run failed, and the row has attempts left.

    Attributes:
        until_ms: when the row is due again (UTC).
    """

    until_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailed(JobSettled):
    """The run failed for good; ``reason`` is the code of a typed failure, else the error's own text.

    Attributes:
        failure_class: ``unrecoverable``, ``transient``, or None for an untyped failure.
    """

    failure_class: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelled(JobSettled):
    """The row was cancelled on request, before it ran or at the end of its run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesRecovered(Event):
    """Rows were taken from workers that are gone.

    Attributes:
        count: how many rows, at least one.
        failed: how many of them had no attempt left, and failed.
        cancelled: how many of them had been asked to stop, and are cancelled.
    """

    count: int
    failed: int
    cancelled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPaused(Event):
    """A worker waits out a storage fault; told each time that it is met.

    Attributes:
        error: the fault's class, such as ``StorageBusyError``.
        pause_ms: how long it waits.
    """

    error: str
    pause_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TickDone(Event):
    """The scheduler's periodic work was done, all of it.

    Attributes:
        recovered: rows taken from workers that are gone.
        flush_job_id: the flush enqueued for this 3-hour UTC block, or None when it had one.
        healed: failed rows that were made ready again.
        purged: settled rows deleted for their age.
        tick_ms: how long it took, by the monotonic clock.
    """

    recovered: int
    flush_job_id: str | None
    healed: int
    purged: int
    tick_ms: float
