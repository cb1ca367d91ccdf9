"""Wakeup: tells idle workers that there may be something to do, instead of their asking again and again."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tinycortex.db import Database

_LOOK_EVERY_S = 0.05


class Wakeup:
    """Wakes the listeners after a commit of this process, and soon after one of another.

    Nothing hangs on it: a worker that misses a wake-up looks again after ``worker.idle_ms``.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._listeners: dict[object, Callable[[], object]] = {}
        self._idle = 0
        self._thread: threading.Thread | None = None

    def notify(self) -> None:
        """Wake every listener of this process."""
        if self._process == os.getpid():
            for key, wake in list(self._listeners.items()):
                try:
                    wake()
                except RuntimeError:  # its loop was closed under it; the commit that woke it stands all the same
                    self._listeners.pop(key, None)

    @contextmanager
    def listen(self, wake: Callable[[], object]) -> Iterator[None]:
        """Have ``wake`` called, in whatever thread, during the block."""
        if self._process != os.getpid():
            self._start_afresh()
        key = object()
        self._listeners[key] = wake
        try:
            yield
        finally:
            self._listeners.pop(key, None)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Look for other processes' commits during the block."""
        with self._changed:
            self._idle += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="tinycortex-wakeup", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._idle -= 1

    def close(self) -> None:
        """End the thread that looks; a later idle worker starts another one."""
        if self._process != os.getpid():
            return
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def _watch(self) -> None:
        this = threading.current_thread()
        watch = self._database.watch()
        try:
            while self._wait_for_idler(this):
                if watch.has_changed():
                    self.notify()
        finally:
            watch.close()

    def _wait_for_idler(self, this: threading.Thread) -> bool:
        """Wait until it is time to look again, and somebody to look for; False when the thread shall end."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is not this or self._idle > 0)
        if self._thread is this:
            time.sleep(_LOOK_EVERY_S)  # at half the cost of a wait that could be cut short
        return self._thread is this
