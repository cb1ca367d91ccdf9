"""Where a text may be cut without tearing a character that a reader sees as one."""

import unicodedata

_JOINERS = frozenset("\u200c\u200d")
_ZWJ = "\u200d"
_VIRAMA = 9
"""The combining class of the signs that tie an Indic consonant to the next."""


def is_boundary(text: str, index: int, start: int = 0) -> bool:
    """Tell whether ``text`` may be cut before ``index``: no combining mark, joiner or flag is torn.

    Args:
        text: the text.
        index: where to cut, above ``start`` and below the text's length.
        start: a known boundary; nothing before it is looked at.
    """
    before, after = text[index - 1], text[index]
    if before.isascii() and after.isascii():
        return True
    if before == _ZWJ or after in _JOINERS or _extends(after):
        return False
    if unicodedata.combining(before) == _VIRAMA and unicodedata.category(after) == "Lo":
        return False
    return not (_is_flag_half(before) and _is_flag_half(after) and _count_flag_halves(text, start, index) % 2)


def find_boundary_before(text: str, index: int, low: int, start: int) -> int | None:
    """Return the last boundary in ``low..index`` that tears no run of white space, or None."""
    cuts = (cut for cut in range(index, low - 1, -1) if not (text[cut - 1].isspace() and text[cut].isspace()))
    return next((cut for cut in cuts if is_boundary(text, cut, start)), None)


def find_boundary_after(text: str, index: int, high: int, start: int) -> int | None:
    """Return the first boundary in ``index..high-1`` that no white space follows, or None."""
    cuts = (cut for cut in range(index, high) if not text[cut].isspace())
    return next((cut for cut in cuts if is_boundary(text, cut, start)), None)


def _extends(char: str) -> bool:
    return (
        unicodedata.category(char) in {"Mn", "Mc", "Me"}  # marks and variation selectors
        or "\U0001f3fb" <= char <= "\U0001f3ff"  # skin tones
        or "\U000e0020" <= char <= "\U000e007f"  # the letters of a regional flag's tag
        or "\u1160" <= char <= "\u11ff"  # the later parts of a decomposed Hangul syllable
    )


def _is_flag_half(char: str) -> bool:
    return "\U0001f1e6" <= char <= "\U0001f1ff"


def _count_flag_halves(text: str, start: int, index: int) -> int:
    first = index
    while first > start and _is_flag_half(text[first - 1]):
        first -= 1
    return index - first
