"""reembed_batch: see to it that everything kept has a vector at the active signature, or a reason why not."""

from tinycortex.config import MemorySettings
from tinycortex.db import Database
from tinycortex.domain.clock import Clock
from tinycortex.domain.decisions import ReembedProgress
from tinycortex.memory.embedding import Embedded, Embedder, embed_each, pack_vector
from tinycortex.repositories.embeddings import EmbeddingRepository, StoredVector, Uncovered


class Coverage:
    """Embeds what lacks a vector, a batch at a time."""

    def __init__(self, database: Database, settings: MemorySettings, clock: Clock, embedder: Embedder) -> None:
        self._database = database
        self._batch = settings.embed_batch
        self._clock = clock
        self._embedder = embedder

    def embed_batch(self, signature: str) -> ReembedProgress:
        """Embed up to ``embed_batch`` texts, chunks first; a text without a vector is marked as skipped, once.

        At any signature but the embedder's own there is nothing to do.

        Raises:
            Exception: what the embedder raised, unless it blames a text; then nothing was written.
        """
        if signature != self._embedder.signature:
            return ReembedProgress(written=0, more_remaining=False)
        with self._database.reading() as session:
            batch = EmbeddingRepository(session).list_uncovered(signature, self._batch)
        if not batch:
            return ReembedProgress(written=0, more_remaining=False)
        embedded = embed_each(self._embedder, [item.content for item in batch])
        with self._database.transaction() as session:
            written = EmbeddingRepository(session).save(
                [_store(item, result) for item, result in zip(batch, embedded, strict=True)],
                signature,
                self._clock.now_ms(),
            )
        return ReembedProgress(written=written, more_remaining=self.has_uncovered(signature))

    def has_uncovered(self, signature: str, *, hint: str | None = None) -> bool:
        """Tell whether anything lacks a vector and a skip mark; the chunk ``hint`` is looked at first."""
        if signature != self._embedder.signature:
            return False
        with self._database.reading() as session:
            return EmbeddingRepository(session).has_uncovered(signature, hint=hint)

    def clear_skips(self, signature: str | None = None) -> int:
        """Forget what could not be embedded at ``signature``, or at any, so that it is tried again."""
        with self._database.transaction() as session:
            return EmbeddingRepository(session).clear_skips(signature)


def _store(item: Uncovered, result: Embedded) -> StoredVector:
    return StoredVector(
        node_id=item.node_id,
        is_summary=item.is_summary,
        vector=None if result.vector is None else pack_vector(result.vector),
        reason=result.reason,
    )
