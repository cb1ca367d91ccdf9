"""Summariser: many texts into one. The built-in one quotes their most telling sentences; no model is asked."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tinycortex.memory.tokens import clip_tokens, count_tokens
from tinycortex.memory.words import STOP_WORDS, list_words

_SENTENCE = re.compile(r"[^\n]*?(?:[.!?…][\"'\u201d\u2019»)\]]*(?=\s|$)|[。\uff01\uff1f]|(?=\n|$))", re.MULTILINE)

_SHARE = 3
"""A summary aims at one part in so many of its input, when the budget allows that much."""

_OPENING = 1.25
"""What the first sentence of a text counts for more: it tends to say what the text is about."""

_MIN_WORDS = 4
"""Words below which a sentence is priced as if it had so many, so that fragments do not win by density."""


class Summariser(Protocol):
    """Makes one summary of several texts.

    It may be slow, and is never called inside a transaction. A killed run calls it again with the same
    texts: only an answer that depends on nothing else makes both runs end alike.
    """

    def summarise(self, texts: Sequence[str], max_tokens: int) -> str:
        """Return a summary of at most ``max_tokens`` tokens, not empty unless every text is."""
        ...


@dataclass(frozen=True, slots=True)
class _Sentence:
    place: int
    text: str
    tokens: int
    words: list[str]
    opens: bool


class ExtractiveSummariser:
    """Quotes whole sentences, in their order, up to a third of the input and never over the budget.

    A sentence is worth the frequency of its words in the whole input, stop words left out, for its
    length. Deterministic, and linear in the input but for one sort of its sentences.
    """

    def summarise(self, texts: Sequence[str], max_tokens: int) -> str:
        """Return the most telling sentences, one a line; of a sentence that is over the budget, its start."""
        sentences = _list_sentences(texts)
        if not sentences:
            return ""
        frequency = Counter(word for sentence in sentences for word in sentence.words)
        telling = [sentence for sentence in sentences if sentence.words] or sentences
        ranked = sorted(telling, key=lambda sentence: (-_worth(sentence, frequency), sentence.place))
        total = sum(sentence.tokens for sentence in sentences)
        target = min(max_tokens, total // _SHARE)
        chosen, left = [], target
        for sentence in ranked:
            # A line break costs a token at most.
            if sentence.tokens + 1 <= left:
                chosen.append(sentence)
                left -= sentence.tokens + 1
        if not chosen:
            return clip_tokens(ranked[0].text, max_tokens)
        return "\n".join(sentence.text for sentence in sorted(chosen, key=lambda sentence: sentence.place))


def _list_sentences(texts: Sequence[str]) -> list[_Sentence]:
    # Chunks overlap, so a sentence may come twice; it counts once.
    sentences: dict[str, _Sentence] = {}
    for text in texts:
        opens = True
        for match in _SENTENCE.finditer(text):
            sentence = match.group().strip()
            if not sentence:
                continue
            if sentence not in sentences:
                words = [word for word in list_words(sentence) if word not in STOP_WORDS]
                sentences[sentence] = _Sentence(len(sentences), sentence, count_tokens(sentence), words, opens)
            opens = False
    return list(sentences.values())


def _worth(sentence: _Sentence, frequency: Counter[str]) -> float:
    # dict.fromkeys, not a set: floats must add up in one order in every process.
    gist = sum(frequency[word] for word in dict.fromkeys(sentence.words))
    return gist / max(len(sentence.words), _MIN_WORDS) * (_OPENING if sentence.opens else 1.0)
