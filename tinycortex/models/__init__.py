"""The ORM models of every table; importing this package fills ``Base.metadata``.

To map them takes longer than to open a queue, which never needs them: its statements are raw.
"""

from tinycortex.models.base import Base
from tinycortex.models.chunks import ChunkRow
from tinycortex.models.gate import GateRow
from tinycortex.models.jobs import JobRow
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
    "Base",
    "BufferRow",
    "ChunkEmbeddingRow",
    "ChunkRow",
    "ChunkSkipRow",
    "EntityRow",
    "GateRow",
    "IngestedSourceRow",
    "JobRow",
    "ScoreRow",
    "SummaryEmbeddingRow",
    "SummaryRow",
    "SummarySkipRow",
    "TreeRow",
]
