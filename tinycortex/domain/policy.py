"""Every figure and every pure rule of the queue (contract §3). Times are milliseconds unless named."""

import random

DEFAULT_MAX_ATTEMPTS = 5
REEMBED_MAX_ATTEMPTS = 3
DEFAULT_LOCK_DURATION_MS = 5 * 60 * 1000
DEFAULT_LLM_PERMITS = 1

RETRY_BASE_MS = 60_000
RETRY_CAP_MS = 3_600_000
RETRY_JITTER = 0.1

MIN_DEFER_MS = 50
MAX_DEFER_AGE_MS = 7 * 24 * 3_600_000
MAX_COOLDOWN_MS = 7 * 24 * 3_600_000
REEMBED_BACKFILL_REVISIT_MS = 750

DEFAULT_FLUSH_AGE_SECS = 3_600
FLUSH_BLOCK_MS = 3 * 3_600_000

HEAL_BASE_MS = 10 * 60_000
HEAL_CAP_MS = 24 * 3_600_000

LAST_ERROR_MAX_BYTES = 64 * 1024
"""Bytes of UTF-8 that ``last_error`` may take."""

MAX_TIME_MS = 2**63 - 1
"""The largest instant a column can hold."""

REASON_LEASE_EXPIRED = "lease_expired"
REASON_MALFORMED_PAYLOAD = "malformed_payload"
REASON_DEFER_AGE = "defer_age_exceeded"
REASON_SUPERSEDED = "superseded"
REASON_TIMEOUT = "timeout"
NOTE_RECOVERED = "recovered_from_stale_lock"


def budget_of(max_attempts: object) -> int:
    """Return how many attempts a row has, one at least; another program's row may have none, or no number."""
    return max(max_attempts, 1) if isinstance(max_attempts, int) else 1


def backoff_ms(attempts: int) -> int:
    """Return the delay before the next try after ``attempts`` failed ones (spec: Claiming and ordering).

    ``min(60 s · 2^(attempts-1), 1 h)``; zero counts as one, and no number overflows.
    """
    doublings = max(attempts, 1) - 1
    # Past the cap the power is not computed at all, so a hostile count costs nothing.
    return RETRY_CAP_MS if doublings >= RETRY_CAP_MS.bit_length() else min(RETRY_BASE_MS << doublings, RETRY_CAP_MS)


def retry_delay_ms(attempts: int, jitter: float = RETRY_JITTER) -> int:
    """Return :func:`backoff_ms` plus up to ``jitter`` of itself, so that jobs that fail together spread out.

    Never below the base delay. ``jitter=0`` gives the exact delay.
    """
    base = backoff_ms(attempts)
    return base + int(base * jitter * random.random())  # noqa: S311 - spreads retries; nothing secret hangs on it


def heal_spacing_ms(heals: int) -> int:
    """Return how long after its failure a row healed ``heals`` times before may be healed again.

    Zero the first time, then ``10 min · 2^(heals-1)``, at most 24 h.
    """
    if heals <= 0:
        return 0
    return HEAL_CAP_MS if heals > HEAL_CAP_MS.bit_length() else min(HEAL_BASE_MS << (heals - 1), HEAL_CAP_MS)
