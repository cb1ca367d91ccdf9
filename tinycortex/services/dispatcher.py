"""Dispatcher: from a claimed row to its handler's plan."""

import asyncio
import inspect

from tinycortex.delegates import QueueDelegates
from tinycortex.domain import policy
from tinycortex.domain.clock import Clock
from tinycortex.domain.jobs import Job
from tinycortex.domain.outcomes import Done, JobPlan
from tinycortex.domain.payloads import parse_payload
from tinycortex.errors import JobFailure, PayloadError
from tinycortex.handlers.context import JobContext
from tinycortex.handlers.registry import HandlerRegistry


class Dispatcher:
    """Finds the handler of a job, hands it the parsed payload, and returns what it plans."""

    def __init__(self, registry: HandlerRegistry, delegates: QueueDelegates, clock: Clock) -> None:
        self._registry = registry
        self._delegates = delegates
        self._clock = clock

    async def dispatch(self, job: Job) -> JobPlan:
        """Run the handler of ``job``: an ``async def`` on this loop, a plain ``def`` in a thread.

        Raises:
            JobFailure: the payload is malformed (unrecoverable: it will never read differently).
            TypeError: the handler returned something that is no plan.
            BaseException: whatever the handler raised.
        """
        registration = self._registry.get(job.kind)
        try:
            payload = parse_payload(registration.spec.payload, job.payload_json)
        except PayloadError as error:
            raise JobFailure.unrecoverable(policy.REASON_MALFORMED_PAYLOAD, str(error)) from error
        context = JobContext(job=job, delegates=self._delegates, clock=self._clock)
        if inspect.iscoroutinefunction(registration.handler):
            result = await registration.handler(context, payload)
        else:
            result = await asyncio.to_thread(registration.handler, context, payload)
            if inspect.isawaitable(result):  # a partial, a lambda or an object around an async def
                result = await result
        if result is None:
            return Done()
        if not isinstance(result, JobPlan):
            raise TypeError(f"the handler of {job.kind!r} returned {type(result).__name__}; return Done, Defer or None")
        return result
