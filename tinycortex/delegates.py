"""QueueDelegates: the seam to the heavy work (spec: QueueDelegates, the heavy-work seam).

The queue owns control flow: payloads, follow-ups, gating, defer. Everything slow or external is behind
this protocol. ``tinycortex.memory`` has the built-in implementation; a host may supply its own.

Every method runs at least once per job: a process may die after the work and before the settlement.
So each must be idempotent, and asked again it must report the same decision, not "nothing to do".
Any method may raise; a :class:`~tinycortex.errors.JobFailure` anywhere in the chain of causes decides
whether the job is tried again.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tinycortex.domain.decisions import AppendDecision, ExtractDecision, ReembedProgress, StaleBuffer
from tinycortex.domain.payloads import AppendTarget, NodeRef, SealDocumentPayload, SealPayload


@runtime_checkable
class QueueDelegates(Protocol):
    """The heavy work of the six built-in kinds."""

    async def extract_chunk(self, chunk_id: str) -> ExtractDecision | None:
        """Score one chunk, store score and entities, decide admission. None: there is no such chunk."""
        ...

    async def append_node(self, node: NodeRef, target: AppendTarget) -> AppendDecision | None:
        """Push a node into the target's level-0 buffer, once only. None: the node or the tree is missing."""
        ...

    async def seal_level(self, payload: SealPayload) -> SealPayload | None:
        """Seal one level into one summary.

        Returns the seal that is due next (the parent's, or the rest of this level), else None.

        With ``payload.force_now_ms`` the level is sealed although its gate is not met.
        """
        ...

    async def list_stale_buffers(self, max_age_secs: int) -> Sequence[StaleBuffer]:
        """List the buffers that have waited longer than ``max_age_secs`` seconds."""
        ...

    async def seal_document(self, payload: SealDocumentPayload) -> SealPayload | None:
        """Build one document version's subtree and merge its root into the tree of ``payload.tree_scope``.

        Returns the seal of the level that its root waits in when that is now due, else None.
        """
        ...

    async def reembed_batch(self, signature: str) -> ReembedProgress:
        """Embed a bounded batch of what lacks a vector at ``signature``; mark what cannot be embedded."""
        ...

    async def active_signature(self) -> str | None:
        """Return the signature of the embedder in use, or None when embedding is off."""
        ...

    async def has_uncovered_reembed_work(self, signature: str) -> bool:
        """Tell whether anything lacks a vector, and is not marked as skipped, at ``signature``."""
        ...
