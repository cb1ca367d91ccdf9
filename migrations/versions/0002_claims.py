"""What a claim needs beyond the contract: a token, an owner, the ages of deferring and healing, an index.

Every column is nullable or defaulted, so a program that knows only the contract can go on inserting.
"""

import sqlalchemy as sa
from alembic import op

from tinycortex.schema.adoption import add_columns, ensure_index

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the columns, and the index that one probe per kind makes a claim of."""
    add_columns(
        "mem_tree_jobs",
        sa.Column("claim_token", WHOLE, nullable=False, server_default=sa.text("0")),
        sa.Column("locked_by", sa.Text(), nullable=True),
        sa.Column("deferred_since_ms", WHOLE, nullable=True),
        sa.Column("heals", WHOLE, nullable=False, server_default=sa.text("0")),
    )
    ensure_index(
        "idx_mem_tree_jobs_claim",
        "mem_tree_jobs",
        ["kind", "available_at_ms", "id"],
        where="status = 'ready'",
    )


def downgrade() -> None:
    """Take columns and index back; every row stays."""
    op.drop_index("idx_mem_tree_jobs_claim", "mem_tree_jobs", if_exists=True)
    for column in ("heals", "deferred_since_ms", "locked_by", "claim_token"):
        op.drop_column("mem_tree_jobs", column)
