"""The raw statements of a job's life: enqueue, claim, renew, settle, cancel. Instants are ms since the epoch, UTC."""

from collections.abc import Iterable
from functools import lru_cache

from sqlalchemy import Select, Text, TextClause, bindparam, column, select, table, text

from tinycortex.domain.jobs import ACTIVE_KEY_PREDICATE, Job
from tinycortex.domain.kinds import KindSpec

JOB_FIELDS = tuple(Job.__dataclass_fields__)

COLUMNS = ", ".join(JOB_FIELDS)

INSERT_FIELDS = (
    "id",
    "kind",
    "payload_json",
    "dedupe_key",
    "max_attempts",
    "available_at_ms",
    "created_at_ms",
    "trace_context",
)

_INSERT = f"INSERT INTO mem_tree_jobs ({', '.join(INSERT_FIELDS)})"

# The conflict clause names the partial index: only an active twin suppresses an insert. A plain
# INSERT OR IGNORE would also swallow NOT NULL and CHECK violations, and lose the job in silence.
_CONFLICT = f"ON CONFLICT (dedupe_key) WHERE {ACTIVE_KEY_PREDICATE}"


@lru_cache(maxsize=8)
def enqueue_ignoring(rows: int) -> TextClause:
    """Return the insert of ``rows`` jobs whose active twins, if any, stay as they are; it returns the new ids.

    Parameters: those of :func:`insert_parameters`.
    """
    named = [f":{parameter}" for parameter in insert_parameters(rows)]
    width = len(INSERT_FIELDS)
    values = ", ".join(f"({', '.join(named[start : start + width])})" for start in range(0, len(named), width))
    return text(f"{_INSERT} VALUES {values} {_CONFLICT} DO NOTHING RETURNING id")


@lru_cache(maxsize=8)
def insert_parameters(rows: int) -> tuple[str, ...]:
    """Return the parameters of :func:`enqueue_ignoring`: row by row, each field with its row's number, as ``id_0``."""
    return tuple(f"{field}_{row}" for row in range(rows) for field in INSERT_FIELDS)


# One statement decides and writes, so no settlement can slip between: either the row is still running and
# takes the request, or it has settled and the insert finds no twin. Returns the id of the row that took it.
ENQUEUE_REPLACING = text(
    f"""
    {_INSERT} VALUES ({", ".join(f":{field}" for field in INSERT_FIELDS)})
    {_CONFLICT} DO UPDATE SET
      payload_json = CASE WHEN mem_tree_jobs.status = 'ready'
                     THEN excluded.payload_json ELSE mem_tree_jobs.payload_json END,
      trace_context = CASE WHEN mem_tree_jobs.status = 'ready'
                      THEN excluded.trace_context ELSE mem_tree_jobs.trace_context END,
      rerun_payload_json = CASE WHEN mem_tree_jobs.status = 'running'
                           THEN excluded.payload_json ELSE mem_tree_jobs.rerun_payload_json END
    WHERE mem_tree_jobs.kind = excluded.kind AND (
      (mem_tree_jobs.status = 'ready' AND :replace_ready = 1)
      OR (mem_tree_jobs.status = 'running' AND :rerun = 1
          AND (:replace_rerun = 1 OR mem_tree_jobs.rerun_payload_json IS NULL)))
    RETURNING id
    """
)


_SPARE = 32
"""How many more rows are looked at where others may have locked the first ones: one for each claim at that instant."""

_IN_ORDER = "ORDER BY kind_rank, available_at_ms, id"


def claim(kinds: Iterable[KindSpec], *, limit: int = 1, llm_limit: int | None = None, row_lock: str = "") -> TextClause:
    """Return the statement that leases the next due rows of ``kinds`` (spec: Claiming and ordering).

    Sorting ``CASE kind …`` over every due row costs seconds at a million rows. The first due rows of one
    kind are one probe of the index (kind, available_at_ms, id) of ready rows; the best of those few, by
    rank, due time and id, are the rows that the sort would have found. They come back in no order.

    Parameters: ``now_ms``, ``lease_ms``, ``worker_id``; without a ``row_lock`` also ``limit``, and ``llm_limit``
    where there is one.

    Args:
        kinds: what to claim.
        limit: the most rows to lease.
        llm_limit: of the LLM-bound kinds only the first so many rows are there to be leased; None for all.
        row_lock: how a search locks a row and passes over those that others have locked; empty where nobody can.
    """
    # By kind, since one that was named twice would be probed twice, and take up two places.
    wanted = {spec.kind: (spec.kind, spec.rank, spec.lease_ms, spec.llm_bound) for spec in kinds}
    if not row_lock:
        return _claim(tuple(wanted.values()), ":limit", None if llm_limit is None else ":llm_limit", row_lock)
    # Figures, by which a server plans, where parameters would have it prepare for many rows.
    return _claim(tuple(wanted.values()), str(limit), None if llm_limit is None else str(llm_limit), row_lock)


