"""ChunkRepository: the rows of ``mem_tree_chunks`` and ``mem_tree_ingested_sources``."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from sqlalchemy import Select, select, update
from sqlalchemy.orm import Session

from tinycortex.models import ChunkRow, IngestedSourceRow
from tinycortex.repositories.row_sql import insert_missing, split_ids


class Lifecycle(StrEnum):
    """The values of ``mem_tree_chunks.lifecycle_status`` (contract §1)."""

    PENDING = "pending_extraction"
    ADMITTED = "admitted"
    BUFFERED = "buffered"
    SEALED = "sealed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One row of ``mem_tree_chunks`` as it stood when it was read. Instants are ms since the epoch, UTC.

    Another program's row may have no lifecycle; it counts as pending.
    """

    id: str
    source_kind: str
    source_id: str
    path_scope: str | None
    source_ref: str | None
    owner: str
    timestamp_ms: int
    time_range_start_ms: int
    time_range_end_ms: int
    tags_json: str
    content: str
    token_count: int
    seq_in_source: int
    created_at_ms: int
    lifecycle_status: str | None
    parent_summary_id: str | None = None

    @property
    def tree_scope(self) -> str:
        """Return the scope of the source tree that it belongs to."""
        return self.path_scope or self.source_id

    @property
    def tags(self) -> list[str]:
        """Return its tags; what another program wrote there in a form of its own counts as none."""
        try:
            tags = json.loads(self.tags_json)
        except ValueError:
            return []
        return [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []

    @property
    def is_sealed(self) -> bool:
        """Tell whether a summary of its source tree covers it."""
        return self.lifecycle_status == Lifecycle.SEALED or self.parent_summary_id is not None


class ChunkRepository:
    """Chunks and the record of ingested sources. Never commits."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def insert_new(self, chunks: Sequence[Chunk]) -> list[str]:
        """Insert those of ``chunks`` that are not there, and return their ids in the order given."""
        there = self.find_existing([chunk.id for chunk in chunks])
        missing = {chunk.id: chunk for chunk in chunks if chunk.id not in there}
        insert_missing(self._session, ChunkRow, [asdict(chunk) for chunk in missing.values()])
        return list(missing)

    def find_existing(self, ids: Sequence[str]) -> set[str]:
        """Return those of ``ids`` that are chunks."""
        return {
            chunk_id
            for some in split_ids(ids)
            for chunk_id in self._session.scalars(select(ChunkRow.id).where(ChunkRow.id.in_(some)))
        }

    def find(self, chunk_id: str) -> Chunk | None:
        """Return one chunk, or None."""
        return next(iter(self.list_by_ids([chunk_id])), None)

    def list_by_ids(self, ids: Iterable[str]) -> list[Chunk]:
        """List the chunks with ``ids``, in that order and each once; missing ones are left out."""
        wanted = list(dict.fromkeys(ids))
        found = {
            row.id: Chunk(**row._mapping)  # noqa: SLF001 - public in SQLAlchemy, for all its underscore
            for some in split_ids(wanted)
            for row in self._session.execute(_SELECT.where(ChunkRow.id.in_(some)))
        }
        return [found[chunk_id] for chunk_id in wanted if chunk_id in found]

    def decide(self, chunk_id: str, lifecycle: Lifecycle) -> None:
        """Admit or drop a pending chunk; one that is further on stays where it is."""
        pending = ChunkRow.lifecycle_status.is_(None) | (ChunkRow.lifecycle_status == Lifecycle.PENDING.value)
        self._session.execute(
            update(ChunkRow).where(ChunkRow.id == chunk_id, pending).values(lifecycle_status=lifecycle.value)
        )

    def mark_buffered(self, chunk_id: str) -> None:
        """Record that the chunk waits in its source tree's buffer."""
        self._session.execute(
            update(ChunkRow).where(ChunkRow.id == chunk_id).values(lifecycle_status=Lifecycle.BUFFERED.value)
        )

    def mark_sealed(self, ids: Sequence[str], summary_id: str) -> None:
        """Record that the chunks are covered by a summary of their source tree."""
        for some in split_ids(ids):
            self._session.execute(
                update(ChunkRow)
                .where(ChunkRow.id.in_(some))
                .values(lifecycle_status=Lifecycle.SEALED.value, parent_summary_id=summary_id)
            )

    def record_source(self, source_kind: str, source_id: str, now_ms: int) -> None:
        """Record when a source was last ingested."""
        key = {"source_kind": source_kind, "source_id": source_id}
        insert_missing(self._session, IngestedSourceRow, [{**key, "ingested_at_ms": now_ms}])
        self._session.execute(
            update(IngestedSourceRow)
            .where(IngestedSourceRow.source_kind == source_kind, IngestedSourceRow.source_id == source_id)
            .values(ingested_at_ms=now_ms)
        )


_SELECT: Select[*tuple[Any, ...]] = select(*(getattr(ChunkRow, field.name) for field in fields(Chunk)))
