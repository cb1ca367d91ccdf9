"""Where a job comes from: the W3C trace context of its enqueue, for whoever traces.

The column is null unless somebody traces, so a program that knows only the contract sees no difference.
"""

import sqlalchemy as sa
from alembic import op

from tinycortex.schema.adoption import add_columns

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    add_columns("mem_tree_jobs", sa.Column("trace_context", sa.Text(), nullable=True))


def downgrade() -> None:
    """Take the column back; every row stays."""
    op.drop_column("mem_tree_jobs", "trace_context")
