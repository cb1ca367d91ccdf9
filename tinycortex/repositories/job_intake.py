"""Taking jobs in: one or many inserts in one transaction, and what an active twin makes of them."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import uuid_utils
from sqlalchemy.orm import Session

from tinycortex.db import Database
from tinycortex.domain import policy
from tinycortex.domain.clock import Clock, SystemClock
from tinycortex.domain.jobs import NewJob
from tinycortex.domain.kinds import BUILTIN_KINDS, KindSpec, OnDuplicate
from tinycortex.domain.payloads import parse_payload
from tinycortex.errors import InvalidInputError
from tinycortex.repositories import job_sql
from tinycortex.repositories.execution import execute
from tinycortex.repositories.job_reader import JobReader
from tinycortex.telemetry import Emitter, Event, JobsEnqueued

_ROWS_PER_INSERT = 200


def mint_id() -> str:
    """Return the id of a new row; ids grow, also within a millisecond, and so break ties between equal times."""
    return f"job:{uuid_utils.uuid7()}"


class JobIntake(JobReader):
    """The part of :class:`~tinycortex.repositories.jobs.JobRepository` that takes jobs in.

    Args:
        database: where the rows are.
        clock: the source of "now"; the machine's clock when left out.
        find_spec: what is special about a kind; the built-in kinds when left out.
        retry_jitter: share of a retry delay that is added on top of it at random.
        on_enqueued: called after the commit of new rows, in the thread that committed them.
        emitter: told of what has been committed; one that nobody hears when left out.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock | None = None,
        *,
        find_spec: Callable[[str], KindSpec | None] = BUILTIN_KINDS.get,
        retry_jitter: float = policy.RETRY_JITTER,
        on_enqueued: Callable[[], object] | None = None,
        emitter: Emitter | None = None,
    ) -> None:
        super().__init__(database)
        self._clock = clock or SystemClock()
        self._find_spec = find_spec
        self._retry_jitter = retry_jitter
        self._on_enqueued = on_enqueued
        self.emitter = emitter or Emitter()

    def _tell(self, tx: Session, event: Event) -> None:
        self._database.on_commit(tx, partial(self.emitter.emit, event))

    # Enqueue

    def enqueue(self, job: NewJob, *, session: Session | None = None) -> str | None:
        """Insert ``job`` unless a ready or running row has its key (spec: Dedupe keys).

        What an active twin makes of the request is its kind's ``on_duplicate``.

        Returns:
            The new row's id, or None when an active twin suppressed it.

        Raises:
            InvalidInputError: ``job`` is no NewJob.
            StorageError: nothing was written.
        """
        return self.enqueue_many([job], session=session)[0]

    def enqueue_tx(self, session: Session, job: NewJob) -> str | None:
        """Insert ``job`` in the caller's transaction; see :meth:`enqueue`."""
        return self.enqueue(job, session=session)

    def enqueue_many(self, jobs: Iterable[NewJob], *, session: Session | None = None) -> list[str | None]:
        """Insert many jobs in one transaction: all of them, or none when one cannot be written.

        Rows are written in the order of their keys, so that two callers with overlapping keys wait for
        each other instead of locking each other out.

        Returns:
            For each job, in the order given, the new row's id or None when an active twin (an earlier job
            of the same call perhaps) suppressed it.

        Raises:
            InvalidInputError: an item is no NewJob.
            PayloadError: a payload is not what its kind takes.
            StorageError: nothing was written.
        """
        wanted = list(jobs)
        if strangers := [job for job in wanted if not isinstance(job, NewJob)]:
            raise InvalidInputError(f"enqueue takes NewJob values, not {type(strangers[0]).__name__}")
        now_ms = self._clock.now_ms()
        # Minted in the order given, since ids break ties between equal times. The rows themselves are built
        # a statement at a time: beside the jobs only their ids are held.
        ids = [mint_id() for _ in wanted]
        taken: list[str | None] = [None] * len(wanted)
        order = sorted(range(len(wanted)), key=lambda index: wanted[index].dedupe_key or "")
        plain = [index for index in order if self._on_duplicate(wanted[index]) is OnDuplicate.IGNORE]
        kinds = [job.kind for job in wanted]
        with self.emitter.tracer.sending(kinds) as trace_context, self._database.within(session) as tx:
            for start in range(0, len(plain), _ROWS_PER_INSERT):
                batch = plain[start : start + _ROWS_PER_INSERT]
                inserted = self._insert(
                    tx, [self._row(wanted[index], ids[index], now_ms, trace_context) for index in batch]
                )
                for index in batch:
                    taken[index] = ids[index] if ids[index] in inserted else None
            for index in order:
                if self._on_duplicate(wanted[index]) is not OnDuplicate.IGNORE:
                    row = self._row(wanted[index], ids[index], now_ms, trace_context)
                    inserted = self._insert_replacing(tx, wanted[index], row)
                    taken[index] = ids[index] if ids[index] in inserted else None
            if self._on_enqueued is not None:
                self._database.on_commit(tx, self._on_enqueued)
            if self.emitter.is_heard:
                new = [(job_id, job.kind) for job_id, job in zip(taken, wanted, strict=True) if job_id is not None]
                self._tell_new(tx, new)
        return taken

    def _tell_new(self, tx: Session, new: list[tuple[str, str]]) -> None:
        if new:
            ids, kinds = zip(*new, strict=True)
            self._tell(tx, JobsEnqueued(ids=ids, kinds=kinds))

    def _row(self, job: NewJob, job_id: str, now_ms: int, trace_context: str | None) -> dict[str, Any]:
        spec = self._find_spec(job.kind)
        default_attempts = policy.DEFAULT_MAX_ATTEMPTS if spec is None else spec.max_attempts
        return {
            "id": job_id,
            "kind": job.kind,
            "payload_json": job.payload_json,
            "dedupe_key": job.dedupe_key,
            "max_attempts": default_attempts if job.max_attempts is None else job.max_attempts,
            "available_at_ms": now_ms if job.available_at_ms is None else job.available_at_ms,
            "created_at_ms": now_ms,
            "trace_context": trace_context,
        }

    def _on_duplicate(self, job: NewJob) -> OnDuplicate:
        spec = self._find_spec(job.kind)
        return OnDuplicate.IGNORE if spec is None or job.dedupe_key is None else OnDuplicate(spec.on_duplicate)

    def _insert(self, tx: Session, rows: list[dict[str, Any]]) -> set[str]:
        values = {f"{field}_{number}": row[field] for number, row in enumerate(rows) for field in job_sql.INSERT_FIELDS}
        return set(execute(tx, job_sql.enqueue_ignoring(len(rows)), values).scalars())

    def _insert_replacing(self, tx: Session, job: NewJob, row: dict[str, Any]) -> set[str]:
        spec = self._find_spec(job.kind)
        rerun = self._on_duplicate(job) is OnDuplicate.RERUN
        outranks = self._outranks(job.kind, job.payload_json)
        choices = {
            "rerun": int(rerun),
            "replace_ready": int(outranks or not rerun),
            "replace_rerun": int(outranks or spec is None or spec.outranks is None),
        }
        return set(execute(tx, job_sql.ENQUEUE_REPLACING, row | choices).scalars())

    def _outranks(self, kind: str, payload_json: str) -> bool:
        spec = self._find_spec(kind)
        if spec is None or spec.outranks is None:
            return False
        return spec.outranks(parse_payload(spec.payload, payload_json))
