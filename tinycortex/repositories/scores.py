"""ScoreRepository: the rows of ``mem_tree_score`` and ``mem_tree_entity_index``."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from tinycortex.models import EntityRow, ScoreRow
from tinycortex.repositories.row_sql import insert_missing, split_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedEntity:
    """One row of ``mem_tree_entity_index``: an entity as it stands in a node (``leaf`` or ``summary``)."""

    entity_id: str
    node_id: str
    node_kind: str
    entity_kind: str
    surface: str
    score: float
    timestamp_ms: int
    tree_id: str | None = None


class ScoreRepository:
    """Scores of chunks, and the index of entities by node. Never commits."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def save(self, chunk_id: str, signals: Mapping[str, float], reason: str | None, now_ms: int) -> None:
        """Write a chunk's signals (by the names of their columns); a ``reason`` means that it was dropped."""
        self._session.merge(
            ScoreRow(
                chunk_id=chunk_id,
                **signals,
                dropped=int(reason is not None),
                reason=reason,
                computed_at_ms=now_ms,
            )
        )
        self._session.flush()

    def find_totals(self, chunk_ids: Sequence[str]) -> dict[str, float]:
        """Return the totals of those of ``chunk_ids`` that have been scored."""
        return {
            row.chunk_id: row.total
            for some in split_ids(chunk_ids)
            for row in self._session.execute(
                select(ScoreRow.chunk_id, ScoreRow.total).where(ScoreRow.chunk_id.in_(some))
            )
        }

    def index_entities(self, entities: Sequence[IndexedEntity]) -> None:
        """Write rows of the entity index. A node's text never changes, so what is there is right."""
        insert_missing(self._session, EntityRow, [asdict(entity) for entity in entities])

    def place_node(self, node_id: str, tree_id: str) -> None:
        """Record in the entity index which tree a node is in."""
        self._session.execute(update(EntityRow).where(EntityRow.node_id == node_id).values(tree_id=tree_id))
