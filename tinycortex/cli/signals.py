"""SIGINT and SIGTERM, for the commands that run until they are told to stop."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_STDERR = 2
_STOPPING = b"stopping; what runs may end, and a second signal ends this at once\n"


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets; a second one ends the process with 128 + its number.

    Nothing can hold either up: Python calls handlers in the main thread only, which may be waiting for a locked
    database, or asleep while another thread was given the signal. So a thread reads the numbers from where the
    interpreter writes them as they arrive. At the second one nothing is tidied up: what runs is left to its lease.

    After the block, and in a child that was forked inside, handlers are as they were before.
    """
    stop = threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    watcher = threading.Thread(target=_watch, args=(reader, stop), name="tinycortex-signals", daemon=True)
    watcher.start()
    earlier_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    earlier = {number: signal.signal(number, _let_pass) for number in SIGNALS}

    def restore() -> None:
        if writer.fileno() >= 0:
            for number, handler in earlier.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(earlier_fd)
            writer.close()

    def mask(how: int) -> None:
        if writer.fileno() >= 0:
            signal.pthread_sigmask(how, SIGNALS)

    def leave_to_parent() -> None:
        inside = writer.fileno() >= 0
        restore()
        if inside:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    # A child shares the socket: to terminate it, as a pool of processes does, would stop its parent. So it is
    # born with the signals blocked, and takes them once its handlers are its own.
    os.register_at_fork(
        before=lambda: mask(signal.SIG_BLOCK),
        after_in_parent=lambda: mask(signal.SIG_UNBLOCK),
        after_in_child=leave_to_parent,
    )
    try:
        yield stop
    finally:
        restore()
        watcher.join()
        reader.close()


def _watch(reader: socket.socket, stop: threading.Event) -> None:
    while number := reader.recv(1):
        if number[0] not in SIGNALS:
            continue
        if stop.is_set():
            os._exit(128 + number[0])
        stop.set()
        # In a thread of its own, since a reader that has stopped reading must not keep us from the second one.
        threading.Thread(target=_tell, daemon=True).start()


def _let_pass(_number: int, _frame: FrameType | None) -> None:
    """Do nothing; any handler makes the interpreter write the signal's number instead of ending the process."""


def _tell() -> None:
    # Straight to the descriptor: nobody who is in the middle of a line can hold this up at the program's end.
    with suppress(OSError):
        os.write(_STDERR, _STOPPING)
