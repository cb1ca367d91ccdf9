"""${message}

Before this goes in:
- it runs offline too (`tinycortex db sql`), so it asks the live database nothing outside `tinycortex.schema.adoption`;
- every new column is nullable or has a server default: other programs insert with the contract columns only;
- a partial index is written with its predicate for both engines, and never through a table rebuild;
- it imports no model: a model changes, a revision does not.
"""

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply this revision."""
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Take this revision back."""
    ${downgrades if downgrades else "pass"}
