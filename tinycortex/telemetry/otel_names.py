"""Names of attributes (OpenTelemetry's messaging conventions, then ours), and how a run's end is told in them."""

from tinycortex.telemetry.events import (
    Event,
    JobCancelled,
    JobDeferred,
    JobDone,
    JobFailed,
    JobRetried,
    JobSettled,
)

SYSTEM = "messaging.system"
DESTINATION = "messaging.destination.name"
OPERATION_NAME = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
MESSAGE_ID = "messaging.message.id"
BATCH_COUNT = "messaging.batch.message_count"
ERROR_TYPE = "error.type"
OUTCOME = "tinycortex.job.outcome"
ATTEMPT = "tinycortex.job.attempt"

OUTCOMES: dict[type[Event], str] = {
    JobDone: "done",
    JobDeferred: "deferred",
    JobRetried: "retried",
    JobFailed: "failed",
    JobCancelled: "cancelled",
}


def attributes_of(kind: str, name: str, operation: str) -> dict[str, str]:
    """Return what every span and figure of an operation on jobs of ``kind`` says."""
    return {SYSTEM: "tinycortex", DESTINATION: kind, OPERATION_NAME: name, OPERATION_TYPE: operation}


def error_type_of(event: JobSettled) -> str | None:
    """Return the code of a failure, the conventions' word for one without, or None for what is no failure."""
    if isinstance(event, JobFailed) and event.failure_class is not None:
        return event.reason
    return "_OTHER" if isinstance(event, JobFailed | JobRetried) else None
