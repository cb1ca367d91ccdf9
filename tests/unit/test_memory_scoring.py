"""Signals, admission and entities."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinycortex.memory.entities import MAX_ENTITIES, find_entities, list_topics, merge_entity_ids
from tinycortex.memory.scoring import Score, score_text
from tinycortex.memory.tokens import count_tokens


def score(text: str, source_kind: str = "file", **options: object) -> Score:
    return score_text(text, source_kind=source_kind, token_count=count_tokens(text), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "Met Anna today. She likes tea.",
        "Call the plumber about the sink. He charges by the hour.",
        "今日は会議がありました。来週また話します。",
        "Встреча перенесена на вторник. Нужно позвать Анну.",
        "# Plan\n\n- buy milk\n- write to bob@example.com\n",
        "The budget for the third quarter was approved yesterday by everyone in the room. " * 30,
    ],
)
@pytest.mark.parametrize("source_kind", ["file", "chat", "email", "document", "anything"])
def test_plain_notes_are_admitted(text: str, source_kind: str) -> None:
    """Two short sentences are worth keeping, wherever they come from."""
    assert score(text, source_kind).kept


@pytest.mark.parametrize("text", ["ok", "thanks!!", "aaaa aaaa aaaa", "lol " * 2_000, "!!!", "👍👍👍👍", "----\n" * 50])
@pytest.mark.parametrize("source_kind", ["file", "chat", "document"])
def test_junk_is_dropped(text: str, source_kind: str) -> None:
    """One word, one sign, or one word over and over is not, at any length."""
    verdict = score(text, source_kind)
    assert not verdict.kept
    assert verdict.reason is not None


@given(text=st.text(max_size=300), tags=st.lists(st.sampled_from(["starred", "work"])))
def test_signals_stay_in_bounds_and_repeat(text: str, tags: list[str]) -> None:
    """Every signal and the total are 0 to 1, and the same text scores the same."""
    first = score(text, tags=tags)
    for signal in (
        first.total,
        first.token_count_signal,
        first.unique_words_signal,
        first.metadata_weight,
        first.source_weight,
        first.interaction_weight,
        first.entity_density,
    ):
        assert 0 <= signal <= 1
    assert first == score(text, tags=tags)


def test_the_threshold_itself_admits() -> None:
    """Admission begins at the threshold, not above it."""
    total = score("Call Bob at noon.").total
    assert score("Call Bob at noon.", threshold=total).kept
    assert not score("Call Bob at noon.", threshold=total + 0.001).kept


def test_very_short_and_very_long_texts_signal_less() -> None:
    """Length is a plateau with two slopes."""
    signals = [
        score_text("x", source_kind="file", token_count=tokens).token_count_signal
        for tokens in (0, 4, 14, 24, 4_000, 10_000, 10**9)
    ]
    assert signals == [0, 0, 0.5, 1, 1, 0.5, 0.2]


def test_entities_are_found_once_and_by_canonical_name() -> None:
    """Case does not make two entities of one; the surface is as it was first written."""
    text = "Mail Alice@Example.com or alice@example.com, see https://Example.com/A?x=1. Ping @Bob #Launch #launch #42"
    found = {entity.id: entity.surface for entity in find_entities(text)}
    assert found == {
        "email:alice@example.com": "Alice@Example.com",
        "url:https://example.com/A?x=1": "https://Example.com/A?x=1",
        "handle:bob": "@Bob",
        "hashtag:launch": "#Launch",
    }
    assert list_topics(found) == ["launch"]


@pytest.mark.parametrize("text", ["# Heading", "a#b", "C# code", "me@", "http://", "x@y", "##no##", "mail@@host.com"])
def test_what_only_looks_like_an_entity_is_none(text: str) -> None:
    """Markdown, code and halves are left alone."""
    assert find_entities(text) == []


@pytest.mark.parametrize("text", ["a@" * 200_000, "a." * 300_000, "@" * 300_000, "#a" * 200_000, "http://" * 50_000])
def test_hostile_text_costs_linear_time(text: str) -> None:
    """No pattern goes back over what it has read."""
    assert len(find_entities(text)) <= MAX_ENTITIES


def test_merged_entities_are_sorted_and_bounded() -> None:
    """A summary of everything does not carry every entity."""
    merged = merge_entity_ids([[f"handle:{number:04}" for number in range(start, 500)] for start in (1, 0)])
    assert merged == [f"handle:{number:04}" for number in range(MAX_ENTITIES)]
