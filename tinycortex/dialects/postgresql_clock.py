"""The server's clock, which every machine that works on one database goes by."""

import time
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, event

from tinycortex.errors import StorageError

_READ_EVERY_S = 10.0
"""Monotonic clocks drift apart by less than a millisecond in this time."""

_LEAP_S = 1.0
"""The machine slept, or its clock was set, when its two clocks disagree by more."""

_NOW = "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"


@dataclass(frozen=True, slots=True)
class _Reading:
    """The server's clock (ms) at one instant of the machine's monotonic and wall clocks (s)."""

    server_ms: int
    monotonic_s: float
    wall_s: float

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.monotonic_s

    @property
    def holds(self) -> bool:
        """Tell whether the monotonic clock has counted all the time since, as it does not while a machine sleeps."""
        return abs(time.time() - self.wall_s - self.age_s) < _LEAP_S


class ServerClock:
    """Tells the time of the server: read now and then, and carried on by the monotonic clock in between.

    The machine's wall clock, and where it is set to, do not matter. It is late by at most the way of one
    answer, and never early. A reading rides on a transaction that begins anyway.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading: _Reading | None = None
        event.listen(engine, "begin", self._refresh)

    def now_ms(self) -> int:
        """Return the server's current instant in ms since the epoch, UTC.

        Raises:
            StorageError: it was never read, and cannot be.
        """
        reading = self._reading
        if reading is None or not reading.holds:
            reading = self._ask(reading)
        return reading.server_ms + int(reading.age_s * 1000)

    def _ask(self, last: _Reading | None) -> _Reading:
        try:
            with self._engine.connect() as connection:
                return self._read(connection)
        except StorageError:
            if last is None:
                raise
            return last  # nothing can be written with it before the server answers

    def _refresh(self, connection: Connection) -> None:
        reading = self._reading
        if reading is None or reading.age_s > _READ_EVERY_S or not reading.holds:
            self._read(connection)

    def _read(self, connection: Connection) -> _Reading:
        server_ms = int(connection.exec_driver_sql(_NOW).scalar_one())
        reading = self._reading = _Reading(server_ms, time.monotonic(), time.time())
        return reading
