"""Token estimates without a tokeniser: deliberately high, and the one measure of every limit and budget.

Counting four characters a token under-estimates hex, base64, CJK and emoji by up to eight times, and a
text that exceeds a model's limit fails for good. Here each character has a weight of its own, so
that any cut of a text can be priced from prefix sums, at the speed of ``bytes.translate``.
"""

import re
from array import array
from bisect import bisect_right
from itertools import accumulate

UNITS = 16
"""Weights are sixteenths of a token."""

MAX_SPACE_RUN = 64
"""White-space characters that one run may have in a canonical text."""

_LETTER, _SPACE, _DENSE = 3, 8, 12
# By the lead byte of its UTF-8: a character of 2, 3 or 4 bytes costs 1, 1½ or 3 tokens.
_BEYOND_ASCII = ((0xF0, 48), (0xE0, 24), (0x80, 16))

_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
_LONGER_SPACE = re.compile(r"\s\s+")
_ODD_SPACE = re.compile(r"[^\S\x00-\x7f]")
# Hex, base64 and their like: no tokeniser knows such words, whatever their letters.
_DENSE_RUN = re.compile(r"[A-Za-z0-9+/=_-]{25,}")


def _weigh_byte(byte: int) -> int:
    char = chr(byte)
    if not char.isascii():
        return next(weight for lead, weight in _BEYOND_ASCII if byte >= lead)
    return _LETTER if char.islower() else _SPACE if char.isspace() else _DENSE


_WEIGHTS = bytes(_weigh_byte(byte) for byte in range(256))


def weigh(text: str) -> bytearray:
    """Return one weight for each character of ``text``, in :data:`UNITS` of a token.

    A lower-case ASCII letter 3, other ASCII 12, beyond ASCII 16 to 48; a run of white space 8 and 1 for
    each further character, since a word costs about one token however short; all of a run of 25 or more
    letters and digits 12. Cut out of a longer text between runs of white space, a part weighs no more
    alone than it does in its place.
    """
    spaced = _ODD_SPACE.sub(" ", text)
    # Dropping continuation bytes leaves exactly one byte for each character.
    weights = bytearray(spaced.encode("utf-8", "surrogatepass").translate(_WEIGHTS, _CONTINUATION_BYTES))
    for run in _DENSE_RUN.finditer(text):
        weights[run.start() : run.end()] = bytes([_DENSE]) * (run.end() - run.start())
    for run in _LONGER_SPACE.finditer(text):
        weights[run.start() + 1 : run.end()] = b"\x01" * (run.end() - run.start() - 1)
    return weights


def sum_weights(text: str) -> "array[int]":
    """Return the prefix sums of :func:`weigh`: item ``i`` is the weight of the first ``i`` characters."""
    return array("q", accumulate(weigh(text), initial=0))


def count_tokens(text: str) -> int:
    """Estimate the tokens of ``text``, rather too high than too low; 0 for an empty text only."""
    return -(-sum(weigh(text)) // UNITS)


def clip_tokens(text: str, max_tokens: int) -> str:
    """Return the longest prefix of at most ``max_tokens`` tokens; of a text with any, at least a character."""
    sums = sum_weights(text)
    end = bisect_right(sums, max_tokens * UNITS) - 1
    return text[: max(end, 1)]
