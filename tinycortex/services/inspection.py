"""Inspection: one consistent look at the queue, as a value."""

from collections.abc import Mapping
from dataclasses import dataclass

from tinycortex.db import Database
from tinycortex.domain.clock import Clock
from tinycortex.domain.jobs import JobStatus
from tinycortex.domain.kinds import JobKind
from tinycortex.handlers.registry import HandlerRegistry
from tinycortex.repositories.jobs import JobRepository
from tinycortex.services.gate import LlmGate

UNTYPED = "untyped"
"""Stands for a failure without a reason or a class."""

_ACTIVE = (JobStatus.READY, JobStatus.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """The queue at one instant.

    Attributes:
        by_status: rows by status, every status included.
        by_kind: rows by kind, then by status.
        failed_by_reason: failed rows by reason; those without one are "untyped".
        failed_by_class: failed rows by class; those without one are "untyped".
        unhandled: ready rows by kind, of kinds that this process has no handler for.
        oldest_ready_age_ms: how long the longest-waiting due row has been due (ms); None when none is due.
        leases_held: running rows.
        leases_expired: running rows whose lease is over.
        backfill_in_progress: whether an embedding chain is ready or running.
        llm_closed_for_ms: how long this process's LLM gate stays closed, as a provider asked (ms); 0 when open.
        llm_permits_global: LLM-bound handlers that all processes may run at a time; None for no such limit.
        llm_permits_held: those that run; None without a limit.
        llm_closed_until_ms: when the gate that all processes share opens (ms, UTC); None when it is open, or there
            is no limit.
    """

    by_status: Mapping[str, int]
    by_kind: Mapping[str, Mapping[str, int]]
    failed_by_reason: Mapping[str, int]
    failed_by_class: Mapping[str, int]
    unhandled: Mapping[str, int]
    oldest_ready_age_ms: int | None
    leases_held: int
    leases_expired: int
    backfill_in_progress: bool
    llm_closed_for_ms: int
    llm_permits_global: int | None
    llm_permits_held: int | None
    llm_closed_until_ms: int | None


class Inspection:
    """Answers how the queue is doing, without changing anything."""

    def __init__(
        self, database: Database, jobs: JobRepository, registry: HandlerRegistry, gate: LlmGate, clock: Clock
    ) -> None:
        self._gate = gate
        self._database = database
        self._jobs = jobs
        self._registry = registry
        self._clock = clock

    def status(self) -> QueueStatus:
        """Return the whole picture, all of it from one snapshot."""
        now_ms = self._clock.now_ms()
        with self._database.reading() as session:
            counts = self._jobs.count_by_kind_and_status(session=session)
            failed = self._jobs.count_failed(session=session)
            due_since_ms = self._jobs.find_oldest_ready_at(session=session)
            expired = self._jobs.count_expired(now_ms, session=session)
            gate = self._jobs.shared_gate
            shared = gate.look(session=session) if gate.is_shared else None
        by_status = {status.value: 0 for status in JobStatus}
        by_kind: dict[str, dict[str, int]] = {}
        for (kind, status), jobs in sorted(counts.items()):
            by_status[status] = by_status.get(status, 0) + jobs
            by_kind.setdefault(kind, {})[status] = jobs
        by_reason: dict[str, int] = {}
        by_class: dict[str, int] = {}
        for (reason, failure_class), jobs in failed.items():
            by_reason[reason or UNTYPED] = by_reason.get(reason or UNTYPED, 0) + jobs
            by_class[failure_class or UNTYPED] = by_class.get(failure_class or UNTYPED, 0) + jobs
        return QueueStatus(
            by_status=by_status,
            by_kind=by_kind,
            failed_by_reason=by_reason,
            failed_by_class=by_class,
            unhandled={
                kind: statuses[JobStatus.READY]
                for kind, statuses in by_kind.items()
                if JobStatus.READY in statuses and self._registry.find_spec(kind) is None
            },
            oldest_ready_age_ms=None if due_since_ms is None or due_since_ms > now_ms else now_ms - due_since_ms,
            leases_held=by_status[JobStatus.RUNNING],
            leases_expired=expired,
            llm_closed_for_ms=int(self._gate.closed_for_s * 1000),
            llm_permits_global=gate.permits,
            llm_permits_held=None if shared is None else shared.held,
            llm_closed_until_ms=None if shared is None else shared.closed_until_ms,
            backfill_in_progress=_is_active(by_kind.get(JobKind.REEMBED_BACKFILL, {})),
        )

    def backfill_in_progress(self) -> bool:
        """Tell whether an embedding chain is ready or running, in this process or another."""
        return self.status().backfill_in_progress


def _is_active(statuses: Mapping[str, int]) -> bool:
    return any(statuses.get(status) for status in _ACTIVE)
