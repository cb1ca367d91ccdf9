"""What text a database column of ours may hold, and how other text is made to fit.

SQLite stores NUL and PostgreSQL refuses it; neither can encode a lone surrogate. Keys, ids and payloads
are refused at the door; error text, which must never be lost, is mended.
"""

from typing import Annotated

from pydantic import AfterValidator

from tinycortex.domain import policy
from tinycortex.errors import InvalidInputError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def find_text_fault(text: str) -> str | None:
    """Return what keeps ``text`` out of the database (NUL or a lone surrogate), or None."""
    if "\x00" in text:
        return "a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "a lone surrogate"
    return None


def check_text(text: str) -> str:
    """Return ``text`` unchanged, or raise :class:`InvalidInputError` when no database can hold it."""
    if fault := find_text_fault(text):
        raise InvalidInputError(f"text contains {fault}, which the database cannot hold; remove it first")
    return text


StoredText = Annotated[str, AfterValidator(check_text)]
"""A pydantic string that every supported database stores unchanged."""


def mend_text(text: str) -> str:
    """Return ``text`` with NUL and lone surrogates replaced by U+FFFD."""
    if find_text_fault(text) is None:
        return text
    cleaned = text.replace("\x00", REPLACEMENT)
    return "".join(REPLACEMENT if "\ud800" <= char <= "\udfff" else char for char in cleaned)


def clip_bytes(text: str, max_bytes: int) -> str:
    """Return the longest prefix of ``text`` that takes at most ``max_bytes`` of UTF-8 and ends on a character."""
    # A character takes at least one byte, so cutting first keeps a huge text from being encoded whole.
    return text[:max_bytes].encode()[:max_bytes].decode(errors="ignore")


def error_text(text: str) -> str:
    """Return ``text`` as ``last_error`` stores it: mended, and at most 64 KiB on a character boundary."""
    return clip_bytes(mend_text(text[: policy.LAST_ERROR_MAX_BYTES]), policy.LAST_ERROR_MAX_BYTES)
