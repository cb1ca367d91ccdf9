"""The seam of tracing: what the queue asks a tracer at an enqueue and around a handler."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from tinycortex.domain.jobs import Job


class Tracer(Protocol):
    """Follows jobs from their enqueue to their handler. Nothing that it does may raise."""

    def sending(self, kinds: Sequence[str]) -> AbstractContextManager[str | None]:
        """Trace the block as the enqueue of jobs of ``kinds``; it gets the trace context that they carry."""

    def handling(self, job: Job) -> AbstractContextManager[None]:
        """Trace the block, from handler to settlement, as the run of ``job``."""


_NOTHING = nullcontext()


class _NoTracer:
    """Traces nothing."""

    def sending(self, kinds: Sequence[str]) -> AbstractContextManager[str | None]:  # noqa: ARG002 - the protocol's
        """Carry nothing."""
        return _NOTHING

    def handling(self, job: Job) -> AbstractContextManager[None]:  # noqa: ARG002 - the protocol's
        """Do nothing."""
        return _NOTHING


NO_TRACER: Tracer = _NoTracer()
