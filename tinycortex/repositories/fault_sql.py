"""The raw statements that look for faults among the rows. Instants are ms since the epoch, UTC."""

from sqlalchemy import Text, TextClause, bindparam, text

from tinycortex.domain.kinds import RETIRED_JOB_KINDS
from tinycortex.repositories.upkeep_sql import EXPIRED, OURS


def _sample(where: str, rows: str = "mem_tree_jobs AS job") -> TextClause:
    return text(f"SELECT COUNT(*) AS jobs, MIN(job.id) AS example FROM {rows} WHERE {where}")


SAMPLE_EXPIRED = _sample(EXPIRED)

SAMPLE_OWNED = _sample(f"{OURS} IN :worker_ids").bindparams(bindparam("worker_ids", expanding=True, type_=Text()))

# Uncorrelated, so that a missing index, which is one of the faults, does not make it read the table row by row.
SAMPLE_BLOCKED = _sample(
    """
    status = 'failed' AND dedupe_key IN (
        SELECT dedupe_key FROM mem_tree_jobs WHERE dedupe_key IS NOT NULL AND status IN ('ready', 'running'))
    """
)

SAMPLE_RETIRED = _sample("kind IN :kinds").bindparams(
    bindparam("kinds", sorted(RETIRED_JOB_KINDS), expanding=True, type_=Text())
)

SAMPLE_AHEAD = _sample("created_at_ms > :written_ms OR started_at_ms > :written_ms OR locked_until_ms > :leased_ms")
