"""``mem_tree_chunks``: the texts that jobs are about (contract §1)."""

from sqlalchemy import Index, text
from sqlalchemy.orm import Mapped, mapped_column

from tinycortex.models.base import Base, PlainText, WholeNumber


class ChunkRow(Base):
    """One piece of one source; ``lifecycle_status`` says how far the pipeline has taken it."""

    __tablename__ = "mem_tree_chunks"

    id: Mapped[str] = mapped_column(PlainText, primary_key=True)
    source_kind: Mapped[str] = mapped_column(PlainText)
    source_id: Mapped[str] = mapped_column(PlainText)
    path_scope: Mapped[str | None] = mapped_column(PlainText)
    source_ref: Mapped[str | None] = mapped_column(PlainText)
    owner: Mapped[str] = mapped_column(PlainText)
    timestamp_ms: Mapped[int] = mapped_column(WholeNumber)
    time_range_start_ms: Mapped[int] = mapped_column(WholeNumber)
    time_range_end_ms: Mapped[int] = mapped_column(WholeNumber)
    tags_json: Mapped[str] = mapped_column(PlainText, server_default=text("'[]'"))
    content: Mapped[str] = mapped_column(PlainText)
    token_count: Mapped[int] = mapped_column(WholeNumber)
    seq_in_source: Mapped[int] = mapped_column(WholeNumber)
    created_at_ms: Mapped[int] = mapped_column(WholeNumber)
    lifecycle_status: Mapped[str | None] = mapped_column(PlainText)
    parent_summary_id: Mapped[str | None] = mapped_column(PlainText)

    __table_args__ = (
        Index("idx_mem_tree_chunks_source", "source_kind", "source_id"),
        Index("idx_mem_tree_chunks_timestamp", "timestamp_ms"),
        Index("idx_mem_tree_chunks_owner", "owner"),
        Index("idx_mem_tree_chunks_source_seq", "source_kind", "source_id", "seq_in_source"),
    )
