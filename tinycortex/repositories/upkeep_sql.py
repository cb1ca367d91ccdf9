"""The raw statements that keep the rows in order: recover, release, requeue, purge. Instants are ms, UTC."""

from functools import lru_cache
from typing import NamedTuple

from sqlalchemy import Text, TextClause, bindparam, text

from tinycortex.domain import policy
from tinycortex.domain.jobs import JobStatus
from tinycortex.domain.kinds import RETIRED_JOB_KINDS
from tinycortex.repositories.job_sql import CANCELLED, COLUMNS, FREE, KEPT

# Who was asked to stop, and is gone, has stopped.
_ASKED = "cancel_requested_at_ms IS NOT NULL"
# Cast, as everything that is compared here: SQLite lets another program write text where a number belongs.
_SPENT = "CAST(attempts AS BIGINT) >= CAST(max_attempts AS BIGINT)"
_GOES_ON = f"NOT ({_SPENT}) AND NOT ({_ASKED})"

# A process that dies burns the attempt, or a job that kills its process would run for ever.
_RECOVER = f"""
    UPDATE mem_tree_jobs
    SET status = CASE WHEN {_ASKED} THEN 'cancelled' WHEN {_SPENT} THEN 'failed' ELSE 'ready' END,
        completed_at_ms = CASE WHEN {_GOES_ON} THEN NULL ELSE :now_ms END,
        failure_reason = CASE WHEN {_SPENT} AND NOT ({_ASKED}) THEN '{policy.REASON_LEASE_EXPIRED}' END,
        failure_class = CASE WHEN {_SPENT} AND NOT ({_ASKED}) THEN 'unrecoverable' END,
        last_error = CASE WHEN last_error IS NULL OR last_error = '' THEN '{policy.NOTE_RECOVERED}'
                     ELSE last_error END,
        {FREE}
    """

# A running row without a lease is nobody's: without this it would run for ever.
EXPIRED = "status = 'running' AND (CAST(locked_until_ms AS BIGINT) < :now_ms OR locked_until_ms IS NULL)"

# Another program's claim leaves our word in locked_by, but not the instant of our own claim.
OURS = "status = 'running' AND claimed_at_ms = started_at_ms AND locked_by"

RECOVER_EXPIRED = text(f"{_RECOVER} WHERE {EXPIRED} {KEPT}")

RECOVER_OWNED = text(f"{_RECOVER} WHERE {OURS} IN :worker_ids {KEPT}").bindparams(
    bindparam("worker_ids", expanding=True, type_=Text())
)

# A settlement of ours makes a job of the request that it finds, so one that is left was not seen.
LEFT_REQUESTS = text(
    """
    SELECT id, kind, dedupe_key, max_attempts, status, payload_json, rerun_payload_json FROM mem_tree_jobs
    WHERE rerun_payload_json IS NOT NULL AND status IN ('done', 'failed', 'cancelled')
    """
)

RELEASE_OWN = text(
    f"""
    UPDATE mem_tree_jobs
    SET status = 'ready', attempts = attempts - 1, started_at_ms = NULL, {FREE}
    WHERE {OURS} = :worker_id AND cancel_requested_at_ms IS NULL {KEPT}
    """
)

CANCEL_OWN = text(
    f"UPDATE mem_tree_jobs SET {CANCELLED}, {FREE} "
    f"WHERE {OURS} = :worker_id AND cancel_requested_at_ms IS NOT NULL {KEPT}"
)

LIST_OWN = text(f"SELECT {COLUMNS} FROM mem_tree_jobs WHERE {OURS} = :worker_id")

PURGE_RETIRED = text("DELETE FROM mem_tree_jobs WHERE kind IN :kinds").bindparams(
    bindparam("kinds", sorted(RETIRED_JOB_KINDS), expanding=True, type_=Text())
)


