"""The queue as plain rules on a dict, without SQL: what the simulator compares the repositories with.

Rows are :class:`Job` snapshots in a dict. Times are ms; every rule is written here from the specification and
design, not from the statements under test, and favours being obvious over being fast.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from tinycortex import FailureClass, Job, JobFailure, JobStatus, NewJob
from tinycortex.domain.kinds import KindSpec

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS

READY, RUNNING, DONE, FAILED, CANCELLED = JobStatus
FREE: dict[str, Any] = {"locked_until_ms": None, "locked_by": None, "cancel_requested_at_ms": None}

Requeued = tuple[int, int, int]
"""Rows revived, superseded, blocked."""


class QueueModel:
    """Every operation of a repository on rows in memory.

    Attributes:
        rows: the rows by id.
        pending: rows that an operation made and whose ids only the repository knows.
        now_ms: where the clock stands.
    """

    def __init__(self, specs: Mapping[str, KindSpec], now_ms: int) -> None:
        self.specs = specs
        self.rows: dict[str, Job] = {}
        self.pending: list[Job] = []
        self.now_ms = now_ms

    # Enqueue

    def enqueue(self, job: NewJob, job_id: str) -> bool:
        """Insert the job under ``job_id`` and return True, or do to its active twin what its kind says."""
        twin = self._active_twin(job.dedupe_key)
        if twin is None:
            self.rows[job_id] = self._new_row(job, job_id)
            return True
        spec = self.specs[job.kind]
        if spec.on_duplicate == "ignore" or twin.kind != job.kind:
            return False
        higher = self._is_higher(job.kind, job.payload_json)
        if twin.status is READY and (spec.on_duplicate == "replace" or higher):
            self._change(twin, payload_json=job.payload_json)
        if twin.status is RUNNING and spec.on_duplicate == "rerun":
            kept = twin.rerun_payload_json
            if kept is None or higher or spec.outranks is None:
                self._change(twin, rerun_payload_json=job.payload_json)
        return False

    def _active_twin(self, key: str | None) -> Job | None:
        active = (row for row in self.rows.values() if not row.status.is_terminal)
        return None if key is None else next((row for row in active if row.dedupe_key == key), None)

    def _new_row(self, job: NewJob, job_id: str) -> Job:
        values: dict[str, Any] = dict.fromkeys(Job.__dataclass_fields__)
        values |= {"attempts": 0, "claim_token": 0, "heals": 0, "status": READY, "created_at_ms": self.now_ms}
        values |= {"id": job_id, "kind": job.kind, "payload_json": job.payload_json, "dedupe_key": job.dedupe_key}
        values["max_attempts"] = job.max_attempts or self.specs[job.kind].max_attempts
        values["available_at_ms"] = self.now_ms if job.available_at_ms is None else job.available_at_ms
        return Job(**values)

    def _is_higher(self, kind: str, payload_json: str) -> bool:
        outranks = self.specs[kind].outranks
        return outranks is not None and json.loads(payload_json).get("force_now_ms") is not None

    def adopt(self, row: Job, job_id: str) -> None:
        """Keep a pending row under the id that the repository gave it."""
        self.rows[job_id] = replace(row, id=job_id)

    # Claim

    def claim(self, kinds: Iterable[KindSpec], lease_ms: int, worker_id: str) -> Job | None:
        """Lease the due row of ``kinds`` that sorts first by rank, due time and id."""
        ranks = {spec.kind: spec.rank for spec in kinds}
        due = [
            row
            for row in self.rows.values()
            if row.status is READY and row.kind in ranks and row.available_at_ms <= self.now_ms
        ]
        if not due:
            return None
        row = min(due, key=lambda row: (ranks[row.kind], row.available_at_ms, row.id))
        return self._change(
            row,
            status=RUNNING,
            attempts=row.attempts + 1,
            claim_token=row.claim_token + 1,
            locked_by=worker_id,
            started_at_ms=self.now_ms,
            claimed_at_ms=self.now_ms,
            locked_until_ms=self.now_ms + (self.specs[row.kind].lease_ms or lease_ms),
            last_error=None,
        )

    def renew(self, claim: Job, lease_ms: int) -> bool:
        """Push the lease on while the claim is held, whether it was asked to stop or not."""
        row = self._held(claim)
        return row is not None and bool(self._change(row, locked_until_ms=self.now_ms + lease_ms))

    def watch(self, claims: Iterable[Job]) -> dict[str, bool]:
        """Tell which claims are held, and which of those were asked to stop."""
        held = (self._held(claim) for claim in claims)
        return {row.id: row.cancel_requested_at_ms is not None for row in held if row is not None}

    def _held(self, claim: Job) -> Job | None:
        row = self.rows.get(claim.id)
        return row if row is not None and row.status is RUNNING and row.claim_token == claim.claim_token else None

    # Settle

    def done(self, claim: Job) -> bool:
        """Complete the row and forget every trouble that it had."""
        forgotten = dict.fromkeys(("last_error", "failure_reason", "failure_class", "deferred_since_ms"))
        return self._settle(claim, lambda _row: {**self._ended(DONE), **forgotten})

    def fail(self, claim: Job, message: str, failure: JobFailure | None) -> bool:
        """Try the row again after its backoff, or fail it: for want of attempts, or because it is hopeless."""

        def how(row: Job) -> dict[str, Any]:
            hopeless = failure is not None and failure.failure_class is FailureClass.UNRECOVERABLE
            if hopeless or row.attempts >= row.max_attempts:
                why = (None, None) if failure is None else (failure.code, failure.failure_class)
                return self._ended(FAILED) | _failure(message, *why)
            delay_ms = min(MINUTE_MS * 2 ** (row.attempts - 1), HOUR_MS)
            return {"status": READY, "available_at_ms": self.now_ms + delay_ms} | _failure(message, None, None)

        return self._settle(claim, how)

    def defer(self, claim: Job, until_ms: int, reason: str, *, progress: bool) -> bool:
        """Put the row off, its attempt given back."""

        def how(row: Job) -> dict[str, Any]:
            since_ms = self.now_ms if row.deferred_since_ms is None else row.deferred_since_ms
            return self._given_back(row) | {
                "available_at_ms": until_ms,
                "last_error": reason,
                "deferred_since_ms": None if progress else since_ms,
            }

        return self._settle(claim, how)

    def release(self, claim: Job) -> bool:
        """Give the row back as if it had not been claimed."""
        return self._settle(claim, self._given_back)

    def _settle(self, claim: Job, how: Callable[[Job], dict[str, Any]]) -> bool:
        row = self._held(claim)
        if row is None:
            return False
        asked = row.cancel_requested_at_ms is not None
        self._free(row, self._stopped() if asked else how(row))
        return not asked

    def _free(self, row: Job, changes: dict[str, Any]) -> None:
        """End a run: the request that was kept meanwhile becomes the row's own payload, or a row of its own."""
        ended = self._change(row, **(FREE | changes))
        request = ended.rerun_payload_json
        if request is None:
            return
        if ended.status is READY:
            weaker = self._is_higher(row.kind, row.payload_json) and not self._is_higher(row.kind, request)
            self._change(ended, payload_json=row.payload_json if weaker else request, rerun_payload_json=None)
        else:
            rerun = NewJob(
                kind=row.kind, payload_json=request, dedupe_key=row.dedupe_key, max_attempts=row.max_attempts
            )
            self._change(ended, rerun_payload_json=None)
            self.pending.append(self._new_row(rerun, ""))

    def _ended(self, status: JobStatus) -> dict[str, Any]:
        return {"status": status, "completed_at_ms": self.now_ms}

    def _stopped(self) -> dict[str, Any]:
        return self._ended(CANCELLED) | {"last_error": "cancelled on request"}

    def _given_back(self, row: Job) -> dict[str, Any]:
        return {"status": READY, "attempts": row.attempts - 1, "started_at_ms": None}

    # Recover and release

    def recover_stale(self) -> int:
        """Free the rows whose lease is over."""
        return self._recover(lambda row: row.locked_until_ms is None or row.locked_until_ms < self.now_ms)

    def recover_owned(self, worker_id: str) -> int:
        """Free the rows of a worker that is dead."""
        return self._recover(lambda row: row.locked_by == worker_id)

    def _recover(self, gone: Callable[[Job], bool]) -> int:
        rows = [row for row in self.rows.values() if row.status is RUNNING and gone(row)]
        for row in rows:
            note = {"last_error": row.last_error or "recovered_from_stale_lock"}
            if row.cancel_requested_at_ms is not None:
                changes = self._ended(CANCELLED) | note
            elif row.attempts >= row.max_attempts:
                changes = self._ended(FAILED) | note
                changes |= {"failure_reason": "lease_expired", "failure_class": FailureClass.UNRECOVERABLE}
            else:
                changes = {"status": READY, "failure_reason": None, "failure_class": None} | note
            self._free(row, changes)
        return len(rows)

    def release_own(self, worker_id: str) -> int:
        """Give back what a worker holds."""
        rows = [row for row in self.rows.values() if row.status is RUNNING and row.locked_by == worker_id]
        for row in rows:
            asked = row.cancel_requested_at_ms is not None
            self._free(row, self._stopped() if asked else self._given_back(row))
        return len(rows)

    # Requeue

    def requeue(self, *, transient: bool = False, heal: bool = False) -> Requeued:
        """Make failed rows ready: of each free key the newest, the older ones superseded."""
        failed = [
            row
            for row in self.rows.values()
            if row.status is FAILED and not (transient and row.failure_class is FailureClass.UNRECOVERABLE)
        ]
        newest = {row.dedupe_key: row for row in sorted(failed, key=lambda row: (row.created_at_ms, row.id))}
        revived = superseded = blocked = 0
        for row in failed:
            heir = row if row.dedupe_key is None else newest[row.dedupe_key]
            due = self._is_due(row) if heal else True
            heir_due = self._is_due(heir) if heal else True
            if self._active_twin(row.dedupe_key) is not None or not heir_due:
                blocked += due
            elif heir is not row:
                superseded += 1
                self._change(row, status=CANCELLED, failure_reason="superseded", failure_class=None)
        for row in failed:
            heir = row if row.dedupe_key is None else newest[row.dedupe_key]
            if heir is row and self._active_twin(row.dedupe_key) is None and (not heal or self._is_due(row)):
                revived += 1
                self._revive(row, heals=row.heals + 1 if heal else 0)
        return revived, superseded, blocked

    def _is_due(self, row: Job) -> bool:
        spacing_ms = 0 if row.heals == 0 else min(10 * MINUTE_MS * 2 ** (row.heals - 1), 24 * HOUR_MS)
        assert row.completed_at_ms is not None
        return row.completed_at_ms + spacing_ms <= self.now_ms

    def _revive(self, row: Job, heals: int) -> None:
        forgotten = ("last_error", "failure_reason", "failure_class", "completed_at_ms", "deferred_since_ms")
        blank: dict[str, Any] = dict.fromkeys((*forgotten, "rerun_payload_json"))
        self._change(row, status=READY, attempts=0, available_at_ms=self.now_ms, heals=heals, **blank)

    # Cancel and purge

    def cancel(self, job_id: str) -> JobStatus | None:
        """Cancel a ready row, ask a running one to stop; None for any other."""
        row = self.rows.get(job_id)
        if row is not None and row.status is READY:
            return self._change(row, **(FREE | self._stopped())).status
        if row is not None and row.status is RUNNING:
            if row.cancel_requested_at_ms is None:  # it takes back what was asked so far
                self._change(row, cancel_requested_at_ms=self.now_ms, rerun_payload_json=None)
            return RUNNING
        return None

    def purge(self, older_than_ms: int, statuses: Iterable[JobStatus]) -> int:
        """Delete settled rows of that age; a row that ran came due before that, too."""
        wanted = set(statuses)
        old = [row for row in self.rows.values() if row.status in wanted and self._is_old(row, older_than_ms)]
        for row in old:
            del self.rows[row.id]
        return len(old)

    def _is_old(self, row: Job, older_than_ms: int) -> bool:
        assert row.completed_at_ms is not None
        kept_ms = max(older_than_ms, self.specs[row.kind].remember_ms)
        came_due = row.status is CANCELLED or row.available_at_ms < self.now_ms - older_than_ms
        return came_due and row.completed_at_ms < self.now_ms - kept_ms

    def _change(self, row: Job, **changes: Any) -> Job:
        self.rows[row.id] = replace(row, **changes)
        return self.rows[row.id]


def _failure(message: str, reason: str | None, failure_class: FailureClass | None) -> dict[str, Any]:
    return {"last_error": message, "failure_reason": reason, "failure_class": failure_class}