@lru_cache(maxsize=64)
def _claim(
    kinds: tuple[tuple[str, int, int | None, bool], ...], limit: str, llm_limit: str | None, row_lock: str
) -> TextClause:
    spare = f" + {_SPARE}" if row_lock else ""
    probes: dict[bool, list[str]] = {False: [], True: []}
    for number, (_kind, rank, _lease_ms, llm_bound) in enumerate(kinds):
        limited = llm_bound and llm_limit is not None
        probes[limited].append(
            f"SELECT * FROM (SELECT {rank:d} AS kind_rank, available_at_ms, id FROM mem_tree_jobs "
            f"WHERE status = 'ready' AND kind = :kind_{number} AND available_at_ms <= :now_ms "
            f"ORDER BY available_at_ms, id LIMIT {llm_limit if limited else limit}{spare}) AS probe_{number}"
        )
    found = probes[False]
    if row_lock and found:
        found = [_locked(_first(found, f"{limit}{spare}"), limit, row_lock)]
    if llm_limit is not None and probes[True]:
        first = _first(probes[True], f"{llm_limit}{spare}")
        found = [*found, _locked(first, llm_limit, row_lock) if row_lock else f"SELECT * FROM ({first}) AS llm"]
    own_leases = " ".join(
        f"WHEN kind = :kind_{number} THEN {lease_ms:d}"
        for number, (_kind, _rank, lease_ms, _llm_bound) in enumerate(kinds)
        if lease_ms is not None
    )
    lease = f"CASE {own_leases} ELSE :lease_ms END" if own_leases else ":lease_ms"
    llm_kinds = ", ".join(f":kind_{number}" for number, (*_rest, llm_bound) in enumerate(kinds) if llm_bound)
    chosen = f"SELECT id FROM ({_union(found)}) AS probes {_IN_ORDER} LIMIT {limit}"
    return text(
        f"""
        UPDATE mem_tree_jobs
        SET status = 'running', attempts = attempts + 1, claim_token = claim_token + 1, locked_by = :worker_id,
            started_at_ms = :now_ms, claimed_at_ms = :now_ms, locked_until_ms = :now_ms + {lease}, last_error = NULL,
            llm_bound = {f"CASE WHEN kind IN ({llm_kinds}) THEN 1 ELSE 0 END" if llm_kinds else "0"}
        WHERE id {f"= ANY(ARRAY({chosen}))" if row_lock else f"IN ({chosen})"}
        RETURNING {COLUMNS}
        """
    ).bindparams(*(bindparam(f"kind_{number}", kind) for number, (kind, *_rest) in enumerate(kinds)))


def _first(probes: Iterable[str], limit: str) -> str:
    return f"SELECT * FROM ({_union(probes)}) AS probes {_IN_ORDER} LIMIT {limit}"


def _locked(candidates: str, limit: str, row_lock: str) -> str:
    """Return the search for the first of ``candidates`` that nobody else has locked, and that are ready still.

    They are locked one by one in their order, and none that is not taken: who comes meanwhile finds the others.
    """
    return f"""
        SELECT * FROM (SELECT candidate.* FROM ({candidates}) AS candidate CROSS JOIN LATERAL (
            SELECT 1 AS is_free FROM mem_tree_jobs AS job
            WHERE job.id = candidate.id AND job.status = 'ready' AND job.available_at_ms <= :now_ms {row_lock}
        ) AS locked LIMIT {limit}) AS free
        """


def _union(selects: Iterable[str]) -> str:
    return " UNION ALL ".join(selects)


# The claim that a settlement ends. The token alone decides between our own claims; attempts and start
# also catch a claim by a program that does not know the token. A row that is not running matches nothing.
CLAIM_FIELDS = ("id", "claim_token", "attempts", "started_at_ms")

HELD = f"WHERE {' AND '.join(f'{field} = :{field}' for field in CLAIM_FIELDS)} AND status = 'running'"

# Who was asked to stop can only be cancelled, so that a request is never overtaken by the end of the run.
_FREE_TO_SETTLE = f"{HELD} AND cancel_requested_at_ms IS NULL"

FREE = "locked_until_ms = NULL, locked_by = NULL, cancel_requested_at_ms = NULL"

_KEPT = "id, kind, dedupe_key, max_attempts, status, payload_json, rerun_payload_json"

# What a row that stops running has to say about the request that was kept with it.
KEPT = f"RETURNING {_KEPT}"

FIND_KEPT = text(f"SELECT {_KEPT} FROM mem_tree_jobs WHERE id = :id")

TAKE_PAYLOAD = text("UPDATE mem_tree_jobs SET payload_json = :payload_json, rerun_payload_json = NULL WHERE id = :id")

# Asked again, where another transaction may have passed the request on since it was read.
FORGET_REQUEST = text(
    "UPDATE mem_tree_jobs SET rerun_payload_json = NULL WHERE id = :id AND rerun_payload_json IS NOT NULL"
)

_DONE = (
    "status = 'done', completed_at_ms = :now_ms, last_error = NULL, failure_reason = NULL, failure_class = NULL, "
    f"deferred_since_ms = NULL, {FREE}"
)

