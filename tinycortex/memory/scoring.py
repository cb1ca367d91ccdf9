"""The cheap signals that admit a chunk or drop it (contract: table ``mem_tree_score``). Pure and deterministic."""

from collections.abc import Collection
from dataclasses import dataclass

from tinycortex.memory.entities import Entity, find_entities
from tinycortex.memory.words import list_words

_NO_TOKENS, _ENOUGH_TOKENS, _MANY_TOKENS, _TOO_MANY_TOKENS = 4, 24, 4_000, 16_000

_ENOUGH_WORDS = 10
"""Different words below which variety is no evidence: a lone "ok" is all variety."""

_WORD_GROWTH, _MANY_WORDS = 0.6, 60
"""How many different words a text is expected to have: so many words to this power, but never more."""

_SOURCE_WEIGHTS = {"document": 1.0, "file": 0.8, "email": 0.8, "chat": 0.6}
_OTHER_SOURCE_WEIGHT = 0.6

_INTERACTION_TAGS = frozenset({"reply", "replied", "sent", "starred", "pinned", "important"})
_ENTITY_TOKENS = 10
"""Tokens per entity at which density is full; a short text counts as one of enough tokens."""

# What a text is made of outweighs where it is from: repeated junk stays below the default threshold of
# 0.3 at any length, and two plain sentences get over it from any source.
_WEIGHTS = {
    "token_count": 0.12,
    "unique_words": 0.48,
    "metadata": 0.05,
    "source": 0.1,
    "interaction": 0.1,
    "entities": 0.15,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A chunk's signals, each 0 to 1, and what they add up to.

    Attributes:
        total: weighted sum of the signals.
        token_count_signal: 0 for next to nothing, full from 24 to 4,000 tokens, falling after.
        unique_words_signal: how many different words, measured by what a text of its length should have.
        metadata_weight: whether the source tagged it.
        source_weight: how much its kind of source is worth.
        interaction_weight: whether its tags say that someone dealt with it.
        entity_density: entities for its tokens.
        entities: what was found in it.
        reason: why it is dropped; None when it is kept.
    """

    total: float
    token_count_signal: float
    unique_words_signal: float
    metadata_weight: float
    source_weight: float
    interaction_weight: float
    entity_density: float
    entities: tuple[Entity, ...]
    reason: str | None

    @property
    def kept(self) -> bool:
        """Tell whether the chunk is admitted."""
        return self.reason is None


def score_text(
    text: str, *, source_kind: str, token_count: int, tags: Collection[str] = (), threshold: float = 0.3
) -> Score:
    """Score one text and decide its admission: a total of at least ``threshold`` admits it."""
    entities = tuple(find_entities(text))
    signals = {
        "token_count": _token_signal(token_count),
        "unique_words": _variety(list_words(text)),
        "metadata": 1.0 if tags else 0.5,
        "source": _SOURCE_WEIGHTS.get(source_kind, _OTHER_SOURCE_WEIGHT),
        "interaction": 1.0 if _INTERACTION_TAGS.intersection(tags) else 0.3,
        "entities": min(1.0, len(entities) * _ENTITY_TOKENS / max(token_count, _ENOUGH_TOKENS)),
    }
    total = round(sum(_WEIGHTS[name] * signal for name, signal in signals.items()), 6)
    return Score(
        total=total,
        token_count_signal=signals["token_count"],
        unique_words_signal=signals["unique_words"],
        metadata_weight=signals["metadata"],
        source_weight=signals["source"],
        interaction_weight=signals["interaction"],
        entity_density=signals["entities"],
        entities=entities,
        reason=None if total >= threshold else f"total {total:.3f} below {threshold:g}",
    )


def _token_signal(tokens: int) -> float:
    if tokens < _ENOUGH_TOKENS:
        return max(0.0, (tokens - _NO_TOKENS) / (_ENOUGH_TOKENS - _NO_TOKENS))
    if tokens <= _MANY_TOKENS:
        return 1.0
    return max(0.2, 1.0 - (tokens - _MANY_TOKENS) / (_TOO_MANY_TOKENS - _MANY_TOKENS))


def _variety(words: list[str]) -> float:
    if not words:
        return 0.0
    different = len(set(words))
    expected: float = min(len(words) ** _WORD_GROWTH, _MANY_WORDS)
    return round(min(1.0, different / expected) * min(1.0, different / _ENOUGH_WORDS), 6)
