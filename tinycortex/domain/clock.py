"""Wall-clock time as the queue stores it: whole milliseconds since the Unix epoch, UTC."""

import time
from datetime import UTC, datetime
from typing import Protocol

from tinycortex.domain import policy
from tinycortex.errors import InvalidInputError


class Clock(Protocol):
    """Source of the current instant."""

    def now_ms(self) -> int:
        """Return the current instant in ms since the epoch, UTC."""
        ...


class SystemClock:
    """The machine's wall clock."""

    def now_ms(self) -> int:
        """Return the current instant in ms since the epoch, UTC."""
        return time.time_ns() // 1_000_000


def flush_block(now_ms: int) -> tuple[str, int]:
    """Return the UTC date (ISO) and the 3-hour block (0..7) of one instant (spec: Dedupe keys).

    Both come from one reading, so the pair never straddles a boundary.
    """
    try:
        moment = datetime.fromtimestamp(now_ms // 1000, tz=UTC)
    except (OverflowError, OSError, ValueError) as error:
        raise InvalidInputError(f"no calendar has the instant {now_ms} ms") from error
    return moment.date().isoformat(), now_ms % 86_400_000 // policy.FLUSH_BLOCK_MS
