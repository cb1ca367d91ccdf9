"""Maintenance: start-up housekeeping and the steps of a scheduler tick (spec: Worker loop; Scheduler helpers)."""

from collections.abc import Iterable
from typing import NamedTuple

from tinycortex.db import Database
from tinycortex.domain.clock import Clock
from tinycortex.domain.jobs import JobStatus, NewJob
from tinycortex.domain.payloads import FlushStalePayload
from tinycortex.errors import InvalidInputError
from tinycortex.handlers.registry import HandlerRegistry
from tinycortex.repositories.jobs import JobRepository, Requeued
from tinycortex.services.producer import Producer


class BootstrapReport(NamedTuple):
    """What start-up housekeeping did: rows deleted, and rows whose holder was gone."""

    purged: int
    recovered: int


class Maintenance:
    """Keeps the queue's rows in order. Every method may be called at any time, by any process."""

    def __init__(
        self,
        database: Database,
        jobs: JobRepository,
        producer: Producer,
        registry: HandlerRegistry,
        clock: Clock,
    ) -> None:
        self._database = database
        self._registry = registry
        self._jobs = jobs
        self._producer = producer
        self._clock = clock

    def bootstrap(self) -> BootstrapReport:
        """Purge retired kinds and recover what dead workers left; call it once before a loop."""
        return BootstrapReport(purged=self._jobs.purge_retired_jobs(), recovered=self.recover_stale_locks())

    def recover_stale_locks(self) -> int:
        """Free the rows of expired leases, and at once those of workers whose process has certainly ended."""
        recovered = self._jobs.recover_stale_locks()
        presence = self._database.presence
        if dead := presence.find_dead(self._jobs.list_owners()):
            recovered += self._jobs.recover_owned(dead)
            presence.forget(dead)
        self._jobs.pass_on_left_requests()
        return recovered

    def enqueue_flush_stale(self, max_age_secs: int) -> str | None:
        """Enqueue this 3-hour UTC block's flush, at most one per block whatever became of it.

        Args:
            max_age_secs: age (seconds) at which a buffer is stale.

        Returns:
            The job's id, or None when the block has its flush.
        """
        if isinstance(max_age_secs, bool) or not isinstance(max_age_secs, int) or max_age_secs < 0:
            raise InvalidInputError(f"max_age_secs is a whole number of seconds, not {max_age_secs!r}")
        job = NewJob.flush_stale(FlushStalePayload(max_age_secs=max_age_secs), now_ms=self._clock.now_ms())
        with self._database.transaction() as session:
            if job.dedupe_key is not None and self._jobs.has_key(job.kind, job.dedupe_key, session=session):
                return None
            return self._producer.enqueue(job, session=session)

    def purge(self, older_than_ms: int, statuses: Iterable[JobStatus]) -> int:
        """Delete settled rows of that age; see :meth:`JobRepository.purge`."""
        return self._jobs.purge(older_than_ms, statuses, kinds=self._registry.list_specs())

    def self_heal(self) -> Requeued:
        """Requeue transiently failed rows, spaced out; unrecoverable ones stay parked."""
        return self._jobs.self_heal()
