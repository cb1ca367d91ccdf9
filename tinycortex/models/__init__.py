"""The ORM models of every table; importing this package fills ``Base.metadata``."""

from tinycortex.models.base import Base
from tinycortex.models.chunks import ChunkRow
from tinycortex.models.jobs import ACTIVE_KEY_PREDICATE, JobRow
from tinycortex.models.memory import (
    BufferRow,
    ChunkEmbeddingRow,
    ChunkSkipRow,
    EntityRow,
    IngestedSourceRow,
    ScoreRow,
    SummaryEmbeddingRow,
    SummaryRow,
    SummarySkipRow,
    TreeRow,
)

__all__ = [
    "ACTIVE_KEY_PREDICATE",
    "Base",
    "BufferRow",
    "ChunkEmbeddingRow",
    "ChunkRow",
    "ChunkSkipRow",
    "EntityRow",
    "IngestedSourceRow",
    "JobRow",
    "ScoreRow",
    "SummaryEmbeddingRow",
    "SummaryRow",
    "SummarySkipRow",
    "TreeRow",
]
