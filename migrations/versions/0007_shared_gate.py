"""What processes need to share one provider: which running rows are LLM-bound, and until when it takes none.

The column is null until a row is claimed, so a program that knows only the contract sees no difference.
"""

import sqlalchemy as sa
from alembic import op

from tinycortex.schema.adoption import add_columns, create_or_adopt

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the column and the table."""
    add_columns("mem_tree_jobs", sa.Column("llm_bound", WHOLE, nullable=True))
    create_or_adopt(
        "tinycortex_gate",
        sa.Column("name", TEXT, primary_key=True, nullable=False),
        sa.Column("closed_until_ms", WHOLE, nullable=False),
    )


def downgrade() -> None:
    """Take both back; every job stays."""
    op.drop_table("tinycortex_gate", if_exists=True)
    op.drop_column("mem_tree_jobs", "llm_bound")
