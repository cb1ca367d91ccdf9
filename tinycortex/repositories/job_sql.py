"""Every raw statement about ``mem_tree_jobs``, named, with its reason. Instants are ms since the epoch, UTC."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from sqlalchemy import TextClause, bindparam, text

from tinycortex.domain import policy
from tinycortex.domain.kinds import RETIRED_JOB_KINDS, KindSpec
from tinycortex.models import ACTIVE_KEY_PREDICATE, JobRow

COLUMNS = ", ".join(column.name for column in JobRow.__table__.columns)

# The conflict clause names the partial index: only an active twin suppresses an insert. A plain
# INSERT OR IGNORE would also swallow NOT NULL and CHECK violations, and lose the job in silence.
ENQUEUE = text(
    f"""
    INSERT INTO mem_tree_jobs
      (id, kind, payload_json, dedupe_key, status, attempts, max_attempts, available_at_ms, created_at_ms)
    VALUES (:id, :kind, :payload_json, :dedupe_key, 'ready', 0, :max_attempts, :available_at_ms, :created_at_ms)
    ON CONFLICT (dedupe_key) WHERE {ACTIVE_KEY_PREDICATE} DO NOTHING
    RETURNING id
    """
)


def claim(kinds: Iterable[KindSpec]) -> TextClause:
    """Return the statement that leases the next due row of ``kinds`` (spec: Claiming and ordering).

    Sorting ``CASE kind …`` over every due row costs seconds at a million rows. The first due row of one
    kind is one probe of the index (kind, available_at_ms, id) of ready rows; the best of those few, by
    rank, due time and id, is the row that the sort would have found.

    Parameters: ``now_ms``, ``locked_until_ms``, ``worker_id``.
    """
    return _claim(tuple((spec.kind, spec.rank) for spec in kinds))


@lru_cache(maxsize=64)
def _claim(ranked_kinds: tuple[tuple[str, int], ...]) -> TextClause:
    probes = " UNION ALL ".join(
        f"SELECT * FROM (SELECT {rank:d} AS kind_rank, available_at_ms, id FROM mem_tree_jobs "
        f"WHERE status = 'ready' AND kind = :kind_{number} AND available_at_ms <= :now_ms "
        f"ORDER BY available_at_ms, id LIMIT 1) AS probe_{number}"
        for number, (_kind, rank) in enumerate(ranked_kinds)
    )
    return text(
        f"""
        UPDATE mem_tree_jobs
        SET status = 'running', attempts = attempts + 1, claim_token = claim_token + 1, locked_by = :worker_id,
            started_at_ms = :now_ms, locked_until_ms = :locked_until_ms, last_error = NULL
        WHERE id = (SELECT id FROM ({probes}) AS probes ORDER BY kind_rank, available_at_ms, id LIMIT 1)
        RETURNING {COLUMNS}
        """
    ).bindparams(*(bindparam(f"kind_{number}", kind) for number, (kind, _rank) in enumerate(ranked_kinds)))


# The claim that a settlement ends. The token alone decides between our own claims; attempts and start
# also catch a claim by a program that does not know the token. A row that is not running matches nothing.
_HELD = (
    "WHERE id = :id AND status = 'running' AND claim_token = :claim_token "
    "AND attempts = :attempts AND started_at_ms = :started_at_ms"
)
_FREE = "locked_until_ms = NULL, locked_by = NULL"

MARK_DONE = text(
    f"""
    UPDATE mem_tree_jobs
    SET status = 'done', completed_at_ms = :now_ms, last_error = NULL, failure_reason = NULL, failure_class = NULL,
        deferred_since_ms = NULL, {_FREE}
    {_HELD}
    """
)

MARK_RETRY = text(
    f"""
    UPDATE mem_tree_jobs
    SET status = 'ready', available_at_ms = :available_at_ms, last_error = :last_error,
        failure_reason = NULL, failure_class = NULL, {_FREE}
    {_HELD}
    """
)

MARK_FAILED = text(
    f"""
    UPDATE mem_tree_jobs
    SET status = 'failed', completed_at_ms = :now_ms, last_error = :last_error,
        failure_reason = :failure_reason, failure_class = :failure_class, {_FREE}
    {_HELD}
    """
)

# A defer gives its attempt back; it began deferring when it first did, unless it now reports progress.
MARK_DEFERRED = text(
    f"""
    UPDATE mem_tree_jobs
    SET status = 'ready', attempts = attempts - 1, available_at_ms = :available_at_ms, started_at_ms = NULL,
        last_error = :last_error,
        deferred_since_ms = CASE WHEN :progress = 1 THEN NULL ELSE COALESCE(deferred_since_ms, :now_ms) END, {_FREE}
    {_HELD}
    """
)

_GIVE_BACK = f"SET status = 'ready', attempts = attempts - 1, started_at_ms = NULL, {_FREE}"

RELEASE = text(f"UPDATE mem_tree_jobs {_GIVE_BACK} {_HELD}")

RELEASE_OWN = text(
    f"UPDATE mem_tree_jobs {_GIVE_BACK} WHERE status = 'running' AND locked_by = :worker_id AND attempts > 0"
)

# A process that dies burns the attempt, or a job that kills its process would run for ever.
_RECOVER = f"""
    UPDATE mem_tree_jobs
    SET status = CASE WHEN attempts >= max_attempts THEN 'failed' ELSE 'ready' END,
        completed_at_ms = CASE WHEN attempts >= max_attempts THEN :now_ms END,
        failure_reason = CASE WHEN attempts >= max_attempts THEN '{policy.REASON_LEASE_EXPIRED}' END,
        failure_class = CASE WHEN attempts >= max_attempts THEN 'unrecoverable' END,
        last_error = CASE WHEN last_error IS NULL OR last_error = '' THEN '{policy.NOTE_RECOVERED}' ELSE last_error END,
        {_FREE}
    """

# A running row without a lease is nobody's: without this it would run for ever.
_EXPIRED = "status = 'running' AND (locked_until_ms < :now_ms OR locked_until_ms IS NULL)"

RECOVER_EXPIRED = text(f"{_RECOVER} WHERE {_EXPIRED}")

RECOVER_OWNED = text(f"{_RECOVER} WHERE status = 'running' AND locked_by IN :worker_ids").bindparams(
    bindparam("worker_ids", expanding=True)
)

LIST_OWNERS = text("SELECT DISTINCT locked_by FROM mem_tree_jobs WHERE status = 'running' AND locked_by IS NOT NULL")

PURGE_RETIRED = text("DELETE FROM mem_tree_jobs WHERE kind IN :kinds").bindparams(
    bindparam("kinds", sorted(RETIRED_JOB_KINDS), expanding=True)
)


def _heal_spacing() -> str:
    """Return policy.heal_spacing_ms as an expression over the column ``heals``."""
    spacings: list[int] = []
    while (spacing := policy.heal_spacing_ms(len(spacings))) < policy.HEAL_CAP_MS:
        spacings.append(spacing)
    cases = " ".join(f"WHEN heals <= {heals} THEN {spacing}" for heals, spacing in enumerate(spacings))
    return f"CASE {cases} ELSE {policy.HEAL_CAP_MS} END"


# Failed rows that may be tried again, with whether their own spacing is over.
_TRANSIENT = "(failure_class IS NULL OR failure_class <> 'unrecoverable')"
_HEALABLE = f"CASE WHEN COALESCE(completed_at_ms, 0) + {_heal_spacing()} <= :now_ms THEN 1 ELSE 0 END"


class Requeue(NamedTuple):
    """The statements of one requeue, in the order in which they run."""

    supersede: TextClause
    revive: TextClause
    count_left: TextClause


def _requeue(eligible: str, due: str, heals: str) -> Requeue:
    """Return the statements that cancel older rows of one key, revive the newest, and count the rest.

    One statement that made every row ready would be undone whole by the first key that is active again,
    or that two rows share. So a row whose key is active is left alone, and of several rows with one key
    only the newest comes back; the others can never run again and say so.
    """
    ranked = f"""
        SELECT id, dedupe_key,
               ROW_NUMBER() OVER (PARTITION BY dedupe_key ORDER BY created_at_ms DESC, id DESC) AS age,
               FIRST_VALUE({due}) OVER (PARTITION BY dedupe_key ORDER BY created_at_ms DESC, id DESC) AS newest_due
        FROM mem_tree_jobs WHERE status = 'failed' AND dedupe_key IS NOT NULL AND {eligible}
        """
    unblocked = """
        newest_due = 1 AND NOT EXISTS (
            SELECT 1 FROM mem_tree_jobs AS active
            WHERE active.dedupe_key = ranked.dedupe_key AND active.status IN ('ready', 'running'))
        """
    supersede = f"""
        UPDATE mem_tree_jobs SET status = 'cancelled', failure_reason = '{policy.REASON_SUPERSEDED}'
        WHERE id IN (SELECT id FROM ({ranked}) AS ranked WHERE age > 1 AND {unblocked})
        """
    revive = f"""
        UPDATE mem_tree_jobs
        SET status = 'ready', attempts = 0, available_at_ms = :now_ms, heals = {heals}, last_error = NULL,
            failure_reason = NULL, failure_class = NULL, completed_at_ms = NULL, deferred_since_ms = NULL, {_FREE}
        WHERE status = 'failed' AND {eligible} AND {due} = 1
          AND (dedupe_key IS NULL OR id IN (SELECT id FROM ({ranked}) AS ranked WHERE age = 1 AND {unblocked}))
        """
    count_left = f"SELECT COUNT(*) FROM mem_tree_jobs WHERE status = 'failed' AND {eligible} AND {due} = 1"
    return Requeue(text(supersede), text(revive), text(count_left))


REQUEUE_ALL = _requeue("1 = 1", "1", "0")
REQUEUE_ONE = _requeue("id = :id", "1", "0")
REQUEUE_TRANSIENT = _requeue(_TRANSIENT, "1", "0")
SELF_HEAL = _requeue(_TRANSIENT, _HEALABLE, "heals + 1")

GET_JOB = text(f"SELECT {COLUMNS} FROM mem_tree_jobs WHERE id = :id")

HAS_KEY = text("SELECT 1 FROM mem_tree_jobs WHERE dedupe_key = :dedupe_key AND kind = :kind LIMIT 1")

COUNT_BY_KIND_AND_STATUS = text("SELECT kind, status, COUNT(*) AS jobs FROM mem_tree_jobs GROUP BY kind, status")

COUNT_FAILED = text(
    "SELECT failure_reason, failure_class, COUNT(*) AS jobs FROM mem_tree_jobs WHERE status = 'failed' "
    "GROUP BY failure_reason, failure_class"
)

NEXT_READY_AT = text(
    "SELECT MIN(available_at_ms) FROM mem_tree_jobs WHERE status = 'ready' AND kind IN :kinds"
).bindparams(bindparam("kinds", expanding=True))

OLDEST_READY_AT = text("SELECT MIN(available_at_ms) FROM mem_tree_jobs WHERE status = 'ready'")

COUNT_EXPIRED = text(f"SELECT COUNT(*) FROM mem_tree_jobs WHERE {_EXPIRED}")
