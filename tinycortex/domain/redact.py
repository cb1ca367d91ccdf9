"""Masks secrets and personal addresses in text that leaves the store (contract §4.13)."""

import re

LOG_MAX_BYTES = 1024
MASK = "[redacted]"

_KEYWORD = r"(?:[A-Za-z0-9]+[_-])*(?:api[_-]?key|password|passwd|secret|token)"

_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, flags), replacement)
    for pattern, flags, replacement in (
        # scheme://user:password@host; the password may itself hold an @, so the last one before the host counts.
        (r"(?P<keep>\b[a-z][a-z0-9+.-]{0,30}://)[^\s/?#\"'<>]{1,512}@", re.IGNORECASE, rf"\g<keep>{MASK}@"),
        (
            r"(?P<keep>\bauthorization[\"']?\s{0,4}[:=]\s{0,4}[\"']?basic\s{1,4})[A-Za-z0-9+/=_-]+",
            re.IGNORECASE,
            rf"\g<keep>{MASK}",
        ),
        # A token has a digit or is long, so that the words "bearer token rejected" stay readable.
        (
            r"(?P<keep>\bbearer\s{1,4})(?=\S*\d|\S{20})[A-Za-z0-9._~+/=-]{6,}",
            re.IGNORECASE,
            rf"\g<keep>{MASK}",
        ),
        (r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?", 0, MASK),
        (r"\bsk-[A-Za-z0-9_-]{16,}", 0, MASK),
        (r"\bgh[pso]_[A-Za-z0-9]{20,}", 0, MASK),
        (r"\bgithub_pat_[A-Za-z0-9_]{10,}", 0, MASK),
        (r"\bxox[a-z]-[A-Za-z0-9-]{6,}", 0, MASK),
        (r"\bAKIA[A-Z0-9]{16}\b", 0, MASK),
        # name = "value", name: value, "name": "value". A bare number is a limit (max_token=5), not a secret.
        (
            rf"(?P<keep>(?<![A-Za-z0-9])[\"']?{_KEYWORD}[\"']?\s{{0,4}}[:=]\s{{0,4}})"
            rf"(?!\d{{1,6}}(?![\w.+/=-]))(?:\"(?:[^\"\\]|\\.)*\"?|'(?:[^'\\]|\\.)*'?|(?!\[redacted\])[^\s,;&\"'}}\])]+)",
            re.IGNORECASE,
            rf"\g<keep>{MASK}",
        ),
        (r"(?<![\w.+-])[\w.+-]{1,64}@(?:[\w-]{1,63}\.){1,8}[A-Za-z]{2,24}\b", 0, MASK),
    )
)


def mask_url(url: str) -> str:
    from sqlalchemy import make_url

    return make_url(url).render_as_string(hide_password=True)


def scrub_for_log(text: str) -> str:
    return text
