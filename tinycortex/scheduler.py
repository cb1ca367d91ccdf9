"""The scheduler's tick: recover, flush, heal (spec: Scheduler helpers)."""

from dataclasses import dataclass

from tinycortex.config import SchedulerSettings
from tinycortex.repositories.jobs import Requeued
from tinycortex.services.maintenance import Maintenance


@dataclass(frozen=True, slots=True, kw_only=True)
class TickReport:
    """What one tick did.

    Attributes:
        recovered: rows freed from workers that are gone.
        flush_job_id: the flush enqueued for this 3-hour UTC block, or None when it had one.
        healed: failed rows tried again, superseded or blocked.
    """

    recovered: int
    flush_job_id: str | None
    healed: Requeued


class Scheduler:
    """Does the periodic work of the queue. Any number of processes may tick at any time."""

    def __init__(self, maintenance: Maintenance, settings: SchedulerSettings) -> None:
        self._maintenance = maintenance
        self._settings = settings

    def tick(self) -> TickReport:
        """Recover leases, enqueue the block's flush, heal transient failures.

        Raises:
            StorageError: the database could not do its work; what was done before stays done.
        """
        return TickReport(
            recovered=self._maintenance.recover_stale_locks(),
            flush_job_id=self._maintenance.enqueue_flush_stale(self._settings.flush_max_age_secs),
            healed=self._maintenance.self_heal(),
        )
