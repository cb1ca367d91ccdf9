"""The raw statements that only read. Instants are ms since the epoch, UTC."""

from functools import lru_cache

from sqlalchemy import TextClause, bindparam, text

from tinycortex.repositories.job_sql import COLUMNS
from tinycortex.repositories.upkeep_sql import EXPIRED, OURS

GET_JOB = text(f"SELECT {COLUMNS} FROM mem_tree_jobs WHERE id = :id")


@lru_cache(maxsize=4)
def list_jobs(filters: tuple[str, ...]) -> TextClause:
    """Return the list, newest first, of ``:limit`` rows at the most whose columns ``filters`` have the given values."""
    where = f"WHERE {' AND '.join(f'{column} = :{column}' for column in filters)}" if filters else ""
    return text(f"SELECT {COLUMNS} FROM mem_tree_jobs {where} ORDER BY created_at_ms DESC, id DESC LIMIT :limit")


COUNT_EXPIRED = text(f"SELECT COUNT(*) FROM mem_tree_jobs WHERE {EXPIRED}")

LIST_OWNERS = text(f"SELECT DISTINCT locked_by FROM mem_tree_jobs WHERE {OURS} IS NOT NULL")

HAS_KEY = text("SELECT 1 FROM mem_tree_jobs WHERE dedupe_key = :dedupe_key AND kind = :kind LIMIT 1")

COUNT_BY_KIND_AND_STATUS = text("SELECT kind, status, COUNT(*) AS jobs FROM mem_tree_jobs GROUP BY kind, status")

COUNT_FAILED = text(
    "SELECT failure_reason, failure_class, COUNT(*) AS jobs FROM mem_tree_jobs WHERE status = 'failed' "
    "GROUP BY failure_reason, failure_class"
)

OLDEST_READY_AT = text("SELECT MIN(available_at_ms) FROM mem_tree_jobs WHERE status = 'ready'")


# One probe per kind, as in a claim: a list of kinds would be read from end to end for its least value.
@lru_cache(maxsize=64)
def next_ready_at(kinds: tuple[str, ...]) -> TextClause:
    """Return the search for the earliest due time of the ready rows of ``kinds``."""
    probes = " UNION ALL ".join(
        f"SELECT MIN(available_at_ms) AS due_ms FROM mem_tree_jobs WHERE status = 'ready' AND kind = :kind_{number}"
        for number in range(len(kinds))
    )
    return text(f"SELECT MIN(due_ms) FROM ({probes}) AS probes").bindparams(
        *(bindparam(f"kind_{number}", kind) for number, kind in enumerate(kinds))
    )
