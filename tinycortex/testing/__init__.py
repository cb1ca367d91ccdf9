"""For tests of applications and of this package: a manual clock, fake delegates, factories."""

from tinycortex.testing.clock import ManualClock
from tinycortex.testing.delegates import FakeDelegates

__all__ = ["FakeDelegates", "ManualClock"]
