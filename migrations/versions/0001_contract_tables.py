"""The tables of the contract: made, or adopted from the program that made them.

Taking this revision back leaves tables and rows as they are: they are what any program that knows the
contract would have made, and the next upgrade adopts them again.
"""

from typing import Any

import sqlalchemy as sa

from tinycortex.schema.adoption import create_or_adopt, ensure_index

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
REAL: sa.Double[float] = sa.Double().with_variant(sa.REAL(), "sqlite")


def text(name: str, default: str | None = None, *, primary_key: bool = False) -> sa.Column[str]:
    """Return a TEXT column that is never null."""
    return sa.Column(
        name,
        sa.Text(),
        nullable=False,
        primary_key=primary_key,
        server_default=None if default is None else sa.text(f"'{default}'"),
    )


def whole(name: str, default: int | None = None, *, primary_key: bool = False) -> sa.Column[int]:
    """Return a whole-number column that is never null."""
    return sa.Column(
        name,
        WHOLE,
        nullable=False,
        primary_key=primary_key,
        autoincrement=False,
        server_default=None if default is None else sa.text(str(default)),
    )


def real(name: str, default: int | None = None) -> sa.Column[float]:
    """Return a floating-point column that is never null."""
    return sa.Column(name, REAL, nullable=False, server_default=None if default is None else sa.text(str(default)))


def optional(name: str, kind: sa.types.TypeEngine[Any]) -> sa.Column[object]:
    """Return a column that may be null."""
    return sa.Column(name, kind, nullable=True)


def upgrade() -> None:
    """Create or adopt every contract table and its indexes."""
    upgrade_jobs()
    upgrade_chunks()
    upgrade_trees()
    upgrade_embeddings()
    upgrade_scores()


def upgrade_jobs() -> None:
    """The queue itself. The dedupe index is partial: a settled row gives its key back."""
    create_or_adopt(
        "mem_tree_jobs",
        text("id", primary_key=True),
        text("kind"),
        text("payload_json"),
        optional("dedupe_key", sa.Text()),
        text("status", "ready"),
        whole("attempts", 0),
        whole("max_attempts", 5),
        whole("available_at_ms"),
        optional("locked_until_ms", WHOLE),
        optional("last_error", sa.Text()),
        whole("created_at_ms"),
        optional("started_at_ms", WHOLE),
        optional("completed_at_ms", WHOLE),
        optional("failure_reason", sa.Text()),
        optional("failure_class", sa.Text()),
    )
    ensure_index("idx_mem_tree_jobs_ready", "mem_tree_jobs", ["status", "available_at_ms"])
    ensure_index("idx_mem_tree_jobs_kind", "mem_tree_jobs", ["kind"])
    ensure_index(
        "idx_mem_tree_jobs_dedupe_active",
        "mem_tree_jobs",
        ["dedupe_key"],
        unique=True,
        where="dedupe_key IS NOT NULL AND status IN ('ready', 'running')",
    )


def upgrade_chunks() -> None:
    """The texts that jobs are about."""
    create_or_adopt(
        "mem_tree_chunks",
        text("id", primary_key=True),
        text("source_kind"),
        text("source_id"),
        optional("path_scope", sa.Text()),
        optional("source_ref", sa.Text()),
        text("owner"),
        whole("timestamp_ms"),
        whole("time_range_start_ms"),
        whole("time_range_end_ms"),
        text("tags_json", "[]"),
        text("content"),
        whole("token_count"),
        whole("seq_in_source"),
        whole("created_at_ms"),
        optional("lifecycle_status", sa.Text()),
        optional("parent_summary_id", sa.Text()),
    )
    ensure_index("idx_mem_tree_chunks_source", "mem_tree_chunks", ["source_kind", "source_id"])
    ensure_index("idx_mem_tree_chunks_timestamp", "mem_tree_chunks", ["timestamp_ms"])
    ensure_index("idx_mem_tree_chunks_owner", "mem_tree_chunks", ["owner"])
    ensure_index("idx_mem_tree_chunks_source_seq", "mem_tree_chunks", ["source_kind", "source_id", "seq_in_source"])
    create_or_adopt(
        "mem_tree_ingested_sources",
        text("source_kind", primary_key=True),
        text("source_id", primary_key=True),
        whole("ingested_at_ms"),
    )


