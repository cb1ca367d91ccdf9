"""What a caller may choose about a run of the worker, or about a drain."""

import threading
from collections.abc import Callable, Collection
from typing import TypedDict


class RunOptions(TypedDict, total=False):
    """How a worker works.

    Attributes:
        concurrency: jobs at a time; ``worker.concurrency`` when left out or None.
        kinds: the kinds to work on; all that are registered when left out or None.
        scheduler: whether to do the scheduler's work, too, as when left out. Without it somebody else must;
            leases are recovered in any case.
    """

    concurrency: int | None
    kinds: Collection[str] | None
    scheduler: bool


class DrainOptions(TypedDict, total=False):
    """How a drain works.

    Attributes:
        wait_ms: also wait for jobs that come due within this time (ms), such as deferred ones; 0 when left out.
        on_step: called after each job.
        kinds: the kinds to work on; all that are registered when left out or None.
        stop: set to claim no more; the job that runs is still waited for.
    """

    wait_ms: int
    on_step: Callable[[], object] | None
    kinds: Collection[str] | None
    stop: threading.Event | None
