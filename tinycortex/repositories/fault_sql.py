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

SAMPLE_BLOCKED = _sample(
    """
    job.status = 'failed' AND job.dedupe_key IS NOT NULL AND EXISTS (
        SELECT 1 FROM mem_tree_jobs AS active
        WHERE active.dedupe_key = job.dedupe_key AND active.status IN ('ready', 'running'))
    """
)

# A settlement of ours inserts the rerun with it, under the same key, and the settled row keeps the request.
# A twin that was created since the row started must have come after its end, and has served the request. A
# join, because SQLite can give it an index of its own; a subquery would read the whole table for each row.
SAMPLE_LOST_RERUNS = _sample(
    f"""
    job.rerun_payload_json IS NOT NULL AND job.status IN ({_SETTLED})
    AND (job.completed_at_ms >= :since_ms OR job.completed_at_ms IS NULL) AND later.id IS NULL
    """,
    """
    mem_tree_jobs AS job LEFT JOIN mem_tree_jobs AS later
      ON later.dedupe_key = job.dedupe_key AND later.id <> job.id
      AND later.created_at_ms >= COALESCE(job.started_at_ms, job.created_at_ms)
    """,
)

SAMPLE_RETIRED = _sample("kind IN :kinds").bindparams(bindparam("kinds", sorted(RETIRED_JOB_KINDS), expanding=True))

SAMPLE_AHEAD = _sample("created_at_ms > :written_ms OR started_at_ms > :written_ms OR locked_until_ms > :leased_ms")
