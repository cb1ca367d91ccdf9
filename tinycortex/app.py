"""Cortex: the composition root. It builds every part once and owns what must be closed."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Self, Unpack, overload

from pydantic import BaseModel
from sqlalchemy.orm import Session

from tinycortex import schema
from tinycortex.config import Settings, load_settings
from tinycortex.db import Database
from tinycortex.delegates import QueueDelegates
from tinycortex.domain.clock import Clock
from tinycortex.domain.findings import Finding
from tinycortex.domain.jobs import TERMINAL_STATUSES, Job, JobStatus, NewJob
from tinycortex.domain.kinds import KindOptions, KindSpec
from tinycortex.group_commit import GroupCommit
from tinycortex.handlers.builtin import register_builtin_handlers
from tinycortex.handlers.registry import HandlerRegistry, HandlerT
from tinycortex.memory.delegates import MemoryDelegates
from tinycortex.repositories.jobs import JobRepository, Requeued
from tinycortex.scheduler import Scheduler, TickReport
from tinycortex.services.backfill import Backfill
from tinycortex.services.diagnosis import Diagnosis
from tinycortex.services.dispatcher import Dispatcher
from tinycortex.services.gate import LlmGate
from tinycortex.services.inspection import Inspection, QueueStatus
from tinycortex.services.maintenance import BootstrapReport, Maintenance
from tinycortex.services.portal import LoopThread
from tinycortex.services.producer import Producer
from tinycortex.services.settlement import Settlement
from tinycortex.telemetry import Observable
from tinycortex.threads import SerialThread
from tinycortex.worker.aio import Worker
from tinycortex.worker.drain import Drain
from tinycortex.worker.heartbeat import Heartbeat
from tinycortex.worker.identity import WorkerIdentity
from tinycortex.worker.loop import SyncUpkeep, SyncWorker
from tinycortex.worker.options import DrainOptions, RunOptions
from tinycortex.worker.step import WorkerStep
from tinycortex.worker.turns import Turns
from tinycortex.worker.upkeep import Chore, Upkeep
from tinycortex.worker.wakeup import Wakeup

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

    from tinycortex.memory.ingest import Ingestor


class Cortex(Observable):
    """A queue, its handlers and its workers, on one database.

    Open one per process with :meth:`open` or :meth:`from_env`, and close it, or use it in ``with``.

    Attributes:
        settings: every setting in force.
        jobs: the repository of the queue's rows.
        registry: the kinds that this process can run; the six built-in ones are registered.
        llm_gate: lets LLM-bound handlers run one at a time, or as many as ``queue.llm_permits``.
        delegates: the heavy work of the built-in kinds.
    """

    def __init__(
        self, settings: Settings, *, delegates: QueueDelegates | None = None, clock: Clock | None = None
    ) -> None:
        self.settings = settings
        super().__init__()
        self.database = Database(settings.database)
        self.clock = clock or self.database.clock
        self.registry = HandlerRegistry()
        register_builtin_handlers(self.registry)
        self._wakeup = Wakeup(self.database)
        self.jobs = JobRepository(
            self.database,
            self.clock,
            find_spec=self.registry.find_spec,
            retry_jitter=settings.queue.retry_jitter,
            on_ready=self._wakeup.notify,
            emitter=self.emitter,
            llm_permits=settings.queue.llm_permits_global,
        )
        self.llm_gate = LlmGate(settings.queue.llm_permits)
        self.delegates = delegates or MemoryDelegates(self.database, settings.memory, self.clock)
        self._portal = LoopThread()
        self._storage = GroupCommit("tinycortex-storage", self.database)
        self._chores = SerialThread("tinycortex-upkeep")
        self._heartbeat = Heartbeat(self.jobs, beat_ms=settings.worker.heartbeat_ms)
        self._producer = Producer(self.jobs, self.registry)
        self._maintenance = Maintenance(self.database, self.jobs, self._producer, self.registry, self.clock)
        self._scheduler = Scheduler(self._maintenance, settings.scheduler, self.emitter)
        self._backfill = Backfill(self._producer, self.delegates)
        self._inspection = Inspection(self.database, self.jobs, self.registry, self.llm_gate, self.clock)
        self._diagnosis = Diagnosis(settings, self.registry, self.clock)
        self._turns = Turns(
            database=self.database,
            jobs=self.jobs,
            registry=self.registry,
            settlement=Settlement(self.database, self.jobs, self._producer, settings.queue, self.clock),
            gate=self.llm_gate,
            storage=self._storage,
            heartbeat=self._heartbeat,
            identity=WorkerIdentity(settings.worker.id),
            queue=settings.queue,
            worker=settings.worker,
            clock=self.clock,
        )
        self._step = WorkerStep(
            database=self.database,
            dispatcher=Dispatcher(self.registry, self.jobs, self.delegates, self.clock, storage=self._storage),
            turns=self._turns,
            gate=self.llm_gate,
            portal=self._portal,
            storage=self._storage,
            emitter=self.emitter,
            clock=self.clock,
        )
        self._drain = Drain(self._step, self.jobs, self.registry, self.clock)
        tick = Chore(self.tick, settings.scheduler.tick_s)
        self._worker = Worker(
            self._step,
            registry=self.registry,
            heartbeat=self._heartbeat,
            wakeup=self._wakeup,
            upkeep=Upkeep(self._chores, Chore(self.recover_stale_locks, settings.worker.recover_ms / 1000)),
            tick=tick,
            bootstrap=self.bootstrap,
            settings=settings.worker,
            clock=self.clock,
        )
        self._sync_worker = SyncWorker(self._worker, self._portal)
        self._sync_scheduler = SyncUpkeep(Upkeep(self._chores, tick), self._portal, settings.worker, self.emitter)

    @classmethod
    def open(
        cls,
        url: str,
        *,
        settings: Settings | None = None,
        delegates: QueueDelegates | None = None,
        clock: Clock | None = None,
    ) -> Self:
        """Open the queue in the database at ``url``, which must be at the newest revision.

        Args:
            url: SQLAlchemy URL, such as ``sqlite:///memory.db``.
            settings: everything else; from the environment when left out.
            delegates: the heavy work of the built-in kinds; ``tinycortex.memory``'s when left out.
            clock: the queue's clock; the database's when left out.

        Raises:
            ConfigurationError: the URL or a setting cannot work.
            SchemaMissingError: run ``tinycortex db upgrade``, or :func:`tinycortex.schema.upgrade`.
            SchemaOutdatedError: as above.
            StorageError: the database could not be read.
        """
        cortex = cls((settings or load_settings()).with_url(url), delegates=delegates, clock=clock)
        try:
            schema.verify(cortex.database)
        except BaseException:
            cortex.close()
            raise
        return cortex

    @classmethod
    def from_env(cls) -> Self:
        """Open the queue that the ``TINYCORTEX_…`` environment variables describe; see :meth:`open`."""
        settings = load_settings()
        return cls.open(settings.database.url, settings=settings)

    def close(self) -> None:
        """Write what could not be written before, end the threads, withdraw the worker, close all connections."""
        self._portal.close()
        self._turns.leave_kept()  # what stays unwritten is run again after its lease
        self._storage.close()
        self._chores.close()
        self._wakeup.close()
        self._heartbeat.close()
        self.database.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # Produce

    @cached_property
    def ingestor(self) -> "Ingestor":
        """What takes text into the queue."""
        from tinycortex.memory.ingest import Ingestor  # noqa: PLC0415 - it brings the memory's tables with it

        return Ingestor(self.database, self.jobs, self.settings.memory, self.clock)

    def transaction(self) -> AbstractContextManager[Session]:
        """Open one write transaction on the queue's database; hand its session to :meth:`enqueue`."""
        return self.database.transaction()

    @overload
    def enqueue(self, job: NewJob, *, session: Session | None = None) -> str | None: ...

    @overload
    def enqueue(self, job: NewJob, *, session: "AsyncSession") -> Awaitable[str | None]: ...

    def enqueue(
        self, job: NewJob, *, session: "Session | AsyncSession | None" = None
    ) -> str | Awaitable[str | None] | None:
        """Insert ``job`` unless a ready or running row has its key; see :meth:`Producer.enqueue`.

        With a ``session``, of whatever engine on this database, the job commits with the caller's own
        rows; with an ``AsyncSession`` the result must be awaited.

        Returns:
            The new row's id, or None when an active twin suppressed it.

        Raises:
            InvalidInputError: ``job`` is no NewJob.
            PayloadError: the payload is not what the kind's handler takes.
            StorageError: nothing was written.
        """
        return self._producer.enqueue(job, session=session)

    def enqueue_many(self, jobs: Iterable[NewJob], *, session: Session | None = None) -> list[str | None]:
        """Insert many jobs in one transaction; see :meth:`JobRepository.enqueue_many`.

        Returns:
            For each job, in the order given, the new row's id or None when an active twin suppressed it.
        """
        return self._producer.enqueue_many(jobs, session=session)

    def enqueue_tx(self, session: Session, job: NewJob) -> str | None:
        """Insert ``job`` in the caller's transaction; see :meth:`enqueue`."""
        return self._producer.enqueue(job, session=session)

    # Handle

    def handler(
        self, kind: str, *, payload: type[BaseModel], **options: Unpack[KindOptions]
    ) -> Callable[[HandlerT], HandlerT]:
        """Return a decorator that registers the handler of ``kind``.

        Args:
            kind: the word in ``mem_tree_jobs.kind``.
            payload: the pydantic model of its payload.
            **options: the other fields of :class:`KindSpec`, such as ``max_attempts`` and ``timeout_s``.

        Raises:
            DuplicateKindError: the kind has a handler already; the built-in ones are taken.
            RegistrationError: the kind is retired, or cannot be registered.
            InvalidInputError: an argument is outside its contract.
        """
        return self.registry.handler(kind, payload=payload, **options)

    # Work

    def bootstrap(self) -> BootstrapReport:
        """Purge retired kinds and recover what dead workers left; call it once before a loop of your own."""
        return self._maintenance.bootstrap()

    def run_once(self) -> bool:
        """Claim one job, run its handler, settle; False when nothing was claimable (spec: Worker loop)."""
        return self._step.run_once()

    async def run_once_async(self) -> bool:
        """Do as :meth:`run_once` on the running loop."""
        return await self._step.run_once_async()

    def drain_until_idle(self, **options: Unpack[DrainOptions]) -> int:
        """Run jobs until none is claimable; return how many were run. See :meth:`Drain.drain_until_idle`."""
        return self._drain.drain_until_idle(**options)

    def run_sync(self, stop: threading.Event | None = None, **options: Unpack[RunOptions]) -> None:
        """Work until ``stop`` is set, while this thread waits; without one, until interrupted. See :meth:`run`."""
        self._sync_worker.run(stop or threading.Event(), **options)

    async def run(self, stop: asyncio.Event | None = None, **options: Unpack[RunOptions]) -> None:
        """Work on the running loop until ``stop`` is set; without one, until cancelled. See :meth:`Worker.run`.

        No handler of signals is installed, here or in any other method: they are the program's own.

        Args:
            stop: set to stop: no job is claimed any more, and those that run get
                ``worker.shutdown_grace_s`` to end.
            **options: ``concurrency``, ``kinds`` and ``scheduler``; see :class:`RunOptions`.

        Raises:
            InvalidInputError: ``concurrency`` is no number above zero.
            UnknownKindError: one of ``kinds`` has no handler here.
            StorageCorruptError: the database is damaged.
        """
        await self._worker.run(stop or asyncio.Event(), **options)

    def run_scheduler(self, stop: threading.Event | None = None) -> None:
        """Tick every ``scheduler.tick_s`` until ``stop`` is set, or until interrupted, and run no job.

        Storage faults are waited out as by a worker.

        Raises:
            StorageCorruptError: the database is damaged.
            Exception: whatever else a tick met.
        """
        self._sync_scheduler.run(stop or threading.Event())

    # Maintain

    def tick(self) -> TickReport:
        """Do the scheduler's periodic work once: recover, flush, heal."""
        return self._scheduler.tick()

    def recover_stale_locks(self) -> int:
        """Free the rows of expired leases, and at once those of workers whose process has certainly ended."""
        return self._maintenance.recover_stale_locks()

    def release_running_locks(self) -> int:
        """Give back every row that this process's worker holds, attempts too."""
        return self.jobs.release_running_locks(self._turns.worker_id)

    def enqueue_flush_stale(self, max_age_secs: int | None = None) -> str | None:
        """Enqueue this 3-hour UTC block's flush, at most one per block; None when it had one."""
        age = self.settings.scheduler.flush_max_age_secs if max_age_secs is None else max_age_secs
        return self._maintenance.enqueue_flush_stale(age)

    def self_heal(self) -> int:
        """Requeue transiently failed rows, spaced out; return how many are ready again."""
        return self._maintenance.self_heal().revived

    def requeue_failed(self, job_id: str | None = None) -> Requeued:
        """Make one failed row, or all of them, ready again with a fresh budget.

        Raises:
            JobNotFoundError: there is no such row.
            InvalidInputError: the row is not failed.
        """
        return self.jobs.requeue_failed() if job_id is None else self.jobs.requeue_job(job_id)

    def retry_all_failed(self) -> Requeued:
        """Make every failed row ready again, unrecoverable ones too."""
        return self.jobs.requeue_failed()

    def requeue_transient_failed(self) -> Requeued:
        """Make every failed row ready again that is not classed unrecoverable."""
        return self.jobs.requeue_transient_failed()

    def cancel(self, job_id: str) -> JobStatus:
        """Cancel a ready job at once, or ask the holder of a running one to stop; see :meth:`JobRepository.cancel`.

        Returns:
            ``cancelled``, or ``running`` while the holder has yet to end.

        Raises:
            JobNotFoundError: there is no such row.
            InvalidInputError: the row has settled already.
        """
        return self.jobs.cancel(job_id)

    def purge(self, older_than_ms: int, statuses: Iterable[JobStatus] = TERMINAL_STATUSES) -> int:
        """Delete settled rows that completed more than ``older_than_ms`` ago; return how many.

        Rows whose key has something to say yet, such as the flush of the current block, stay.
        """
        return self._maintenance.purge(older_than_ms, statuses)

    def purge_retired_jobs(self) -> int:
        """Delete every row of a retired kind."""
        return self.jobs.purge_retired_jobs()

    def ensure_reembed_backfill(self) -> str | None:
        """Start the embedding chain when something lacks a vector; its job's id, or None when not needed."""
        return self._portal.run(self._backfill.ensure_reembed_backfill())

    def backfill_in_progress(self) -> bool:
        """Tell whether an embedding chain is ready or running, in this process or another."""
        return self._inspection.backfill_in_progress()

    # Inspect

    def status(self) -> QueueStatus:
        """Return how the queue is doing, all of it from one snapshot."""
        return self._inspection.status()

    def diagnose(self) -> list[Finding]:
        """Look for faults of the file, the schema and the rows without changing anything; it reads every page.

        The findings come errors first; see ``docs/operations.md`` for what each means. Damage, or a database
        that is missing or cannot be read, is a finding too, never an error.
        """
        return self._diagnosis.diagnose()

    def get_job(self, job_id: str) -> Job:
        """Return one row, or raise :class:`JobNotFoundError`."""
        return self.jobs.get_job(job_id)

    def list_kinds(self) -> list[KindSpec]:
        """List the kinds that this process can run."""
        return self.registry.list_specs()
