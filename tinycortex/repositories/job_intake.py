"""Taking jobs in: one or many inserts in one transaction, and what an active twin makes of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from typing import Any, TypeVar

import uuid_utils
from sqlalchemy.orm import Session

from tinycortex.db import Database
from tinycortex.domain import policy
from tinycortex.domain.clock import Clock
from tinycortex.domain.jobs import NewJob
from tinycortex.domain.kinds import BUILTIN_KINDS, KindSpec, OnDuplicate
from tinycortex.domain.payloads import parse_payload
from tinycortex.errors import InvalidInputError
from tinycortex.repositories import job_sql
from tinycortex.repositories.execution import fetch
from tinycortex.repositories.job_reader import JobReader
from tinycortex.repositories.shared_gate import SharedGate
from tinycortex.telemetry import Emitter, Event, JobsEnqueued

T = TypeVar("T")

_ROWS_PER_STATEMENT = (256, 64, 16, 4, 1)
"""Of few sizes, so that each statement is built and compiled once: a large one holds thousands of parameters."""


def mint_id() -> str:
    """Return the id of a new row; ids grow, also within a millisecond, and so break ties between equal times."""
    return f"job:{uuid_utils.uuid7()}"


class JobIntake(JobReader):
    """The part of :class:`~tinycortex.repositories.jobs.JobRepository` that takes jobs in.

    Args:
        database: where the rows are.
        clock: the source of "now"; the database's when left out.
        find_spec: what is special about a kind; the built-in kinds when left out.
        retry_jitter: share of a retry delay that is added on top of it at random.
        on_ready: called after a commit that leaves work, or permits that all processes share, for whoever is idle,
            in the thread that committed it.
        emitter: told of what has been committed; one that nobody hears when left out.
        llm_permits: LLM-bound rows that all processes may hold at a time; None for no such limit.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock | None = None,
        *,
        find_spec: Callable[[str], KindSpec | None] = BUILTIN_KINDS.get,
        retry_jitter: float = policy.RETRY_JITTER,
        on_ready: Callable[[], object] | None = None,
        emitter: Emitter | None = None,
        llm_permits: int | None = None,
    ) -> None:
        super().__init__(database)
        self._clock = clock or database.clock
        self._find_spec = find_spec
        self._retry_jitter = retry_jitter
        self._on_ready = on_ready
        self.emitter = emitter or Emitter()
        self.shared_gate = SharedGate(database, self._clock, llm_permits)

    def _tell(self, tx: Session, event: Event) -> None:
        self._database.on_commit(tx, partial(self.emitter.emit, event))

    def _wake(self, tx: Session) -> None:
        if self._on_ready is not None:
            self._database.on_commit(tx, self._on_ready)

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
        _check(job)
        now_ms, job_id = self._clock.now_ms(), mint_id()
        with self.emitter.tracer.sending([job.kind]) as trace_context:
            with self._database.within(session) as tx:
                row = self._row(job, job_id, now_ms, trace_context)
                if self._on_duplicate(job) is OnDuplicate.IGNORE:
                    inserted = self._insert(tx, [row])
                else:
                    inserted = self._insert_replacing(tx, job, row)
                is_new = job_id in inserted  # a twin that takes the request says its own id
                new = [(job_id, job.kind)] if is_new else []
                if session is not None:
                    self._announce(new, session)
            if session is None:
                self._announce(new)
        return job_id if is_new else None

    def enqueue_tx(self, session: Session, job: NewJob) -> str | None:
        """Insert ``job`` in the caller's transaction; see :meth:`enqueue`."""
        return self.enqueue(job, session=session)

    def enqueue_many(self, jobs: Iterable[NewJob], *, session: Session | None = None) -> list[str | None]:
        """Insert many jobs in one transaction: all of them, or none when one cannot be written.

        Where several can write at a time, rows are written in the order of their keys, so that two callers
        with overlapping keys wait for each other instead of locking each other out; where a transaction of our own
        was undone all the same, to let somebody else's go on, it is made again. Where the database has one
        writer they are written as given: rows that are claimed one after another then lie side by side, which
        makes their claims and settlements several times as cheap.

        Returns:
            For each job, in the order given, the new row's id or None when an active twin (an earlier job
            of the same call perhaps) suppressed it.

        Raises:
            InvalidInputError: an item is no NewJob.
            PayloadError: a payload is not what its kind takes.
            StorageError: nothing was written.
        """
        wanted = list(jobs)
        for job in wanted:
            _check(job)
        now_ms = self._clock.now_ms()
        # Minted in the order given, since ids break ties between equal times. The rows themselves are built
        # a statement at a time: beside the jobs only their ids are held.
        ids = [mint_id() for _ in wanted]
        taken: list[str | None] = [None] * len(wanted)
        plain = [self._on_duplicate(job) is OnDuplicate.IGNORE for job in wanted]
        # Of one key those that share a statement come first, and with one writer of all keys.
        by_key = bool(self._database.row_lock)
        order = sorted(
            range(len(wanted)), key=lambda index: (by_key and (wanted[index].dedupe_key or ""), not plain[index])
        )

        def write(tx: Session) -> None:
            for is_plain, run in groupby(order, plain.__getitem__):
                indexes = list(run)
                for batch in portions(indexes) if is_plain else [[index] for index in indexes]:
                    rows = [self._row(wanted[index], ids[index], now_ms, trace_context) for index in batch]
                    inserted = (
                        self._insert(tx, rows) if is_plain else self._insert_replacing(tx, wanted[batch[0]], rows[0])
                    )
                    for index in batch:
                        taken[index] = ids[index] if ids[index] in inserted else None

        with self.emitter.tracer.sending([job.kind for job in wanted]) as trace_context:
            self._database.write(write, session)
            new = [(job_id, job.kind) for job_id, job in zip(taken, wanted, strict=True) if job_id is not None]
            if session is not None:
                self._announce(new, session)
        if session is None:
            self._announce(new)
        return taken

    def _announce(self, new: list[tuple[str, str]], session: Session | None = None) -> None:
        """Tell of new rows once ``session`` has committed them; at once when a transaction of our own just has."""
        calls = [self._on_ready] if new and self._on_ready is not None else []
        if new and self.emitter.is_heard:
            calls.append(partial(self.emitter.emit, _event_of(new)))
        for call in calls:
            # To wait for a commit is to listen to its session, which costs more than the insert does.
            call() if session is None else self._database.on_commit(session, call)

    def _row(self, job: NewJob, job_id: str, now_ms: int, trace_context: str | None) -> tuple[Any, ...]:
        spec = self._find_spec(job.kind)
        default_attempts = policy.DEFAULT_MAX_ATTEMPTS if spec is None else spec.max_attempts
        return (
            job_id,
            job.kind,
            job.payload_json,
            job.dedupe_key,
            default_attempts if job.max_attempts is None else job.max_attempts,
            now_ms if job.available_at_ms is None else job.available_at_ms,
            now_ms,
            trace_context,
        )

    def _on_duplicate(self, job: NewJob) -> OnDuplicate:
        spec = self._find_spec(job.kind)
        return OnDuplicate.IGNORE if spec is None or job.dedupe_key is None else OnDuplicate(spec.on_duplicate)

    def _insert(self, tx: Session, rows: Sequence[tuple[Any, ...]]) -> set[str]:
        values = zip(job_sql.insert_parameters(len(rows)), chain.from_iterable(rows), strict=True)
        return {job_id for (job_id,) in fetch(tx, job_sql.enqueue_ignoring(len(rows)), dict(values)).rows}

    def _insert_replacing(self, tx: Session, job: NewJob, row: tuple[Any, ...]) -> set[str]:
        spec = self._find_spec(job.kind)
        rerun = self._on_duplicate(job) is OnDuplicate.RERUN
        outranks = self._outranks(job.kind, job.payload_json)
        choices = {
            "rerun": int(rerun),
            "replace_ready": int(outranks or not rerun),
            "replace_rerun": int(outranks or spec is None or spec.outranks is None),
        }
        values = dict(zip(job_sql.INSERT_FIELDS, row, strict=True)) | choices
        return {job_id for (job_id,) in fetch(tx, job_sql.ENQUEUE_REPLACING, values).rows}

    def _outranks(self, kind: str, payload_json: str) -> bool:
        spec = self._find_spec(kind)
        if spec is None or spec.outranks is None:
            return False
        return spec.outranks(parse_payload(spec.payload, payload_json))


def _check(job: object) -> None:
    if not isinstance(job, NewJob):
        raise InvalidInputError(f"enqueue takes NewJob values, not {type(job).__name__}")


def _event_of(new: list[tuple[str, str]]) -> JobsEnqueued:
    ids, kinds = zip(*new, strict=True)
    return JobsEnqueued(ids=ids, kinds=kinds)


def portions(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield all of ``items``, a few sizes at a time."""
    start = 0
    for size in _ROWS_PER_STATEMENT:
        while len(items) - start >= size:
            yield items[start : start + size]
            start += size