MARK_DONE = text(f"UPDATE mem_tree_jobs SET {_DONE} {_FREE_TO_SETTLE} {KEPT}")


_HELD_FIELDS = ", ".join(f"held_{field}" for field in CLAIM_FIELDS)

_MARK_HELD_DONE = f"""
    UPDATE mem_tree_jobs SET {_DONE} FROM held
    WHERE {" AND ".join(f"mem_tree_jobs.{field} = held_{field}" for field in CLAIM_FIELDS)}
        AND status = 'running' AND cancel_requested_at_ms IS NULL
    RETURNING id, claim_token, rerun_payload_json
    """


@lru_cache(maxsize=8)
def mark_done_many(claims: int) -> TextClause:
    """Return the statement that settles ``claims`` claims as :data:`MARK_DONE` does one.

    Parameters: ``now_ms``, and those of :func:`claim_parameters`. It returns each claim that it has settled, and
    the request that was kept with it; :data:`FIND_KEPT` finds the rest, which few need.
    """
    named = [f":{parameter}" for parameter in claim_parameters(claims)]
    width = len(CLAIM_FIELDS)
    values = ", ".join(f"({', '.join(named[start : start + width])})" for start in range(0, len(named), width))
    return text(f"WITH held ({_HELD_FIELDS}) AS (VALUES {values}) {_MARK_HELD_DONE}")


# The same for any number of claims, each field of theirs as one list: a server plans it in a moment.
_LISTS = ", ".join(f"CAST(:{field} AS {'TEXT' if field == 'id' else 'BIGINT'}[])" for field in CLAIM_FIELDS)

MARK_DONE_LISTED = text(f"WITH held ({_HELD_FIELDS}) AS (SELECT * FROM unnest({_LISTS})) {_MARK_HELD_DONE}")


@lru_cache(maxsize=8)
def claim_parameters(claims: int) -> tuple[str, ...]:
    """Return the parameters that name ``claims`` claims: claim by claim, each field with its number, as ``id_0``."""
    return tuple(f"{field}_{claim}" for claim in range(claims) for field in CLAIM_FIELDS)


MARK_FAILED = text(
    f"""
    UPDATE mem_tree_jobs
    SET status = 'failed', completed_at_ms = :now_ms, last_error = :last_error,
        failure_reason = :failure_reason, failure_class = :failure_class, {FREE}
    {_FREE_TO_SETTLE} {KEPT}
    """
)

MARK_RETRY = text(
    f"""
    UPDATE mem_tree_jobs
    SET status = 'ready', available_at_ms = :available_at_ms, last_error = :last_error,
        failure_reason = NULL, failure_class = NULL, {FREE}
    {_FREE_TO_SETTLE} {KEPT}
    """
)

# A defer gives its attempt back; it began deferring when it first did, unless it now reports progress.
MARK_DEFERRED = text(
    f"""
    UPDATE mem_tree_jobs
    SET status = 'ready', attempts = attempts - 1, available_at_ms = :available_at_ms, started_at_ms = NULL,
        last_error = :last_error, {FREE},
        deferred_since_ms = CASE WHEN :progress = 1 THEN NULL ELSE COALESCE(deferred_since_ms, :now_ms) END
    {_FREE_TO_SETTLE} {KEPT}
    """
)

RELEASE = text(
    f"""
    UPDATE mem_tree_jobs
    SET status = 'ready', attempts = attempts - 1, started_at_ms = NULL, {FREE}
    {_FREE_TO_SETTLE} {KEPT}
    """
)

CANCELLED = "status = 'cancelled', completed_at_ms = :now_ms, last_error = 'cancelled on request'"

MARK_CANCELLED = text(
    f"UPDATE mem_tree_jobs SET {CANCELLED}, {FREE} {HELD} AND cancel_requested_at_ms IS NOT NULL {KEPT}"
)

LOCK: Select[tuple[str]] = (
    select(column("id")).select_from(table("mem_tree_jobs")).where(column("id") == bindparam("id")).with_for_update()
)

CANCEL_READY = text(f"UPDATE mem_tree_jobs SET {CANCELLED}, {FREE} WHERE id = :id AND status = 'ready'")

# It takes back what was asked of the row so far, as it does for a ready row; what is asked later still runs.
REQUEST_CANCEL = text(
    """
    UPDATE mem_tree_jobs
    SET cancel_requested_at_ms = COALESCE(cancel_requested_at_ms, :now_ms),
        rerun_payload_json = CASE WHEN cancel_requested_at_ms IS NOT NULL THEN rerun_payload_json END
    WHERE id = :id AND status = 'running'
    """
)

RENEW = text(f"UPDATE mem_tree_jobs SET locked_until_ms = :locked_until_ms {HELD}")

NOTE_ERROR = text(f"UPDATE mem_tree_jobs SET last_error = :last_error {HELD}")

WATCH = text(
    "SELECT id, claim_token, attempts, started_at_ms, cancel_requested_at_ms FROM mem_tree_jobs "
    "WHERE status = 'running' AND id IN :ids"
).bindparams(bindparam("ids", expanding=True, type_=Text()))
