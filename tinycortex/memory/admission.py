"""extract_chunk: score a chunk, store score and entities, admit it or drop it."""

from tinycortex.config import MemorySettings
from tinycortex.db import Database
from tinycortex.domain.clock import Clock
from tinycortex.domain.decisions import ExtractDecision
from tinycortex.memory.scoring import Score, score_text
from tinycortex.repositories.chunks import Chunk, ChunkRepository, Lifecycle
from tinycortex.repositories.scores import IndexedEntity, ScoreRepository

DOCUMENT = "document"
"""The source kind of chunks that their document's own seal places."""


def score_chunk(chunk: Chunk, threshold: float = 0.0) -> Score:
    """Score one chunk against an admission threshold."""
    return score_text(
        chunk.content,
        source_kind=chunk.source_kind,
        token_count=chunk.token_count,
        tags=chunk.tags,
        threshold=threshold,
    )


def is_kept(chunk: Chunk, score: Score) -> bool:
    """Tell whether a chunk is admitted: a decision once taken stands, whatever the threshold is by now."""
    if chunk.lifecycle_status in {None, Lifecycle.PENDING}:
        return score.kept
    return chunk.lifecycle_status != Lifecycle.DROPPED


class Admission:
    """Decides which chunks go on."""

    def __init__(self, database: Database, settings: MemorySettings, clock: Clock) -> None:
        self._database = database
        self._threshold = settings.admission_threshold
        self._clock = clock

    def extract(self, chunk_id: str) -> ExtractDecision | None:
        """Score one chunk and decide; None when there is no such chunk. Asked again, it says the same."""
        with self._database.reading() as session:
            chunk = ChunkRepository(session).find(chunk_id)
        if chunk is None:
            return None
        score = score_chunk(chunk, self._threshold)
        with self._database.transaction() as session:
            chunks, scores = ChunkRepository(session), ScoreRepository(session)
            chunk = chunks.find(chunk_id)
            if chunk is None:
                return None
            kept = is_kept(chunk, score)
            chunks.decide(chunk_id, Lifecycle.ADMITTED if kept else Lifecycle.DROPPED)
            reason = None if kept else score.reason or "dropped earlier"
            scores.save(chunk_id, _signals(score), reason, self._clock.now_ms())
            if kept:
                scores.index_entities(_index(chunk, score))
        return ExtractDecision(kept=kept, tree_scope=chunk.tree_scope, document_subtree=chunk.source_kind == DOCUMENT)


def _signals(score: Score) -> dict[str, float]:
    return {
        "total": score.total,
        "token_count_signal": score.token_count_signal,
        "unique_words_signal": score.unique_words_signal,
        "metadata_weight": score.metadata_weight,
        "source_weight": score.source_weight,
        "interaction_weight": score.interaction_weight,
        "entity_density": score.entity_density,
    }


def _index(chunk: Chunk, score: Score) -> list[IndexedEntity]:
    return [
        IndexedEntity(
            entity_id=entity.id,
            node_id=chunk.id,
            node_kind="leaf",
            entity_kind=entity.kind,
            surface=entity.surface,
            score=entity.score,
            timestamp_ms=chunk.timestamp_ms,
        )
        for entity in score.entities
    ]
