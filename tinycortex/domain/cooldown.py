"""How long a provider asks to be left alone, read off what a handler planned or raised."""

from tinycortex.domain import policy
from tinycortex.domain.failures import find_failure
from tinycortex.domain.outcomes import Defer, JobPlan


def cooldown_ms(result: JobPlan | BaseException, now_ms: int) -> int:
    """Return how long (ms) no LLM-bound job is to begin, a week at the most; 0 when nobody asked for that."""
    if isinstance(result, BaseException):
        failure = find_failure(result)
        asked_ms = 0 if failure is None or failure.retry_after_s is None else int(failure.retry_after_s * 1000)
    else:
        asked_ms = result.until_ms - now_ms if isinstance(result, Defer) and result.cooldown else 0
    return min(max(asked_ms, 0), policy.MAX_COOLDOWN_MS)
