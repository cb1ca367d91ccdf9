"""Masks secrets and personal addresses in text that leaves the store (contract §4.13)."""

import re

LOG_MAX_BYTES = 1024
"""Bytes of UTF-8 that a scrubbed text may take, its note of what was left out included."""

MASK = "[redacted]"

_SCAN_CHARS = 16 * LOG_MAX_BYTES
"""What is scanned at all: far more than is shown, so that a secret across the cut is masked before it."""

_KEYWORD = r"(?:[A-Za-z0-9]{1,32}[_-]){0,4}(?:api[_-]?key|password|passwd|secret|token)"
_QUOTE = r"(?:\\?[\"'])"

_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, flags), replacement)
    for pattern, flags, replacement in (
        # scheme://user:password@host. The password may hold an @, so the last one before white space counts.
        (r"(\b[a-z][a-z0-9+.-]{0,30}://)[^\s\"'<>]{1,512}@", re.IGNORECASE, rf"\1{MASK}@"),
        (
            r"(\bauthorization[\"']?\s{0,4}[:=]\s{0,4}[\"']?basic\s{1,4})[A-Za-z0-9+/=_-]+",
            re.IGNORECASE,
            rf"\1{MASK}",
        ),
        # A token has a digit or is long, so that the words "bearer token rejected" stay readable.
        (r"(\bbearer\s{1,4})(?=[^\s]{0,64}\d|[^\s]{20})[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE, rf"\1{MASK}"),
        (r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?", 0, MASK),
        (r"\bsk-[A-Za-z0-9_-]{16,}", 0, MASK),
        (r"\bgh[pso]_[A-Za-z0-9]{20,}", 0, MASK),
        (r"\bgithub_pat_[A-Za-z0-9_]{10,}", 0, MASK),
        (r"\bxox[a-z]-[A-Za-z0-9-]{6,}", 0, MASK),
        (r"\bAKIA[A-Z0-9]{16}\b", 0, MASK),
        # name = "value", name: value, "name": "value", and the last with its quotes escaped. A short bare
        # number is a limit (max_token=5), not a secret.
        (
            (
                rf"((?<![A-Za-z0-9]){_KEYWORD}{_QUOTE}?\s{{0,4}}[:=]\s{{0,4}})(?!\d{{1,6}}(?![\w.+/=-]))"
                rf"(?:\\\"[^\"]*\\\"|\"(?:[^\"\\]|\\.)*\"?|'(?:[^'\\]|\\.)*'?|(?!\[redacted\])[^\s,;&\"'}}\])]+)"
            ),
            re.IGNORECASE,
            rf"\1{MASK}",
        ),
        (r"(?<![\w.+-])[\w.+-]{1,64}@(?:[\w-]{1,63}\.){1,8}[A-Za-z]{2,24}\b", 0, MASK),
    )
)


def scrub_for_log(text: str) -> str:
    """Return ``text`` with secrets masked, at most 1,024 bytes of UTF-8 (contract §4.13).

    What is longer ends in ``…(truncated, N more bytes)``. Idempotent; never raises, whatever the text.
    """
    readable = text.encode(errors="replace")
    scanned = text[:_SCAN_CHARS]
    left_out = len(readable) - len(scanned.encode(errors="replace"))
    scrubbed = scanned.encode(errors="replace").decode()
    for pattern, replacement in _RULES:
        scrubbed = pattern.sub(replacement, scrubbed)
    whole = scrubbed.encode()
    if left_out == 0 and len(whole) <= LOG_MAX_BYTES:
        return scrubbed
    total = len(whole) + left_out
    # The note's own length depends on the number in it; the largest number it can hold settles the room.
    room = LOG_MAX_BYTES - len(f"…(truncated, {total} more bytes)".encode())
    kept = whole[:room].decode(errors="ignore")
    return f"{kept}…(truncated, {total - len(kept.encode())} more bytes)"


_CREDENTIALS = re.compile(r"^([a-z][a-z0-9+.-]*://[^:/?#]*):[^/?#]*@", re.IGNORECASE)
_QUERY_SECRET = re.compile(r"([?&][^=&]*(?:password|passwd|secret|token|key)[^=&]*=)[^&#]*", re.IGNORECASE)


def mask_url(url: str) -> str:
    """Return a database URL with every password in it written as ``***``."""
    return _QUERY_SECRET.sub(r"\1***", _CREDENTIALS.sub(r"\1:***@", url))
