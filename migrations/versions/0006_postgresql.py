"""What PostgreSQL has to be told beside the tables: compare text by its bytes, clean up often, plan without guesses.

Ids break ties between equal times, and a collation such as en_US puts lower and upper case next to each other
and skips punctuation. And a claim reads past what has left the index of ready rows since the last vacuum, which
would come when a fifth of all rows, done ones included, had changed. What the server has counted of a queue is
soon wrong: where it has seen jobs that were all done, it expects to find no ready one, reads all that there are
by then and sorts them, for each claim. Where it has counted nothing it goes by the index that fits.

Only indexes are made anew; no row is touched. SQLite compares bytes anyway, and leaves nothing behind.
"""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

TEXTS = {
    "mem_tree_jobs": "id kind payload_json dedupe_key status last_error failure_reason failure_class locked_by"
    " rerun_payload_json trace_context",
    "mem_tree_chunks": "id source_kind source_id path_scope source_ref owner tags_json content lifecycle_status"
    " parent_summary_id",
    "mem_tree_trees": "id kind scope root_id status ask",
    "mem_tree_buffers": "tree_id item_ids_json",
    "mem_tree_summaries": "id tree_id tree_kind parent_id child_ids_json content entities_json topics_json doc_id",
    "mem_tree_chunk_embeddings": "chunk_id model_signature",
    "mem_tree_summary_embeddings": "summary_id model_signature",
    "mem_tree_chunk_reembed_skipped": "chunk_id model_signature reason",
    "mem_tree_summary_reembed_skipped": "summary_id model_signature reason",
    "mem_tree_score": "chunk_id reason",
    "mem_tree_entity_index": "entity_id node_id node_kind entity_kind surface tree_id",
    "mem_tree_ingested_sources": "source_kind source_id",
}

# An index is left uncleaned as long as few pages of its table are concerned, which few rows among many are.
VACUUM = {
    "autovacuum_vacuum_threshold": "5000",
    "autovacuum_vacuum_scale_factor": "0.01",
    "autovacuum_vacuum_cost_delay": "0",
    "vacuum_index_cleanup": "on",
}

UNCOUNTED = ("kind", "status", "available_at_ms")


def upgrade() -> None:
    """Give every text column the collation of bytes, and have the jobs cleaned up early and whole, and not counted."""
    if op.get_context().dialect.name == "postgresql":
        collate("C")
        op.execute(
            f"ALTER TABLE mem_tree_jobs SET ({', '.join(f'{name} = {value}' for name, value in VACUUM.items())})"
        )
        count_values(0)


def downgrade() -> None:
    """Give every text column the collation of the database back, and the table the server's own settings."""
    if op.get_context().dialect.name == "postgresql":
        count_values(-1)
        op.execute(f"ALTER TABLE mem_tree_jobs RESET ({', '.join(VACUUM)})")
        collate("default")


def collate(collation: str) -> None:
    """Set the collation of every text column, each table's in one go, so that its indexes are built once."""
    for table, columns in TEXTS.items():
        changes = ", ".join(f'ALTER COLUMN {column} TYPE TEXT COLLATE "{collation}"' for column in columns.split())
        op.execute(f"ALTER TABLE {table} {changes}")


def count_values(target: int) -> None:
    """Set how closely ANALYZE looks at what a claim searches by; -1 is the server's own choice."""
    changes = ", ".join(f"ALTER COLUMN {column} SET STATISTICS {target}" for column in UNCOUNTED)
    op.execute(f"ALTER TABLE mem_tree_jobs {changes}")
