"""From bytes to chunks: canonical text, cuts at the best places, and ids that depend on content alone."""

import codecs
import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from tinycortex.domain.text import find_text_fault
from tinycortex.errors import InvalidInputError
from tinycortex.memory.graphemes import find_boundary_after, find_boundary_before
from tinycortex.memory.tokens import MAX_SPACE_RUN, UNITS, clip_tokens, count_tokens, sum_weights

__all__ = ["Piece", "canonical_text", "chunk_id", "clip_tokens", "count_tokens", "split_text"]

MIN_CHUNK_TOKENS = 16
"""Room for two runs of white space and any one character between them, so no chunk is white space only."""

MAX_OVERLAP = 0.5

_LONG_SPACE = re.compile(rf"(?<!\s)(\s{{{MAX_SPACE_RUN}}})\s+")
_PARAGRAPH_END = re.compile(r"\n\s*\n\s*")
_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'\u201d\u2019»)\]]*\s+|(?<=[。\uff01\uff1f])(?!\s)|\n\s*")
_WORD_END = re.compile(r"\s+")

_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of a text.

    Attributes:
        text: what it says, the repeated part included.
        overlap: length of the prefix that it repeats from the piece before it (characters). The pieces
            without these prefixes, joined, are the text.
    """

    text: str
    overlap: int


def canonical_text(raw: bytes | str) -> str:
    r"""Return ``raw`` as the text that is cut into chunks.

    Bytes are UTF-8, or UTF-16 with a byte order mark. The mark goes, CRLF and CR become LF, and of a run
    of more than 64 white-space characters the first 64 stay. Nothing else changes: no Unicode
    normalisation, so that chunks quote their source letter by letter.

    Raises:
        InvalidInputError: the bytes are no such text, or the text has a NUL or a lone surrogate in it.
    """
    text = raw.removeprefix("\ufeff") if isinstance(raw, str) else _decode(raw)
    if fault := find_text_fault(text):
        raise InvalidInputError(f"contains {fault}, so it is no text; only text can be ingested")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _LONG_SPACE.sub(r"\1", text)


def _decode(raw: bytes) -> str:
    mark, encoding = next((known for known in _BOMS if raw.startswith(known[0])), (b"", "utf-8"))
    try:
        return raw[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"is not {encoding.upper()} text (byte {error.start + len(mark)}: {error.reason}); convert it to UTF-8"
        ) from error


def chunk_id(source_kind: str, source_id: str, sequence: int, content: str) -> str:
    """Return the id of one chunk: the same source, place and content give the same id in every database.

    The first 32 hex digits of SHA-256 over kind, source, sequence (32 bits, big-endian) and content,
    with a zero byte between them.
    """
    parts = (source_kind.encode(), source_id.encode(), sequence.to_bytes(4, "big"), content.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def split_text(text: str, max_tokens: int, overlap: float) -> list[Piece]:
    """Cut a canonical text into pieces of at most ``max_tokens`` tokens, overlap included.

    Cuts fall after a paragraph, else a sentence, else a word, else between two characters as readers see
    them, else anywhere. No piece is empty or white space only; a text that is has no pieces.

    Args:
        text: what :func:`canonical_text` returned.
        max_tokens: at least 16.
        overlap: share of ``max_tokens`` that a piece may repeat from the one before it (0 to 0.5).

    Raises:
        InvalidInputError: an argument is outside its bounds.
    """
    if max_tokens < MIN_CHUNK_TOKENS:
        raise InvalidInputError(f"a chunk needs room for {MIN_CHUNK_TOKENS} tokens, not {max_tokens}")
    if not 0 <= overlap <= MAX_OVERLAP:
        raise InvalidInputError(f"overlap is a share from 0 to {MAX_OVERLAP}, not {overlap}")
    if _LONG_SPACE.search(text):
        raise InvalidInputError(f"the text has over {MAX_SPACE_RUN} spaces in a row; pass it to canonical_text first")
    return list(_Splitter(text, max_tokens * UNITS, int(max_tokens * UNITS * overlap)).iter_pieces())


class _Splitter:
    """One text being cut; positions are indexes of characters."""

    def __init__(self, text: str, limit: int, overlap: int) -> None:
        self._text = text
        self._limit = limit
        self._overlap = overlap
        self._sums = sum_weights(text)
        self._last = len(text.rstrip())

    def iter_pieces(self) -> Iterator[Piece]:
        begin = start = 0  # the piece goes from begin; what is new in it goes from start
        while start < self._last:
            end = self._reach(begin)
            if end >= len(self._text):
                yield Piece(self._text[begin:], start - begin)
                return
            cut = self._find_cut(start, end)
            if cut is None:
                # Nothing new fits behind the overlap. Without it something always does.
                begin = start
                continue
            yield Piece(self._text[begin:cut], start - begin)
            begin, start = self._find_overlap(begin, cut), cut

    def _reach(self, begin: int) -> int:
        """Return the furthest end of a piece from ``begin``."""
        # A character weighs at least one unit, which bounds the search.
        high = min(len(self._sums), begin + self._limit + 2)
        return bisect_right(self._sums, self._sums[begin] + self._limit, begin, high) - 1

    def _find_cut(self, start: int, end: int) -> int | None:
        """Return the best cut in ``start..end`` with something readable on both of its sides."""
        text = self._text
        low = start + 1
        while low <= end and text[low - 1].isspace():
            low += 1
        high = min(end, self._last - 1)
        # A run of white space is never torn: its parts would weigh more than the whole.
        while high > low and text[high].isspace() and text[high - 1].isspace():
            high -= 1
        if high < low:
            return None
        floor = max(low, (start + high) // 2)
        for pattern in (_PARAGRAPH_END, _SENTENCE_END, _WORD_END):
            if (cut := self._last_match(pattern, floor, high)) is not None:
                return cut
        if text[high].isspace():
            return high
        return find_boundary_before(text, high, low, start) or high

    def _last_match(self, pattern: re.Pattern[str], low: int, high: int) -> int | None:
        ends = [match.end() for match in pattern.finditer(self._text, low, high)]
        # One that ends at ``high`` may be the torn part of a longer run of white space.
        while ends and self._text[ends[-1]].isspace():
            ends.pop()
        return ends[-1] if ends else None

    def _find_overlap(self, begin: int, cut: int) -> int:
        """Return where the next piece begins to repeat the one from ``begin`` to ``cut``."""
        earliest = max(bisect_left(self._sums, self._sums[cut] - self._overlap, begin, cut), begin + 1)
        if earliest >= cut:
            return cut
        for pattern in (_SENTENCE_END, _WORD_END):
            match = pattern.search(self._text, earliest, cut)
            if match is not None and match.end() < cut:
                return match.end()
        return find_boundary_after(self._text, earliest, cut, begin) or cut
