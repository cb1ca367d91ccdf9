"""The scheduler's tick: recover, flush, heal, purge (spec: Scheduler helpers)."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tinycortex.config import SchedulerSettings
from tinycortex.domain.jobs import JobStatus
from tinycortex.errors import StorageError
from tinycortex.repositories.jobs import Requeued
from tinycortex.services.maintenance import Maintenance
from tinycortex.telemetry import Emitter, TickDone

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TickReport:
    """What one tick did.

    Attributes:
        recovered: rows freed from workers that are gone.
        flush_job_id: the flush enqueued for this 3-hour UTC block, or None when it had one.
        healed: failed rows tried again, superseded or blocked.
        purged: settled rows deleted for their age.
    """

    recovered: int
    flush_job_id: str | None
    healed: Requeued
    purged: int


class Scheduler:
    """Does the periodic work of the queue. Any number of processes may tick at any time."""

    def __init__(self, maintenance: Maintenance, settings: SchedulerSettings, emitter: Emitter) -> None:
        self._maintenance = maintenance
        self._settings = settings
        self._emitter = emitter

    def tick(self) -> TickReport:
        """Recover leases, enqueue the block's flush, heal transient failures, purge what is old.

        A step that the database fails does not stop the others.

        Raises:
            StorageError: the first fault, after every step was tried.
        """
        began_at = time.perf_counter()
        faults: list[StorageError] = []
        report = TickReport(
            recovered=_attempt(self._maintenance.recover_stale_locks, 0, faults),
            flush_job_id=_attempt(self._enqueue_flush, None, faults),
            healed=_attempt(self._maintenance.self_heal, Requeued(revived=0, superseded=0, blocked=0), faults),
            purged=_attempt(self._purge, 0, faults),
        )
        if faults:
            raise faults[0]
        self._emitter.emit(
            TickDone(
                recovered=report.recovered,
                flush_job_id=report.flush_job_id,
                healed=report.healed.revived,
                purged=report.purged,
                tick_ms=(time.perf_counter() - began_at) * 1000,
            )
        )
        return report

    def _enqueue_flush(self) -> str | None:
        return self._maintenance.enqueue_flush_stale(self._settings.flush_max_age_secs)

    def _purge(self) -> int:
        ages = (
            (self._settings.keep_done_s, [JobStatus.DONE]),
            (self._settings.keep_failed_s, [JobStatus.FAILED, JobStatus.CANCELLED]),
        )
        return sum(self._maintenance.purge(age_s * 1000, statuses) for age_s, statuses in ages)


def _attempt(step: Callable[[], T], otherwise: T, faults: list[StorageError]) -> T:
    try:
        return step()
    except StorageError as error:
        faults.append(error)
        return otherwise
