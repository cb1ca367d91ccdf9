"""A clock that moves only when it is told to."""


class ManualClock:
    """A :class:`~tinycortex.domain.clock.Clock` for tests; it may be set back, as wall clocks are.

    Args:
        now_ms: where it stands at first (ms since the epoch, UTC).
    """

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        """Return where the clock stands (ms)."""
        return self._now_ms

    def advance(self, ms: int) -> None:
        """Move the clock by ``ms``; a negative number sets it back."""
        self._now_ms += ms

    def set(self, now_ms: int) -> None:
        """Set the clock to ``now_ms``."""
        self._now_ms = now_ms
