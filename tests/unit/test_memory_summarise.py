"""The extractive summariser: verbatim, in order, within budget, the same everywhere."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinycortex.memory.summarise import ExtractiveSummariser
from tinycortex.memory.tokens import count_tokens

SENTENCES = [
    "The deploy of the billing service failed on Monday.",
    "It rained.",
    "The billing service lost its database connection during the deploy.",
    "Somebody brought cake.",
    "We rolled the billing deploy back and restored the database.",
    "The weather was fine after that.",
]
TEXT = " ".join(SENTENCES)

summarise = ExtractiveSummariser().summarise


def test_the_most_telling_sentences_are_quoted_in_their_order() -> None:
    """What the text keeps coming back to is in; what it says once is out."""
    lines = summarise([TEXT], 5_000).split("\n")
    assert set(lines) <= set(SENTENCES)
    assert lines == sorted(lines, key=SENTENCES.index)
    assert "It rained." not in lines
    assert any("billing" in line for line in lines)


def test_a_summary_is_shorter_than_its_input() -> None:
    """A small input is summarised too, not copied, though the budget would allow it."""
    assert 0 < count_tokens(summarise([TEXT], 5_000)) <= count_tokens(TEXT) // 2


def test_a_sentence_that_two_chunks_share_is_quoted_once() -> None:
    """Overlap between chunks does not repeat itself in summaries."""
    text = summarise([TEXT, TEXT], 5_000)
    assert len(text.split("\n")) == len(set(text.split("\n")))


@pytest.mark.parametrize(
    "text", ["one", "no end of sentence here", "👩\u200d👩\u200d👧\u200d👦" * 50, "中文没有空格" * 50, "!!!"]
)
def test_a_text_never_becomes_nothing(text: str) -> None:
    """Whatever there is to quote is quoted, cut when it must be."""
    summary = summarise([text], 20)
    assert summary
    assert text.startswith(summary)
    assert count_tokens(summary) <= 20


@settings(deadline=None)
@given(texts=st.lists(st.text(max_size=200)), max_tokens=st.integers(5, 200))
def test_the_budget_is_kept(texts: list[str], max_tokens: int) -> None:
    """No summary is over its budget, and it is empty only for blank input."""
    summary = summarise(texts, max_tokens)
    assert count_tokens(summary) <= max_tokens
    assert bool(summary) == any(text.strip() for text in texts)


def test_fifty_thousand_tokens_keep_the_output_budget() -> None:
    """A full input budget becomes at most a full output budget."""
    text = " ".join(
        f"Item {number} of the plan is about topic {number % 97} and {number % 13}." for number in range(3_000)
    )
    assert 3_000 < count_tokens(summarise([text], 5_000)) <= 5_000


def test_the_hash_seed_does_not_matter() -> None:
    """Two processes summarise alike: nothing depends on the order of a set."""
    code = (
        "from tinycortex.memory.summarise import ExtractiveSummariser as S;"
        f"print(S().summarise([{TEXT!r}, 'Zebra apple mango. Apple zebra! Mango?'], 60))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1
