"""MemoryDelegates: the built-in QueueDelegates, on the same database as the queue. No network, no model."""

from functools import partial

from tinycortex.config import MemorySettings
from tinycortex.db import Database
from tinycortex.domain.clock import Clock
from tinycortex.domain.decisions import AppendDecision, ExtractDecision, ReembedProgress, StaleBuffer
from tinycortex.domain.payloads import AppendTarget, NodeRef, SealDocumentPayload, SealPayload
from tinycortex.memory.admission import Admission
from tinycortex.memory.authoring import Author
from tinycortex.memory.buffers import Buffers
from tinycortex.memory.coverage import Coverage
from tinycortex.memory.documents import DocumentSealer
from tinycortex.memory.embedding import Embedder, HashEmbedder
from tinycortex.memory.seal import LevelSealer
from tinycortex.memory.summarise import ExtractiveSummariser, Summariser
from tinycortex.threads import Threads


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
        summariser: Summariser | None = None,
        embedder: Embedder | None = None,
    ) -> None:
        clock = clock or database.clock
        self._embedder: Embedder = embedder or HashEmbedder()
        author = Author(settings, clock, summariser or ExtractiveSummariser(), self._embedder)
        self._admission = Admission(database, settings, clock)
        self._buffers = Buffers(database, settings, clock)
        self._levels = LevelSealer(database, settings, clock, author)
        self._documents = DocumentSealer(database, settings, clock, author)
        self._coverage = Coverage(database, settings, clock, self._embedder)
        self._threads = Threads("tinycortex-memory")
        self._last_kept: str | None = None

    async def extract_chunk(self, chunk_id: str) -> ExtractDecision | None:
        """Score one chunk, store score and entities, decide admission. None: there is no such chunk."""
        decision = await self._threads.call(self._admission.extract, chunk_id)
        if decision is not None and decision.kept:
            self._last_kept = chunk_id
        return decision

    async def append_node(self, node: NodeRef, target: AppendTarget) -> AppendDecision | None:
        """Push a node into the target's level-0 buffer, once only. None: the node or the tree is missing."""
        return await self._threads.call(self._buffers.append, node, target)

    async def seal_level(self, payload: SealPayload) -> SealPayload | None:
        """Seal one summary's worth of a level; see :meth:`LevelSealer.seal` for what is returned."""
        return await self._threads.call(self._levels.seal, payload)

    async def list_stale_buffers(self, max_age_secs: int) -> list[StaleBuffer]:
        """List the level-0 buffers older than ``max_age_secs`` seconds, and much older ones above."""
        return await self._threads.call(self._buffers.list_stale, max_age_secs)

    async def seal_document(self, payload: SealDocumentPayload) -> SealPayload | None:
        """Build one document version's subtree and merge its root; the root level's seal when it is due."""
        return await self._threads.call(self._documents.seal, payload)

    async def reembed_batch(self, signature: str) -> ReembedProgress:
        """Embed a bounded batch of what lacks a vector at ``signature``; mark what cannot be embedded."""
        return await self._threads.call(self._coverage.embed_batch, signature)

    async def active_signature(self) -> str | None:
        """Return the embedder's signature."""
        return self._embedder.signature

    async def has_uncovered_reembed_work(self, signature: str) -> bool:
        """Tell whether anything lacks a vector, and is not marked as skipped, at ``signature``."""
        # Every extraction asks. The chunk that it admitted answers at once; a search would walk the store.
        return await self._threads.call(partial(self._coverage.has_uncovered, signature, hint=self._last_kept))

    def clear_reembed_skips(self, signature: str | None = None) -> int:
        """Forget what could not be embedded at ``signature``, or at any; return how many marks there were.

        The texts are tried again by the next embedding chain; ``Cortex.ensure_reembed_backfill`` starts one.
        """
        return self._coverage.clear_skips(signature)
