"""Work that goes on beside a test: a worker's loop in a thread, other programs, and waiting for what they do."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tinycortex import Cortex

BOUND_S = 60.0
"""Longer than anything here takes; only a hang reaches it."""


def until(condition: Callable[[], object]) -> None:
    """Return as soon as ``condition`` holds."""
    give_up = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < give_up, "it never came about"
        time.sleep(0.005)


class Worker:
    """A loop in a thread.

    Attributes:
        ended: whether it has returned or raised.
        error: what it raised.
    """

    def __init__(self, cortex: Cortex, way: str = "run_sync") -> None:
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._cortex = cortex
        self._way = way
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tell the loop to stop, and wait for its end."""
        self._stop.set()
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            if self._way == "run_sync":
                self._cortex.run_sync(self._stop)
            else:
                asyncio.run(self._run())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.error = error
        finally:
            self.ended.set()

    async def _run(self) -> None:
        stop = asyncio.Event()
        working = asyncio.create_task(self._cortex.run(stop))
        while not (working.done() or self._stop.is_set()):
            await asyncio.wait({working}, timeout=0.005)
        stop.set()
        await working


@contextmanager
def working(cortex: Cortex, way: str = "run_sync") -> Iterator[Worker]:
    """Run a worker during the block; what its loop raises is raised at the end."""
    worker = Worker(cortex, way)
    try:
        yield worker
    finally:
        worker.stop()
        if worker.error is not None:
            raise worker.error


@contextmanager
def program(code: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program during the block; it and its children are killed when they still run at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end of a program; return its exit code and what it wrote."""
    out, err = process.communicate(timeout=BOUND_S)
    return process.returncode, out, err
