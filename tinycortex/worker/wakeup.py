"""Wakeup: tells idle workers that there may be something to do, instead of their asking again and again."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tinycortex.db import Database
from tinycortex.dialects import Watch
from tinycortex.errors import StorageError
from tinycortex.threads import SerialThread

_WATCH_S = 1.0
"""How long the watching may go on once nobody is idle any more."""

_LOOK_BUSY_S = 5.0
"""How often to look while nobody is idle: what is announced to a process must not pile up before it."""

_BETWEEN_NOTICES_S = 0.005
"""What is committed within this time is announced together."""


class Wakeup:
    """Wakes the listeners after a commit of this process, and as soon as it is told of one of another.

    Nothing hangs on it: a worker that misses a wake-up looks again after ``worker.idle_ms``.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._herald = SerialThread("tinycortex-herald")
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._listeners: dict[object, Callable[[], object]] = {}
        self._idle = 0
        self._thread: threading.Thread | None = None
        self._watch: Watch | None = None
        self._is_announcing = False

    @property
    def is_live(self) -> bool:
        """Whether commits of other processes are told; if not, an idle worker does well to look for itself."""
        watch = self._watch
        return watch is not None and watch.is_live

    def notify(self) -> None:
        """Wake every listener of this process, and soon those of others."""
        if self._process != os.getpid():
            self._start_afresh()
        self._wake()
        if self._database.must_announce and not self._is_announcing:
            self._is_announcing = True
            self._herald.submit(self._announce)

    def _wake(self) -> None:
        for key, wake in list(self._listeners.items()):
            try:
                wake()
            except RuntimeError:  # its loop was closed under it; the commit that woke it stands all the same
                self._listeners.pop(key, None)

    def _announce(self) -> None:
        # A thread's work, and after the commit: to notify inside it would have the commits of all processes wait
        # for each other's disk.
        self._is_announcing = False  # first, since what is committed from now on may come too late for this notice
        with suppress(StorageError):
            self._database.announce()
        time.sleep(_BETWEEN_NOTICES_S)

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
        """Be told of other processes' commits at once during the block."""
        with self._changed:
            self._idle += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="tinycortex-wakeup", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._idle -= 1

    def close(self) -> None:
        """Announce what has been committed, and end the threads; a later use starts them anew."""
        if self._process != os.getpid():
            return
        self._herald.close()
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify_all()
            if self._watch is not None:
                self._watch.interrupt()
        if thread is not None:
            thread.join()

    def _serve(self) -> None:
        this = threading.current_thread()
        watch = self._database.watch()
        with self._changed:
            if self._thread is this:
                self._watch = watch
        try:
            while self._thread is this:
                # Listeners that are not idle are told too: they may have looked already, and be idle in a moment.
                if watch.wait(_WATCH_S if self._wait_for_idler(this) else 0):
                    self._wake()
        finally:
            with self._changed:
                if self._watch is watch:
                    self._watch = None
            watch.close()

    def _wait_for_idler(self, this: threading.Thread) -> bool:
        """Wait until somebody is idle, or it is time to look all the same; tell whether somebody is."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is not this or self._idle > 0, timeout=_LOOK_BUSY_S)
            return self._idle > 0
