"""MemoryDelegates: the built-in QueueDelegates, on the same database as the queue. No network, no model."""

from functools import cached_property
from typing import TYPE_CHECKING

from tinycortex.config import MemorySettings
from tinycortex.db import Database
from tinycortex.domain.clock import Clock
from tinycortex.domain.decisions import AppendDecision, ExtractDecision, ReembedProgress, StaleBuffer
from tinycortex.domain.payloads import AppendTarget, NodeRef, SealDocumentPayload, SealPayload
from tinycortex.memory.embedding import Embedder, HashEmbedder
from tinycortex.threads import Threads

if TYPE_CHECKING:
    from tinycortex.memory.crafts import Crafts
    from tinycortex.memory.summarise import Summariser


class MemoryDelegates:
    """The heavy work of the six built-in kinds (spec: QueueDelegates, the heavy-work seam).

    Each method works in a thread, in transactions of its own, and commits before it returns. A run that
    was killed at any moment may be repeated: it finds what is done, does the rest, and reports the
    decision that the first run would have reported.

    Args:
        database: where chunks and trees are.
        settings: budgets and ages.
        clock: stamps rows; no content depends on it.
        summariser: makes summaries; the extractive one when left out.
        embedder: makes vectors; the hashing one when left out.
    """

    def __init__(
        self,
        database: Database,
        settings: MemorySettings,
        clock: Clock | None = None,
        *,
        summariser: "Summariser | None" = None,
        embedder: Embedder | None = None,
    ) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._summariser = summariser
        self._embedder: Embedder = embedder or HashEmbedder()
        self._threads = Threads("tinycortex-memory")
        self._last_kept: str | None = None

    @cached_property
    def _crafts(self) -> "Crafts":
        # Used in our threads only: every queue has delegates, and most programs that open one leave them alone.
        from tinycortex.memory.crafts import Crafts  # noqa: PLC0415 - as long as all else that an opening loads

        return Crafts(self._database, self._settings, self._clock, self._summariser, self._embedder)

    async def extract_chunk(self, chunk_id: str) -> ExtractDecision | None:
        """Score one chunk, store score and entities, decide admission. None: there is no such chunk."""
        decision = await self._threads.call(lambda: self._crafts.admission.extract(chunk_id))
        if decision is not None and decision.kept:
            self._last_kept = chunk_id
        return decision

    async def append_node(self, node: NodeRef, target: AppendTarget) -> AppendDecision | None:
        """Push a node into the target's level-0 buffer, once only. None: the node or the tree is missing."""
        return await self._threads.call(lambda: self._crafts.buffers.append(node, target))

    async def seal_level(self, payload: SealPayload) -> SealPayload | None:
        """Seal one summary's worth of a level; see :meth:`LevelSealer.seal` for what is returned."""
        return await self._threads.call(lambda: self._crafts.levels.seal(payload))

    async def list_stale_buffers(self, max_age_secs: int) -> list[StaleBuffer]:
        """List the level-0 buffers older than ``max_age_secs`` seconds, and much older ones above."""
        return await self._threads.call(lambda: self._crafts.buffers.list_stale(max_age_secs))

    async def seal_document(self, payload: SealDocumentPayload) -> SealPayload | None:
        """Build one document version's subtree and merge its root; the root level's seal when it is due."""
        return await self._threads.call(lambda: self._crafts.documents.seal(payload))

    async def reembed_batch(self, signature: str) -> ReembedProgress:
        """Embed a bounded batch of what lacks a vector at ``signature``; mark what cannot be embedded."""
        return await self._threads.call(lambda: self._crafts.coverage.embed_batch(signature))

    async def active_signature(self) -> str | None:
        """Return the embedder's signature."""
        return self._embedder.signature

    async def has_uncovered_reembed_work(self, signature: str) -> bool:
        """Tell whether anything lacks a vector, and is not marked as skipped, at ``signature``."""
        # Every extraction asks. The chunk that it admitted answers at once; a search would walk the store.
        hint = self._last_kept
        return await self._threads.call(lambda: self._crafts.coverage.has_uncovered(signature, hint=hint))

    def clear_reembed_skips(self, signature: str | None = None) -> int:
        """Forget what could not be embedded at ``signature``, or at any; return how many marks there were.

        The texts are tried again by the next embedding chain; ``Cortex.ensure_reembed_backfill`` starts one.
        """
        return self._crafts.coverage.clear_skips(signature)
