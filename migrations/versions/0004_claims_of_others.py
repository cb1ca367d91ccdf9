"""What other programs do to our rows: a claim of theirs under our word, a request that they left behind.

A program that knows only the contract's columns claims a row and leaves ``locked_by`` as it was; the instant
of our own claim tells the two apart. And it settles a row without seeing the request that is kept with it.
"""

import sqlalchemy as sa
from alembic import op

from tinycortex.schema.adoption import add_columns, ensure_index

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; forget the requests of settled rows, which have become jobs of their own; index the rest."""
    add_columns(
        "mem_tree_jobs",
        sa.Column("claimed_at_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
    )
    op.execute("UPDATE mem_tree_jobs SET rerun_payload_json = NULL WHERE status NOT IN ('ready', 'running')")
    ensure_index("idx_mem_tree_jobs_asked", "mem_tree_jobs", ["status"], where="rerun_payload_json IS NOT NULL")


def downgrade() -> None:
    """Take index and column back; every row stays."""
    op.drop_index("idx_mem_tree_jobs_asked", "mem_tree_jobs", if_exists=True)
    op.drop_column("mem_tree_jobs", "claimed_at_ms")
