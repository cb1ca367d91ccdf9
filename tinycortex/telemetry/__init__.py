"""What happens in a queue, told to whoever subscribes: see ``Cortex.subscribe`` and ``docs/telemetry.md``."""

from tinycortex.telemetry.emitter import Emitter, Observable, Subscriber
from tinycortex.telemetry.events import (
    Event,
    JobCancelled,
    JobClaimed,
    JobDeferred,
    JobDone,
    JobFailed,
    JobReleased,
    JobRetried,
    JobsEnqueued,
    JobSettled,
    LeasesRecovered,
    TickDone,
    WorkerPaused,
)

__all__ = [
    "Emitter",
    "Event",
    "JobCancelled",
    "JobClaimed",
    "JobDeferred",
    "JobDone",
    "JobFailed",
    "JobReleased",
    "JobRetried",
    "JobSettled",
    "JobsEnqueued",
    "LeasesRecovered",
    "Observable",
    "Subscriber",
    "TickDone",
    "WorkerPaused",
]