def upgrade_trees() -> None:
    """Trees, the buffers that fill them, and their summaries."""
    create_or_adopt(
        "mem_tree_trees",
        text("id", primary_key=True),
        text("kind"),
        text("scope"),
        optional("root_id", sa.Text()),
        whole("max_level", 0),
        text("status", "active"),
        whole("created_at_ms"),
        optional("last_sealed_at_ms", WHOLE),
        optional("ask", sa.Text()),
    )
    ensure_index("idx_mem_tree_trees_kind_scope", "mem_tree_trees", ["kind", "scope"], unique=True)
    ensure_index("idx_mem_tree_trees_status", "mem_tree_trees", ["status"])
    create_or_adopt(
        "mem_tree_buffers",
        text("tree_id", primary_key=True),
        whole("level", primary_key=True),
        text("item_ids_json", "[]"),
        whole("token_sum", 0),
        optional("oldest_at_ms", WHOLE),
        whole("updated_at_ms"),
        sa.ForeignKeyConstraint(["tree_id"], ["mem_tree_trees.id"]),
    )
    ensure_index("idx_mem_tree_buffers_oldest", "mem_tree_buffers", ["oldest_at_ms"])
    create_or_adopt(
        "mem_tree_summaries",
        text("id", primary_key=True),
        text("tree_id"),
        text("tree_kind"),
        whole("level"),
        optional("parent_id", sa.Text()),
        text("child_ids_json", "[]"),
        text("content"),
        whole("token_count"),
        text("entities_json", "[]"),
        text("topics_json", "[]"),
        whole("time_range_start_ms"),
        whole("time_range_end_ms"),
        real("score", 0),
        whole("sealed_at_ms"),
        whole("deleted", 0),
        optional("doc_id", sa.Text()),
        optional("version_ms", WHOLE),
        sa.ForeignKeyConstraint(["tree_id"], ["mem_tree_trees.id"]),
    )
    ensure_index("idx_mem_tree_summaries_tree_level", "mem_tree_summaries", ["tree_id", "level"])
    ensure_index("idx_mem_tree_summaries_parent", "mem_tree_summaries", ["parent_id"])
    ensure_index("idx_mem_tree_summaries_sealed_at", "mem_tree_summaries", ["sealed_at_ms"])
    ensure_index("idx_mem_tree_summaries_deleted", "mem_tree_summaries", ["deleted"])


def upgrade_embeddings() -> None:
    """Vectors by signature, and what cannot be embedded at one."""
    for node, table in (("chunk", "mem_tree_chunks"), ("summary", "mem_tree_summaries")):
        create_or_adopt(
            f"mem_tree_{node}_embeddings",
            text(f"{node}_id", primary_key=True),
            text("model_signature", primary_key=True),
            sa.Column("vector", sa.LargeBinary(), nullable=False),
            whole("dim"),
            real("created_at"),
            sa.ForeignKeyConstraint([f"{node}_id"], [f"{table}.id"], ondelete="CASCADE"),
        )
        ensure_index(f"idx_mem_tree_{node}_embeddings_signature", f"mem_tree_{node}_embeddings", ["model_signature"])
        create_or_adopt(
            f"mem_tree_{node}_reembed_skipped",
            text(f"{node}_id", primary_key=True),
            text("model_signature", primary_key=True),
            text("reason"),
            whole("skipped_at_ms"),
        )


def upgrade_scores() -> None:
    """Scores of chunks, and the entities found in nodes."""
    create_or_adopt(
        "mem_tree_score",
        text("chunk_id", primary_key=True),
        real("total"),
        real("token_count_signal"),
        real("unique_words_signal"),
        real("metadata_weight"),
        real("source_weight"),
        real("interaction_weight"),
        real("entity_density"),
        whole("dropped", 0),
        optional("reason", sa.Text()),
        whole("computed_at_ms"),
    )
    create_or_adopt(
        "mem_tree_entity_index",
        text("entity_id", primary_key=True),
        text("node_id", primary_key=True),
        text("node_kind"),
        text("entity_kind"),
        text("surface"),
        real("score"),
        whole("timestamp_ms"),
        optional("tree_id", sa.Text()),
        whole("is_user", 0),
    )
    ensure_index("idx_mem_tree_entity_index_entity", "mem_tree_entity_index", ["entity_id"])
    ensure_index("idx_mem_tree_entity_index_node", "mem_tree_entity_index", ["node_id"])
    ensure_index("idx_mem_tree_entity_index_timestamp", "mem_tree_entity_index", ["timestamp_ms"])


def downgrade() -> None:
    """Leave the contract tables to the programs that share them."""
