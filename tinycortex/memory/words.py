"""Words of a text, for scoring, summaries and embeddings alike."""

import re

# Chinese and Japanese put no spaces between words, so there each character counts as one.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")

_STOP_WORDS = """
    a about after all also am an and any are as at be because been before but by can could did do does for from
    get got had has have he her here him his how i if in into is it its just like me more most my no not now of
    on one only or our out over said she so some such than that the their them then there these they this those
    through to too up us very was we were what when where which while who why will with would you your
"""

STOP_WORDS = frozenset(_STOP_WORDS.split())
"""English words that say nothing about a text's subject."""


def list_words(text: str) -> list[str]:
    """List the words of ``text`` in their order, in lower case."""
    return _WORD.findall(text.lower())
