"""Author: turns nodes into a summary, and writes it with everything that commits beside it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from tinycortex.config import MemorySettings
from tinycortex.domain.clock import Clock
from tinycortex.domain.text import mend_text
from tinycortex.errors import JobFailure
from tinycortex.memory.embedding import Embedder, embed_each, pack_vector
from tinycortex.memory.entities import Entity, list_topics, merge_entity_ids
from tinycortex.memory.nodes import Node
from tinycortex.memory.summarise import Summariser
from tinycortex.memory.tokens import count_tokens
from tinycortex.repositories.chunks import ChunkRepository
from tinycortex.repositories.embeddings import EmbeddingRepository, StoredVector
from tinycortex.repositories.scores import IndexedEntity, ScoreRepository
from tinycortex.repositories.trees import Summary, TreeRepository


@dataclass(frozen=True, slots=True)
class TreeRef:
    """The tree that a summary is for; the tree itself may have yet to be made."""

    id: str
    kind: str


@dataclass(frozen=True, slots=True)
class Draft:
    """A summary that is ready to be written."""

    summary: Summary
    children: tuple[Node, ...]
    vector: StoredVector


def summary_id_of(tree_id: str, level: int, child_ids: Sequence[str]) -> str:
    """Return the id of a summary: the same children at the same level of a tree give the same id."""
    digest = hashlib.sha256("\0".join([tree_id, str(level), *child_ids]).encode()).hexdigest()
    return f"sum:{digest[:32]}"


class Author:
    """Drafts summaries outside of any transaction, since that may be slow, and writes them inside one."""

    def __init__(self, settings: MemorySettings, clock: Clock, summariser: Summariser, embedder: Embedder) -> None:
        self._budget = settings.output_token_budget
        self._clock = clock
        self._summariser = summariser
        self._embedder = embedder

    def draft(
        self,
        tree: TreeRef,
        level: int,
        children: Sequence[Node],
        *,
        doc_id: str | None = None,
        version_ms: int | None = None,
    ) -> Draft:
        """Summarise ``children`` into a summary of ``level``, and embed it.

        Raises:
            JobFailure: the summariser returned nothing.
            Exception: what the summariser or the embedder raised.
        """
        content = mend_text(self._summariser.summarise([child.content for child in children], self._budget))
        if not content.strip():
            raise JobFailure.transient("empty_summary", f"the summariser returned nothing for {len(children)} texts")
        entity_ids = merge_entity_ids(child.entity_ids for child in children)
        child_ids = tuple(child.id for child in children)
        summary = Summary(
            id=summary_id_of(tree.id, level, child_ids),
            tree_id=tree.id,
            tree_kind=tree.kind,
            level=level,
            child_ids=child_ids,
            content=content,
            token_count=count_tokens(content),
            entity_ids=tuple(entity_ids),
            topics=tuple(list_topics(entity_ids)),
            time_range_start_ms=min(child.start_ms for child in children),
            time_range_end_ms=max(child.end_ms for child in children),
            score=round(sum(child.score for child in children) / len(children), 6),
            sealed_at_ms=self._clock.now_ms(),
            doc_id=doc_id,
            version_ms=version_ms,
        )
        return Draft(summary, tuple(children), self._embed(summary))

    def write(self, session: Session, draft: Draft, *, owns_leaves: bool) -> None:
        """Write a summary, its entities, its vector, and the links from its children.

        Args:
            session: the transaction, which holds the tree's lock.
            draft: what :meth:`draft` returned.
            owns_leaves: whether the tree is its chunks' own; a topic's tree only borrows them.
        """
        summary, trees = draft.summary, TreeRepository(session)
        trees.insert_summary(summary)
        ScoreRepository(session).index_entities(_index(summary))
        EmbeddingRepository(session).save([draft.vector], self._embedder.signature, summary.sealed_at_ms)
        if owns_leaves:
            leaves = [child.id for child in draft.children if child.is_leaf]
            ChunkRepository(session).mark_sealed(leaves, summary.id)
        # At level 0 a summary is a guest from another tree, and keeps its parent there.
        if summary.level > 1:
            trees.set_parent([child.id for child in draft.children if not child.is_leaf], summary.id)

    def _embed(self, summary: Summary) -> StoredVector:
        embedded = embed_each(self._embedder, [summary.content])[0]
        vector = None if embedded.vector is None else pack_vector(embedded.vector)
        return StoredVector(node_id=summary.id, is_summary=True, vector=vector, reason=embedded.reason)


def _index(summary: Summary) -> list[IndexedEntity]:
    return [
        IndexedEntity(
            entity_id=entity.id,
            node_id=summary.id,
            node_kind="summary",
            entity_kind=entity.kind,
            surface=entity.surface,
            score=entity.score,
            timestamp_ms=summary.time_range_end_ms,
            tree_id=summary.tree_id,
        )
        for entity in map(Entity.of_id, summary.entity_ids)
    ]
