"""What leaves the store carries no secret (contract §4.13)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinycortex.domain.redact import LOG_MAX_BYTES, mask_url, scrub_for_log

SECRET = "hunter2Hunter2Hunter2"  # noqa: S105 - made up


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {SECRET}",
        f"bearer {SECRET}",
        f"sk-{SECRET}",
        f"ghp_{SECRET}",
        f"ghs_{SECRET}",
        f"gho_{SECRET}",
        f"github_pat_{SECRET}",
        f"xoxb-{SECRET}",
        f"eyJhbGciOiJI.{SECRET}.{SECRET}",
        f"Authorization: Basic {SECRET}==",
        f"api_key={SECRET}",
        f"password: '{SECRET} with words'",
        f'{{"token": "{SECRET}"}}',
        f'{{\\"secret\\": \\"{SECRET}\\"}}',
        f"MY_API_KEY={SECRET}",
        f"postgresql://user:{SECRET}@host/db",
        f"postgresql://user:p@{SECRET}@host/db",
        f"{SECRET}@example.com",
    ],
)
def test_a_secret_is_masked(text: str) -> None:
    """Every kind of secret that the contract lists disappears."""
    assert SECRET not in scrub_for_log(f"before {text} after")


def test_an_access_key_is_masked() -> None:
    """A key of the form AKIA… disappears."""
    assert "AKIAABCDEFGHIJKLMNOP" not in scrub_for_log("key AKIAABCDEFGHIJKLMNOP used")


@pytest.mark.parametrize(
    "text", ["max_token=5", "bearer token rejected", "rate_limited: provider returned 429, retry in 30s", ""]
)
def test_ordinary_words_are_left_alone(text: str) -> None:
    """A limit, a phrase and a provider's message stay readable."""
    assert scrub_for_log(text) == text


@given(st.text())
def test_scrubbing_twice_changes_nothing_more(text: str) -> None:
    """Scrubbed text can be scrubbed again wherever it passes."""
    once = scrub_for_log(text)
    assert scrub_for_log(once) == once
    assert len(once.encode()) <= LOG_MAX_BYTES


@pytest.mark.parametrize("character", ["x", "é", "€", "😀"])
def test_a_long_text_is_cut_on_a_character_and_says_how_much_is_missing(character: str) -> None:
    """The cap holds, the cut is clean, and the note counts the bytes left out."""
    text = character * 5_000
    scrubbed = scrub_for_log(text)
    kept = scrubbed.count(character)
    left_out = (5_000 - kept) * len(character.encode())
    assert len(scrubbed.encode()) <= LOG_MAX_BYTES
    assert scrubbed == f"{character * kept}…(truncated, {left_out} more bytes)"


@pytest.mark.parametrize("text", ["a" * 10**6, "://" * 10**5, '"password":' * 10**5, "@" * 10**6, "\x00\ud800" * 9])
def test_hostile_text_is_scrubbed_too(text: str) -> None:
    """No text makes it raise or exceed the cap."""
    assert len(scrub_for_log(text).encode()) <= LOG_MAX_BYTES


def test_a_secret_across_the_cut_does_not_leak() -> None:
    """Masking comes before cutting."""
    assert "hunter" not in scrub_for_log("x" * 930 + f" password={SECRET}" + "y" * 500)


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("sqlite:///memory.db", "sqlite:///memory.db"),
        ("postgresql+psycopg://u:p@ss@host/db", "postgresql+psycopg://u:***@host/db"),
        ("postgresql://host/db?user=u&password=p", "postgresql://host/db?user=u&password=***"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, masked: str) -> None:
    """Messages name the database and keep its password."""
    assert mask_url(url) == masked
