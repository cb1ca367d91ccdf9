"""Checksums of rows: what they must tell apart, and what they must not."""

import pytest

from tinycortex.domain.checksums import Checksum, Digest


def digest(*rows: tuple[object, ...]) -> Digest:
    checksum = Checksum()
    checksum.add(rows)
    return checksum.digest()


def test_the_order_of_the_rows_does_not_matter() -> None:
    """Each engine returns them in its own, and in portions of its own."""
    portions = Checksum()
    portions.add([("b", 2)])
    portions.add([("a", 1), ("c", 3)])
    assert portions.digest() == digest(("a", 1), ("b", 2), ("c", 3))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([("a", 1)], [("a", 2)]),
        ([("a", 1)], [("a", 1), ("a", 1)]),
        ([("a", 1), ("b", 2)], [("a", 2), ("b", 1)]),
        ([("ab", "c")], [("a", "bc")]),
        ([("a', 'b",)], [("a", "b")]),
        ([("1",)], [(1,)]),
        ([(1.0,)], [(1,)]),
        ([(b"a",)], [("a",)]),
        ([(None,)], [("None",)]),
        ([("",)], [(None,)]),
        ([("\xe9",)], [("e\u0301",)]),
        ([("\\xe9",)], [("\xe9",)]),
        ([(0.1,)], [(0.1 + 2**-56,)]),
        ([(2**63 - 1,)], [(-(2**63),)]),
    ],
)
def test_what_differs_has_another_checksum(one: list[tuple[object, ...]], other: list[tuple[object, ...]]) -> None:
    """In a value, in its type, in where one value ends, or in how often a row is there."""
    assert digest(*one) != digest(*other)


def test_both_zeros_are_one_number() -> None:
    """SQLite stores no negative zero, and PostgreSQL does."""
    assert digest((-0.0, "-0.0")) == digest((0.0, "-0.0"))
    assert digest((-0.0, "-0.0")) != digest((0.0, "0.0"))


def test_a_checksum_stays_the_same_from_release_to_release() -> None:
    """Two reports can be compared, whenever and by whichever Python they were made."""
    found = digest(("job:1", 1, 0.5, None, b"\x00\xff", "na\xefve \U0001f600"))
    assert found == Digest(1, "d6d9161b14c20e19cb722badf64e9056")
    assert digest() == Digest(0, "0" * 32)
