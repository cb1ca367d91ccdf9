"""Requests to a row that is running: run once more with a newer payload, or stop.

Both columns are null unless somebody asks, so a program that knows only the contract sees no difference.
"""

import sqlalchemy as sa
from alembic import op

from tinycortex.schema.adoption import add_columns

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the two columns."""
    add_columns(
        "mem_tree_jobs",
        sa.Column("rerun_payload_json", sa.Text(), nullable=True),
        sa.Column("cancel_requested_at_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
    )


def downgrade() -> None:
    """Take the columns back; every row stays."""
    for column in ("cancel_requested_at_ms", "rerun_payload_json"):
        op.drop_column("mem_tree_jobs", column)
