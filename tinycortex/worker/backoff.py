"""How long a worker's loop pauses after what it met (contract §3)."""

from tinycortex.config import WorkerSettings
from tinycortex.errors import (
    HostIOError,
    StorageBusyError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)

_PAUSES: tuple[tuple[type[StorageError], str], ...] = (
    (StorageBusyError, "busy_ms"),
    (StorageUnavailableError, "io_ms"),
    (StorageFullError, "disk_full_ms"),
    (HostIOError, "host_io_ms"),
    (StorageError, "other_ms"),
)


def pause_ms(error: StorageError, settings: WorkerSettings) -> int:
    """Return the pause (ms) that ``error`` calls for."""
    return next(int(getattr(settings, name)) for kind, name in _PAUSES if isinstance(error, kind))
