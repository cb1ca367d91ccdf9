"""Backfill: starts the embedding chain when something lacks a vector (spec: Scheduler helpers)."""

from tinycortex.delegates import QueueDelegates
from tinycortex.domain.jobs import NewJob
from tinycortex.domain.payloads import ReembedBackfillPayload
from tinycortex.services.producer import Producer


class Backfill:
    """The embedding chain, seen from outside."""

    def __init__(self, producer: Producer, delegates: QueueDelegates) -> None:
        self._producer = producer
        self._delegates = delegates

    async def ensure_reembed_backfill(self) -> str | None:
        """Enqueue the chain of the active signature when work is uncovered and no chain is active.

        Returns:
            The job's id; None when embedding is off, all is covered, or the chain is active already.
        """
        signature = await self._delegates.active_signature()
        if signature is None or not await self._delegates.has_uncovered_reembed_work(signature):
            return None
        return self._producer.enqueue(NewJob.reembed_backfill(ReembedBackfillPayload(signature=signature)))
