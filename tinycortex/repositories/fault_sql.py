"""The raw statements that look for faults among the rows. Instants are ms since the epoch, UTC."""

from sqlalchemy import TextClause, bindparam, text

from tinycortex.domain.jobs import TERMINAL_STATUSES
from tinycortex.domain.kinds import RETIRED_JOB_KINDS
from tinycortex.repositories.upkeep_sql import EXPIRED

_SETTLED = ", ".join(f"'{status}'" for status in TERMINAL_STATUSES)


def _sample(where: str, rows: str = "mem_tree_jobs AS job") -> TextClause:
    return text(f"SELECT COUNT(*) AS jobs, MIN(job.id) AS example FROM {rows} WHERE {where}")


SAMPLE_EXPIRED = _sample(EXPIRED)

SAMPLE_OWNED = _sample("status = 'running' AND locked_by IN :worker_ids").bindparams(
    bindparam("worker_ids", expanding=True)
)

# Uncorrelated, so that a missing index, which is one of the faults, does not make it read the table row by row.
SAMPLE_BLOCKED = _sample(
    """
    status = 'failed' AND dedupe_key IN (
        SELECT dedupe_key FROM mem_tree_jobs WHERE dedupe_key IS NOT NULL AND status IN ('ready', 'running'))
    """
)

# A settlement of ours inserts the rerun with it, under the same key, and the settled row keeps the request. No
# twin can be created while a row is active, so one that is younger than its start has served the request.
_ASKED = f"""
    rerun_payload_json IS NOT NULL AND status IN ({_SETTLED})
    AND (completed_at_ms >= :since_ms OR completed_at_ms IS NULL)
    """
_NEWEST_FIRST = "OVER (PARTITION BY dedupe_key ORDER BY created_at_ms DESC, id DESC)"

SAMPLE_LOST_RERUNS = _sample(
    f"{_ASKED} AND (age = 1 OR newest_ms < COALESCE(started_at_ms, created_at_ms))",
    f"""
    (SELECT id, status, rerun_payload_json, created_at_ms, started_at_ms, completed_at_ms,
            ROW_NUMBER() {_NEWEST_FIRST} AS age, FIRST_VALUE(created_at_ms) {_NEWEST_FIRST} AS newest_ms
     FROM mem_tree_jobs WHERE dedupe_key IN (SELECT dedupe_key FROM mem_tree_jobs WHERE {_ASKED})) AS job
    """,
)

SAMPLE_RETIRED = _sample("kind IN :kinds").bindparams(bindparam("kinds", sorted(RETIRED_JOB_KINDS), expanding=True))

SAMPLE_AHEAD = _sample("created_at_ms > :written_ms OR started_at_ms > :written_ms OR locked_until_ms > :leased_ms")
