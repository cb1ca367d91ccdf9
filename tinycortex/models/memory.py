"""The tables of the memory tree, which the built-in delegates use (contract §1)."""

from sqlalchemy import ForeignKey, Index, LargeBinary, text
from sqlalchemy.orm import Mapped, mapped_column

from tinycortex.models.base import Base, PlainText, RealNumber, WholeNumber


class TreeRow(Base):
    """One tree of summaries over one scope."""

    __tablename__ = "mem_tree_trees"

    id: Mapped[str] = mapped_column(PlainText, primary_key=True)
    kind: Mapped[str] = mapped_column(PlainText)
    scope: Mapped[str] = mapped_column(PlainText)
    root_id: Mapped[str | None] = mapped_column(PlainText)
    max_level: Mapped[int] = mapped_column(WholeNumber, server_default=text("0"))
    status: Mapped[str] = mapped_column(PlainText, server_default=text("'active'"))
    created_at_ms: Mapped[int] = mapped_column(WholeNumber)
    last_sealed_at_ms: Mapped[int | None] = mapped_column(WholeNumber)
    ask: Mapped[str | None] = mapped_column(PlainText)

    __table_args__ = (
        Index("idx_mem_tree_trees_kind_scope", "kind", "scope", unique=True),
        Index("idx_mem_tree_trees_status", "status"),
    )


class BufferRow(Base):
    """What waits at one level of one tree to be sealed."""

    __tablename__ = "mem_tree_buffers"

    tree_id: Mapped[str] = mapped_column(PlainText, ForeignKey("mem_tree_trees.id"), primary_key=True)
    level: Mapped[int] = mapped_column(WholeNumber, primary_key=True, autoincrement=False)
    item_ids_json: Mapped[str] = mapped_column(PlainText, server_default=text("'[]'"))
    token_sum: Mapped[int] = mapped_column(WholeNumber, server_default=text("0"))
    oldest_at_ms: Mapped[int | None] = mapped_column(WholeNumber)
    updated_at_ms: Mapped[int] = mapped_column(WholeNumber)

    __table_args__ = (Index("idx_mem_tree_buffers_oldest", "oldest_at_ms"),)


class SummaryRow(Base):
    """One sealed, immutable node of a tree."""

    __tablename__ = "mem_tree_summaries"

    id: Mapped[str] = mapped_column(PlainText, primary_key=True)
    tree_id: Mapped[str] = mapped_column(PlainText, ForeignKey("mem_tree_trees.id"))
    tree_kind: Mapped[str] = mapped_column(PlainText)
    level: Mapped[int] = mapped_column(WholeNumber)
    parent_id: Mapped[str | None] = mapped_column(PlainText)
    child_ids_json: Mapped[str] = mapped_column(PlainText, server_default=text("'[]'"))
    content: Mapped[str] = mapped_column(PlainText)
    token_count: Mapped[int] = mapped_column(WholeNumber)
    entities_json: Mapped[str] = mapped_column(PlainText, server_default=text("'[]'"))
    topics_json: Mapped[str] = mapped_column(PlainText, server_default=text("'[]'"))
    time_range_start_ms: Mapped[int] = mapped_column(WholeNumber)
    time_range_end_ms: Mapped[int] = mapped_column(WholeNumber)
    score: Mapped[float] = mapped_column(RealNumber, server_default=text("0"))
    sealed_at_ms: Mapped[int] = mapped_column(WholeNumber)
    deleted: Mapped[int] = mapped_column(WholeNumber, server_default=text("0"))
    doc_id: Mapped[str | None] = mapped_column(PlainText)
    version_ms: Mapped[int | None] = mapped_column(WholeNumber)

    __table_args__ = (
        Index("idx_mem_tree_summaries_tree_level", "tree_id", "level"),
        Index("idx_mem_tree_summaries_parent", "parent_id"),
        Index("idx_mem_tree_summaries_sealed_at", "sealed_at_ms"),
        Index("idx_mem_tree_summaries_deleted", "deleted"),
    )


class ChunkEmbeddingRow(Base):
    """A chunk's vector at one signature: ``dim`` little-endian 32-bit floats."""

    __tablename__ = "mem_tree_chunk_embeddings"

    chunk_id: Mapped[str] = mapped_column(
        PlainText, ForeignKey("mem_tree_chunks.id", ondelete="CASCADE"), primary_key=True
    )
    model_signature: Mapped[str] = mapped_column(PlainText, primary_key=True)
    vector: Mapped[bytes] = mapped_column(LargeBinary)
    dim: Mapped[int] = mapped_column(WholeNumber)
    created_at: Mapped[float] = mapped_column(RealNumber)

    __table_args__ = (Index("idx_mem_tree_chunk_embeddings_signature", "model_signature"),)


