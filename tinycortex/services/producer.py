"""Producer: the way of every job into the queue, from applications and from settlements."""

from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, overload

from sqlalchemy.orm import Session

from tinycortex.domain.jobs import NewJob
from tinycortex.domain.payloads import parse_payload
from tinycortex.errors import InvalidInputError
from tinycortex.handlers.registry import HandlerRegistry
from tinycortex.repositories.jobs import JobRepository

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession


class Producer:
    """Checks a job against what this process knows of its kind, and inserts it."""

    def __init__(self, jobs: JobRepository, registry: HandlerRegistry) -> None:
        self._jobs = jobs
        self._registry = registry

    @overload
    def enqueue(self, job: NewJob, *, session: Session | None = None) -> str | None: ...

    @overload
    def enqueue(self, job: NewJob, *, session: "AsyncSession") -> Awaitable[str | None]: ...

    def enqueue(
        self, job: NewJob, *, session: "Session | AsyncSession | None" = None
    ) -> str | Awaitable[str | None] | None:
        """Insert ``job`` unless a ready or running row has its key.

        A kind without a handler in this process is let through: another process may run it. A kind with
        one has its payload checked.

        Args:
            job: what to enqueue.
            session: the caller's transaction; with an ``AsyncSession`` the result must be awaited.

        Returns:
            The new row's id, or None when an active twin suppressed it.

        Raises:
            InvalidInputError: ``job`` is no NewJob.
            PayloadError: the payload is not what the kind's handler takes.
            StorageError: nothing was written.
        """
        self._check(job)
        if session is not None and hasattr(session, "run_sync"):
            return session.run_sync(lambda inner: self._jobs.enqueue(job, session=inner))
        return self._jobs.enqueue(job, session=session)

    def enqueue_many(self, jobs: Iterable[NewJob], *, session: Session | None = None) -> list[str | None]:
        """Insert many jobs in one transaction; see :meth:`JobRepository.enqueue_many`."""
        wanted = list(jobs)
        for job in wanted:
            self._check(job)
        return self._jobs.enqueue_many(wanted, session=session)

    def _check(self, job: NewJob) -> None:
        if not isinstance(job, NewJob):
            raise InvalidInputError(f"enqueue takes a NewJob, not {type(job).__name__}")
        spec = self._registry.find_spec(job.kind)
        if spec is not None:
            parse_payload(spec.payload, job.payload_json)
