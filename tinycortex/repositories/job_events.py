"""Which event the end of a claim is told as."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import TextClause

from tinycortex.domain.jobs import Job
from tinycortex.repositories import job_sql
from tinycortex.telemetry import (
    Event,
    JobCancelled,
    JobDeferred,
    JobDone,
    JobFailed,
    JobReleased,
    JobRetried,
)
from tinycortex.telemetry.emitter import current_handler_ms


def event_of_end(statement: TextClause, job: Job, values: Mapping[str, Any]) -> Event:
    """Return the event of the claim ``job`` that ``statement`` has ended with ``values``."""
    handler_ms, reason = current_handler_ms(), values.get("last_error")
    if statement is job_sql.MARK_DONE:
        return JobDone(job=job, handler_ms=handler_ms)
    if statement is job_sql.MARK_DEFERRED:
        return JobDeferred(job=job, handler_ms=handler_ms, reason=reason, until_ms=values["available_at_ms"])
    if statement is job_sql.MARK_RETRY:
        return JobRetried(job=job, handler_ms=handler_ms, reason=reason, until_ms=values["available_at_ms"])
    if statement is job_sql.MARK_FAILED:
        return JobFailed(
            job=job,
            handler_ms=handler_ms,
            reason=values["failure_reason"] or reason,
            failure_class=values["failure_class"],
        )
    if statement is job_sql.RELEASE:
        return JobReleased(job=job)
    return JobCancelled(job=job, handler_ms=handler_ms)
