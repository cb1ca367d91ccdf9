"""Who a worker is: the word in ``locked_by``."""

import os
import secrets
import socket


class WorkerIdentity:
    """Names this process's worker. A forked child is somebody else, and gets a name of its own."""

    def __init__(self) -> None:
        self._process = 0
        self._name = ""

    def current(self) -> str:
        """Return ``host:pid:nonce``; the nonce keeps a name from ever being used again."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._name = f"{socket.gethostname()}:{self._process}:{secrets.token_hex(8)}"
        return self._name
