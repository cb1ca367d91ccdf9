"""Who a worker is: the word in ``locked_by``."""

import os
import secrets
import socket


class WorkerIdentity:
    """Names this process's worker. A forked child is somebody else, and gets a name of its own.

    Args:
        name: the readable part; ``host:pid`` when None.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name
        self._names: dict[int, str] = {}

    def current(self) -> str:
        """Return ``name:nonce``; the nonce keeps it from ever being used again, by two of one name either."""
        process = os.getpid()
        if (name := self._names.get(process)) is not None:
            return name
        readable = self._name or f"{socket.gethostname()}:{process}"
        # One step, so that of several threads that come first all get one name.
        return self._names.setdefault(process, f"{readable}:{secrets.token_hex(8)}")
