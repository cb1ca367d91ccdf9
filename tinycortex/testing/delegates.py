"""Delegates that do no work: they record what they are asked and answer what they were told to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tinycortex.domain.decisions import AppendDecision, ExtractDecision, ReembedProgress, StaleBuffer
from tinycortex.domain.payloads import AppendTarget, NodeRef, SealDocumentPayload, SealPayload


@dataclass
class FakeDelegates:
    """A :class:`~tinycortex.delegates.QueueDelegates` whose answers are fields.

    Attributes:
        calls: every call as (method, arguments), in order.
        reembed: answers of ``reembed_batch``, one per call; the last one is given for ever.
        error: raised by every method when it is set.
    """

    extract: ExtractDecision | None = None
    append: AppendDecision | None = None
    seal: SealPayload | None = None
    stale: Sequence[StaleBuffer] = ()
    document: SealPayload | None = None
    reembed: list[ReembedProgress] = field(default_factory=lambda: [ReembedProgress(written=0, more_remaining=False)])
    signature: str | None = None
    uncovered: bool = False
    error: BaseException | None = None
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def _record(self, method: str, *arguments: Any) -> None:
        self.calls.append((method, arguments))
        if self.error is not None:
            raise self.error

    async def extract_chunk(self, chunk_id: str) -> ExtractDecision | None:
        """Answer ``extract``."""
        self._record("extract_chunk", chunk_id)
        return self.extract

    async def append_node(self, node: NodeRef, target: AppendTarget) -> AppendDecision | None:
        """Answer ``append``."""
        self._record("append_node", node, target)
        return self.append

    async def seal_level(self, payload: SealPayload) -> SealPayload | None:
        """Answer ``seal``."""
        self._record("seal_level", payload)
        return self.seal

    async def list_stale_buffers(self, max_age_secs: int) -> Sequence[StaleBuffer]:
        """Answer ``stale``."""
        self._record("list_stale_buffers", max_age_secs)
        return self.stale

    async def seal_document(self, payload: SealDocumentPayload) -> SealPayload | None:
        """Answer ``document``."""
        self._record("seal_document", payload)
        return self.document

    async def reembed_batch(self, signature: str) -> ReembedProgress:
        """Answer the next of ``reembed``."""
        self._record("reembed_batch", signature)
        return self.reembed.pop(0) if len(self.reembed) > 1 else self.reembed[0]

    async def active_signature(self) -> str | None:
        """Answer ``signature``."""
        self._record("active_signature")
        return self.signature

    async def has_uncovered_reembed_work(self, signature: str) -> bool:
        """Answer ``uncovered``."""
        self._record("has_uncovered_reembed_work", signature)
        return self.uncovered