class SummaryEmbeddingRow(Base):
    """A summary's vector at one signature: ``dim`` little-endian 32-bit floats."""

    __tablename__ = "mem_tree_summary_embeddings"

    summary_id: Mapped[str] = mapped_column(
        PlainText, ForeignKey("mem_tree_summaries.id", ondelete="CASCADE"), primary_key=True
    )
    model_signature: Mapped[str] = mapped_column(PlainText, primary_key=True)
    vector: Mapped[bytes] = mapped_column(LargeBinary)
    dim: Mapped[int] = mapped_column(WholeNumber)
    created_at: Mapped[float] = mapped_column(RealNumber)

    __table_args__ = (Index("idx_mem_tree_summary_embeddings_signature", "model_signature"),)


class ChunkSkipRow(Base):
    """A chunk that cannot be embedded at one signature, and why."""

    __tablename__ = "mem_tree_chunk_reembed_skipped"

    chunk_id: Mapped[str] = mapped_column(PlainText, primary_key=True)
    model_signature: Mapped[str] = mapped_column(PlainText, primary_key=True)
    reason: Mapped[str] = mapped_column(PlainText)
    skipped_at_ms: Mapped[int] = mapped_column(WholeNumber)


class SummarySkipRow(Base):
    """A summary that cannot be embedded at one signature, and why."""

    __tablename__ = "mem_tree_summary_reembed_skipped"

    summary_id: Mapped[str] = mapped_column(PlainText, primary_key=True)
    model_signature: Mapped[str] = mapped_column(PlainText, primary_key=True)
    reason: Mapped[str] = mapped_column(PlainText)
    skipped_at_ms: Mapped[int] = mapped_column(WholeNumber)


class ScoreRow(Base):
    """A chunk's signals and the decision that they led to."""

    __tablename__ = "mem_tree_score"

    chunk_id: Mapped[str] = mapped_column(PlainText, primary_key=True)
    total: Mapped[float] = mapped_column(RealNumber)
    token_count_signal: Mapped[float] = mapped_column(RealNumber)
    unique_words_signal: Mapped[float] = mapped_column(RealNumber)
    metadata_weight: Mapped[float] = mapped_column(RealNumber)
    source_weight: Mapped[float] = mapped_column(RealNumber)
    interaction_weight: Mapped[float] = mapped_column(RealNumber)
    entity_density: Mapped[float] = mapped_column(RealNumber)
    dropped: Mapped[int] = mapped_column(WholeNumber, server_default=text("0"))
    reason: Mapped[str | None] = mapped_column(PlainText)
    computed_at_ms: Mapped[int] = mapped_column(WholeNumber)


class EntityRow(Base):
    """One entity as it stands in one node."""

    __tablename__ = "mem_tree_entity_index"

    entity_id: Mapped[str] = mapped_column(PlainText, primary_key=True)
    node_id: Mapped[str] = mapped_column(PlainText, primary_key=True)
    node_kind: Mapped[str] = mapped_column(PlainText)
    entity_kind: Mapped[str] = mapped_column(PlainText)
    surface: Mapped[str] = mapped_column(PlainText)
    score: Mapped[float] = mapped_column(RealNumber)
    timestamp_ms: Mapped[int] = mapped_column(WholeNumber)
    tree_id: Mapped[str | None] = mapped_column(PlainText)
    is_user: Mapped[int] = mapped_column(WholeNumber, server_default=text("0"))

    __table_args__ = (
        Index("idx_mem_tree_entity_index_entity", "entity_id"),
        Index("idx_mem_tree_entity_index_node", "node_id"),
        Index("idx_mem_tree_entity_index_timestamp", "timestamp_ms"),
    )


class IngestedSourceRow(Base):
    """A source that has been ingested, and when last."""

    __tablename__ = "mem_tree_ingested_sources"

    source_kind: Mapped[str] = mapped_column(PlainText, primary_key=True)
    source_id: Mapped[str] = mapped_column(PlainText, primary_key=True)
    ingested_at_ms: Mapped[int] = mapped_column(WholeNumber)
