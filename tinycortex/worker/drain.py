"""Draining: run what is due, and stop when nothing is."""

import threading
import time
from collections.abc import Callable, Collection

from tinycortex.domain.clock import Clock
from tinycortex.handlers.registry import HandlerRegistry
from tinycortex.repositories.jobs import JobRepository
from tinycortex.worker.step import WorkerStep

_POLL_S = 0.05


class Drain:
    """Runs steps until the queue has nothing for this process."""

    def __init__(self, step: WorkerStep, jobs: JobRepository, registry: HandlerRegistry, clock: Clock) -> None:
        self._step = step
        self._jobs = jobs
        self._registry = registry
        self._clock = clock

    def drain_until_idle(
        self,
        *,
        wait_ms: int = 0,
        on_step: Callable[[], object] | None = None,
        kinds: Collection[str] | None = None,
        stop: threading.Event | None = None,
    ) -> int:
        """Run steps until nothing is claimable; return how many jobs were run (spec: Worker loop).

        Args:
            wait_ms: also wait for jobs that come due within this time (ms), such as deferred ones.
            on_step: called after each job.
            kinds: the kinds to work on; all that are registered when None.
            stop: set to claim no more; the job that runs is still waited for.

        Raises:
            UnknownKindError: one of ``kinds`` has no handler here.
            StorageError: the database could not do its work.
        """
        kinds = self._registry.check_kinds(kinds)
        stop = stop or threading.Event()
        performed = 0
        while True:
            while not stop.is_set() and self._step.run_once(kinds):
                performed += 1
                if on_step is not None:
                    on_step()
            wanted = [spec.kind for spec in self._registry.list_specs()] if kinds is None else kinds
            due_at_ms = self._jobs.find_next_ready_at(wanted)
            if stop.is_set() or wait_ms == 0 or due_at_ms is None or due_at_ms - self._clock.now_ms() > wait_ms:
                return performed
            time.sleep(_POLL_S)
