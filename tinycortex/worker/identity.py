"""Who a worker is: the word in ``locked_by``."""

import os
import secrets
import socket


class WorkerIdentity:
    """Names this process's worker. A forked child is somebody else, and gets a name of its own."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def current(self) -> str:
        """Return ``host:pid:nonce``; the nonce keeps a name from ever being used again."""
        process = os.getpid()
        if (name := self._names.get(process)) is not None:
            return name
        # One step, so that of several threads that come first all get one name.
        return self._names.setdefault(process, f"{socket.gethostname()}:{process}:{secrets.token_hex(8)}")
