"""Checksums of rows: equal for equal rows, whatever engine keeps them and in whatever order it returns them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

_BYTES = 16


@dataclass(frozen=True, slots=True)
class Digest:
    """What a set of rows comes to.

    Attributes:
        rows: how many there are.
        checksum: hexadecimal digits over all of their values.
    """

    rows: int
    checksum: str


class Checksum:
    """Takes rows in any order, and keeps none of them."""

    def __init__(self) -> None:
        self._rows = 0
        self._sum = 0

    def add(self, rows: Iterable[Sequence[object]]) -> None:
        """Take rows of integers, floats, texts, bytes and None."""
        for row in rows:
            self._rows += 1
            # A sum does not depend on the order, and a row that is there twice does not cancel itself out.
            self._sum += int.from_bytes(blake2b(_canonical(row), digest_size=_BYTES).digest())

    def digest(self) -> Digest:
        """Return what was taken so far."""
        return Digest(self._rows, f"{self._sum % (1 << 8 * _BYTES):0{2 * _BYTES}x}")


def _canonical(row: Sequence[object]) -> bytes:
    # Python's own spelling tells types apart and escapes what could join two values; ascii() does not change
    # with Python's Unicode tables, as repr() does.
    spelt = ascii(tuple(row))
    if "-0.0" in spelt:  # the same number as 0.0, and SQLite stores it as that
        spelt = ascii(tuple(value + 0.0 if isinstance(value, float) else value for value in row))
    return spelt.encode()
