"""HandlerRegistry: which handler runs a kind, and everything that is special about the kind."""

import inspect
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar, Unpack

from pydantic import BaseModel

from tinycortex.domain.kinds import KindOptions, KindSpec
from tinycortex.domain.outcomes import JobPlan
from tinycortex.errors import DuplicateKindError, RegistrationError, UnknownKindError
from tinycortex.handlers.context import JobContext

Result = JobPlan | None
Handler = Callable[[JobContext, Any], Result | Awaitable[Result]]
"""Called with the context and the parsed payload. An ``async def`` is awaited; a plain ``def`` runs in a thread.

It returns :class:`~tinycortex.domain.outcomes.Done` or :class:`~tinycortex.domain.outcomes.Defer`; None
stands for ``Done()``. What it raises is a failed attempt.
"""

HandlerT = TypeVar("HandlerT", bound=Handler)

MAX_KINDS = 400
"""A claim probes each kind once in one statement, and SQLite takes 500 terms in one."""


@dataclass(frozen=True, slots=True)
class Registration:
    """One kind with its handler.

    Attributes:
        spec: what is special about the kind.
        handler: what runs its jobs.
        is_async: whether the handler is an ``async def``; asked once, as it takes longer than to call one.
    """

    spec: KindSpec
    handler: Handler
    is_async: bool


class HandlerRegistry:
    """The kinds that this process can run. A worker claims these, and leaves every other row untouched."""

    def __init__(self) -> None:
        self._registrations: dict[str, Registration] = {}

    def register(self, spec: KindSpec, handler: Handler) -> None:
        """Let ``handler`` run the jobs of ``spec.kind``.

        Raises:
            DuplicateKindError: the kind has a handler, a built-in one perhaps.
            RegistrationError: the handler cannot be called, or there are too many kinds.
        """
        if not callable(handler):
            raise RegistrationError(f"the handler of kind {spec.kind!r} must be callable, not {handler!r}")
        if spec.kind in self._registrations:
            raise DuplicateKindError(f"kind {spec.kind!r} has a handler already; choose another word for yours")
        if len(self._registrations) >= MAX_KINDS:
            raise RegistrationError(f"one process handles at most {MAX_KINDS} kinds; {spec.kind!r} is one more")
        self._registrations[spec.kind] = Registration(spec, handler, inspect.iscoroutinefunction(handler))

    def handler(
        self, kind: str, *, payload: type[BaseModel], **options: Unpack[KindOptions]
    ) -> Callable[[HandlerT], HandlerT]:
        """Return a decorator that registers a handler; the options are the fields of KindSpec."""
        spec = KindSpec(kind=kind, payload=payload, **options)

        def decorate(handler: HandlerT) -> HandlerT:
            self.register(spec, handler)
            return handler

        return decorate

    def get(self, kind: str) -> Registration:
        """Return the registration of ``kind``, or raise :class:`UnknownKindError`."""
        try:
            return self._registrations[kind]
        except KeyError:
            known = ", ".join(sorted(self._registrations)) or "none"
            raise UnknownKindError(f"no handler for kind {kind!r} in this process; registered: {known}") from None

    def check_kinds(self, kinds: Collection[str] | None) -> frozenset[str] | None:
        """Return ``kinds``, or raise :class:`UnknownKindError` when one has no handler here; None stands for all."""
        return None if kinds is None else frozenset(self.get(kind).spec.kind for kind in kinds)

    def find_spec(self, kind: str) -> KindSpec | None:
        """Return what is special about ``kind``, or None when no handler is registered for it."""
        registration = self._registrations.get(kind)
        return None if registration is None else registration.spec

    def list_specs(self) -> list[KindSpec]:
        """List the registered kinds, in the order of their registration."""
        return [registration.spec for registration in self._registrations.values()]