@lru_cache(maxsize=16)
def find_purgeable(status: JobStatus, remembered: tuple[tuple[str, int], ...]) -> TextClause:
    """Return the search for ``status`` rows that completed before ``before_ms``, ``batch`` at most.

    A row that ran came due before it completed, so the index (status, available_at_ms) bounds the search;
    one that was cancelled may never have come due. Rows of ``remembered`` kinds are kept at least as long
    as said (ms): their keys still have something to say.
    """
    cases = " ".join(
        f"WHEN kind = :kind_{number} THEN :now_ms - {kept_ms:d}" for number, (_kind, kept_ms) in enumerate(remembered)
    )
    own = f"AND completed_at_ms < CASE {cases} ELSE :before_ms END" if cases else ""
    due = "" if status is JobStatus.CANCELLED else "AND available_at_ms < :before_ms"
    return text(
        f"""
        SELECT id FROM mem_tree_jobs
        WHERE status = '{status}' {due} AND completed_at_ms < :before_ms {own}
        LIMIT :batch
        """
    ).bindparams(*(bindparam(f"kind_{number}", kind) for number, (kind, _kept) in enumerate(remembered)))


# Status and age again: a row may have been requeued, and have settled anew, since it was found.
PURGE = text(
    "DELETE FROM mem_tree_jobs WHERE id IN :ids AND status = :status AND completed_at_ms < :before_ms"
).bindparams(bindparam("ids", expanding=True, type_=Text()))


class Requeue(NamedTuple):
    """The statements of one requeue, in the order in which they run."""

    supersede: TextClause
    revive: TextClause
    count_left: TextClause


def _heal_spacing() -> str:
    """Return policy.heal_spacing_ms as an expression over the column ``heals``."""
    spacings: list[int] = []
    while (spacing := policy.heal_spacing_ms(len(spacings))) < policy.HEAL_CAP_MS:
        spacings.append(spacing)
    cases = " ".join(f"WHEN heals <= {heals} THEN {spacing}" for heals, spacing in enumerate(spacings))
    return f"CASE {cases} ELSE {policy.HEAL_CAP_MS} END"


def _requeue(eligible: str, due: str, heals: str) -> Requeue:
    """Return the statements that cancel older rows of one key, revive the newest, and count the rest.

    One statement that made every row ready would be undone whole by the first key that is active again,
    or that two rows share. So a row whose key is active is left alone, and of several rows with one key
    only the newest comes back; the others can never run again and say so.
    """
    newest_first = "OVER (PARTITION BY dedupe_key ORDER BY created_at_ms DESC, id DESC)"
    ranked = f"""
        SELECT id, dedupe_key, ROW_NUMBER() {newest_first} AS age, FIRST_VALUE({due}) {newest_first} AS newest_due
        FROM mem_tree_jobs WHERE status = 'failed' AND dedupe_key IS NOT NULL AND {eligible}
        """
    unblocked = """
        newest_due = 1 AND NOT EXISTS (
            SELECT 1 FROM mem_tree_jobs AS active
            WHERE active.dedupe_key = ranked.dedupe_key AND active.status IN ('ready', 'running'))
        """
    supersede = f"""
        UPDATE mem_tree_jobs SET status = 'cancelled', failure_reason = '{policy.REASON_SUPERSEDED}',
            failure_class = NULL, completed_at_ms = COALESCE(completed_at_ms, :now_ms)
        WHERE id IN (SELECT id FROM ({ranked}) AS ranked WHERE age > 1 AND {unblocked})
        """
    revive = f"""
        UPDATE mem_tree_jobs
        SET status = 'ready', attempts = 0, available_at_ms = :now_ms, heals = {heals}, last_error = NULL,
            failure_reason = NULL, failure_class = NULL, completed_at_ms = NULL, deferred_since_ms = NULL,
            rerun_payload_json = NULL, {FREE}
        WHERE status = 'failed' AND {eligible} AND {due} = 1
          AND (dedupe_key IS NULL OR id IN (SELECT id FROM ({ranked}) AS ranked WHERE age = 1 AND {unblocked}))
        """
    count_left = f"SELECT COUNT(*) FROM mem_tree_jobs WHERE status = 'failed' AND {eligible} AND {due} = 1"
    return Requeue(text(supersede), text(revive), text(count_left))


_TRANSIENT = "(failure_class IS NULL OR failure_class <> 'unrecoverable')"
_HEALABLE = f"CASE WHEN COALESCE(completed_at_ms, 0) + {_heal_spacing()} <= :now_ms THEN 1 ELSE 0 END"

# A request by hand takes no notice of the spacing, and starts it anew.
REQUEUE_ALL = _requeue("1 = 1", "1", "0")
REQUEUE_ONE = _requeue("id = :id", "1", "0")
REQUEUE_TRANSIENT = _requeue(_TRANSIENT, "1", "0")
SELF_HEAL = _requeue(_TRANSIENT, _HEALABLE, "heals + 1")
