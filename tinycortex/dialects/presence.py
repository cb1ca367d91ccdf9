"""Presence of worker processes by lock files: the kernel frees a lock when its holder dies, however it dies."""

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import FileLock

logger = logging.getLogger(__name__)

_FOLDER_ATTEMPTS = 20


class FilePresence:
    """One locked file per worker in a folder beside the database.

    Process ids would do worse: they are reused, and mean nothing across containers that share the file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._process = os.getpid()
        self._held: dict[str, FileLock] = {}
        self._one_at_a_time = threading.Lock()

    def announce(self, worker_id: str) -> None:
        """Create and lock the worker's file. Where that is impossible, the worker's leases alone decide."""
        if self._process != os.getpid():
            self._start_afresh()  # what the parent holds is not this process's to give back
        if worker_id in self._held:
            return
        with self._one_at_a_time:
            if worker_id not in self._held:
                self._held[worker_id] = lock = _lock(self._path(worker_id))
                try:
                    self._acquire(lock)
                except OSError as error:
                    logger.warning("%s: no file for this worker (%s); its leases decide", self._folder, error)

    def _acquire(self, lock: "FileLock") -> None:
        # Another worker may remove the empty folder between its making and the file's.
        for _attempt in range(_FOLDER_ATTEMPTS):
            self._folder.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                lock.acquire()
                return
        raise FileNotFoundError(f"{self._folder} is removed as often as it is made")

    def withdraw(self) -> None:
        """Unlock and remove this object's files, and the folder when it was the last."""
        if self._process != os.getpid() or not self._held:  # who announced nobody has nothing to tidy up
            return
        with self._one_at_a_time:
            for worker_id, lock in self._held.items():
                if lock.is_locked:
                    self._path(worker_id).unlink(missing_ok=True)
                    lock.release()
            self._held.clear()
        self._remove_empty_folder()

    def find_dead(self, worker_ids: Iterable[str]) -> list[str]:
        """Return the workers whose file exists and is locked by nobody."""
        return [worker_id for worker_id in worker_ids if worker_id not in self._held and self._is_dead(worker_id)]

    def forget(self, worker_ids: Iterable[str]) -> None:
        """Remove the files of dead workers, once their rows are recovered."""
        for worker_id in worker_ids:
            self._path(worker_id).unlink(missing_ok=True)
        self._remove_empty_folder()

    def _is_dead(self, worker_id: str) -> bool:
        path = self._path(worker_id)
        if not path.exists():  # withdrawn, or a worker of another program: its lease decides
            return False
        lock = _lock(path)
        try:
            lock.acquire()
        except OSError:
            return False
        lock.release()
        return True

    def _path(self, worker_id: str) -> Path:
        # Hashed, because the id comes from a row that any program may have written.
        return self._folder / f"{hashlib.sha256(worker_id.encode()).hexdigest()[:32]}.lock"

    def _remove_empty_folder(self) -> None:
        with contextlib.suppress(OSError):  # not empty, or never made
            self._folder.rmdir()


def _lock(path: Path) -> "FileLock":
    from filelock import FileLock  # noqa: PLC0415 - a program that only enqueues locks no file

    # Announced in one thread and withdrawn in another, so the lock must not belong to a thread.
    return FileLock(path, blocking=False, thread_local=False)
