"""For tests of applications and of this package: a manual clock, fake delegates, factories."""

from typing import TYPE_CHECKING

from tinycortex.testing.clock import ManualClock
from tinycortex.testing.delegates import FakeDelegates

if TYPE_CHECKING:
    from tinycortex.testing.factories import ChunkRowFactory, JobRowFactory, NewJobFactory, insert_rows

__all__ = ["ChunkRowFactory", "FakeDelegates", "JobRowFactory", "ManualClock", "NewJobFactory", "insert_rows"]

_NEED_FACTORY_BOY = frozenset({"ChunkRowFactory", "JobRowFactory", "NewJobFactory", "insert_rows"})


def __getattr__(name: str) -> object:
    """Import the factories when one is first asked for: the rest of this package works without factory-boy."""
    if name not in _NEED_FACTORY_BOY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tinycortex.testing import factories  # noqa: PLC0415 - it needs factory-boy

    return getattr(factories, name)
