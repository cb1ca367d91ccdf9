"""EmbeddingRepository: the vectors of chunks and summaries, and the marks of what cannot be embedded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, delete, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from tinycortex.models import (
    ChunkEmbeddingRow,
    ChunkRow,
    ChunkSkipRow,
    SummaryEmbeddingRow,
    SummaryRow,
    SummarySkipRow,
)
from tinycortex.repositories.chunks import Lifecycle
from tinycortex.repositories.row_sql import insert_missing, split_ids

_WORTH_EMBEDDING = (Lifecycle.ADMITTED.value, Lifecycle.BUFFERED.value, Lifecycle.SEALED.value)


@dataclass(frozen=True, slots=True)
class Uncovered:
    """A chunk or a summary without a vector, and the text to embed."""

    node_id: str
    content: str
    is_summary: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVector:
    """A vector as the table holds it, or the reason why a node has none.

    Attributes:
        node_id: the chunk or the summary.
        is_summary: which of the two.
        vector: little-endian 32-bit floats; None for a node that cannot be embedded.
        reason: why not; None with a vector.
    """

    node_id: str
    is_summary: bool
    vector: bytes | None
    reason: str | None = None


class EmbeddingRepository:
    """Vectors and skip marks. Never commits."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def list_uncovered(self, signature: str, limit: int) -> list[Uncovered]:
        """List, chunks first and by id, what lacks both a vector and a skip mark at ``signature``."""
        chunks = self._session.execute(_uncovered_chunks(signature, ChunkRow.content).limit(limit)).all()
        found = [Uncovered(row.id, row.content, is_summary=False) for row in chunks]
        if len(found) < limit:
            summaries = _uncovered_summaries(signature, SummaryRow.content).limit(limit - len(found))
            found += [Uncovered(row.id, row.content, is_summary=True) for row in self._session.execute(summaries)]
        return found

    def has_uncovered(self, signature: str, *, hint: str | None = None) -> bool:
        """Tell whether anything lacks a vector and a skip mark at ``signature``.

        Args:
            signature: the signature in question.
            hint: id of a chunk that probably does; when so, no other row is looked at.
        """
        chunks, summaries = _uncovered_chunks(signature), _uncovered_summaries(signature)
        searches = [chunks, summaries] if hint is None else [chunks.where(ChunkRow.id == hint), chunks, summaries]
        return any(self._session.execute(search.limit(1)).first() is not None for search in searches)

    def save(self, vectors: Iterable[StoredVector], signature: str, now_ms: int) -> int:
        """Write vectors and skip marks; return how many. A node that is gone, or covered by now, is left out."""
        vectors = list(vectors)
        present = self._list_present([vector.node_id for vector in vectors])
        written = [vector for vector in vectors if vector.node_id in present]
        for is_summary, column, embedding, skip in (
            (False, "chunk_id", ChunkEmbeddingRow, ChunkSkipRow),
            (True, "summary_id", SummaryEmbeddingRow, SummarySkipRow),
        ):
            mine = [vector for vector in written if vector.is_summary is is_summary]
            insert_missing(
                self._session,
                embedding,
                [
                    {
                        column: item.node_id,
                        "model_signature": signature,
                        "vector": item.vector,
                        "dim": len(item.vector) // 4,
                        "created_at": now_ms / 1000,
                    }
                    for item in mine
                    if item.vector is not None
                ],
            )
            insert_missing(
                self._session,
                skip,
                [
                    {
                        column: item.node_id,
                        "model_signature": signature,
                        "reason": item.reason,
                        "skipped_at_ms": now_ms,
                    }
                    for item in mine
                    if item.vector is None
                ],
            )
        return len(written)

    def clear_skips(self, signature: str | None = None) -> int:
        """Delete the skip marks of one signature, or of all; return how many."""
        count = 0
        for row in (ChunkSkipRow, SummarySkipRow):
            statement = delete(row) if signature is None else delete(row).where(row.model_signature == signature)
            result: Any = self._session.execute(statement)
            count += int(result.rowcount)
        return count

    def _list_present(self, ids: Sequence[str]) -> set[str]:
        return {
            node_id
            for column in (ChunkRow.id, SummaryRow.id)
            for some in split_ids(ids)
            for node_id in self._session.scalars(select(column).where(column.in_(some)))
        }


def _uncovered_chunks(signature: str, *columns: InstrumentedAttribute[str]) -> Select[*tuple[Any, ...]]:
    vector = select(ChunkEmbeddingRow.chunk_id).where(
        ChunkEmbeddingRow.chunk_id == ChunkRow.id, ChunkEmbeddingRow.model_signature == signature
    )
    skip = select(ChunkSkipRow.chunk_id).where(
        ChunkSkipRow.chunk_id == ChunkRow.id, ChunkSkipRow.model_signature == signature
    )
    return (
        select(ChunkRow.id, *columns)
        .where(ChunkRow.lifecycle_status.in_(_WORTH_EMBEDDING), ~vector.exists(), ~skip.exists())
        .order_by(ChunkRow.id)
    )


def _uncovered_summaries(signature: str, *columns: InstrumentedAttribute[str]) -> Select[*tuple[Any, ...]]:
    vector = select(SummaryEmbeddingRow.summary_id).where(
        SummaryEmbeddingRow.summary_id == SummaryRow.id, SummaryEmbeddingRow.model_signature == signature
    )
    skip = select(SummarySkipRow.summary_id).where(
        SummarySkipRow.summary_id == SummaryRow.id, SummarySkipRow.model_signature == signature
    )
    return (
        select(SummaryRow.id, *columns)
        .where(SummaryRow.deleted == 0, ~vector.exists(), ~skip.exists())
        .order_by(SummaryRow.id)
    )
