"""Entities that a pattern can find: e-mail addresses, URLs, handles and hashtags."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

MAX_ENTITIES = 100
"""Entities kept of one node."""

_MAX_URL = 1_000

# Each repetition is bounded, and a match cannot begin inside another, so hostile text costs linear time.
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[\w-]{1,63}\.){1,8}[A-Za-z]{2,24}\b")
_URL = re.compile(rf"(?<![\w])https?://[^\s<>\"'`)\]}}]{{1,{_MAX_URL}}}", re.IGNORECASE)
_HANDLE = re.compile(r"(?<![\w@./+-])@([A-Za-z0-9_][\w-]{0,62})(?![\w@])")
_HASHTAG = re.compile(r"(?<![\w#&/])#(\w{0,63}[^\W\d_]\w{0,63})(?![\w#])")


@dataclass(frozen=True, slots=True)
class Entity:
    """One entity of a text.

    Attributes:
        id: kind and canonical name, such as ``email:alice@example.com``.
        kind: ``email``, ``url``, ``handle`` or ``hashtag``.
        surface: how the text writes it, where it first does.
        score: how sure the pattern is (0 to 1).
    """

    id: str
    kind: str
    surface: str
    score: float

    @classmethod
    def of_id(cls, entity_id: str) -> "Entity":
        """Return the entity that an id names; its surface is its canonical name."""
        kind, _, name = entity_id.partition(":")
        return cls(entity_id, kind, name, _CONFIDENCE.get(kind, 0.5))


_CONFIDENCE = {"email": 1.0, "url": 1.0, "handle": 0.8, "hashtag": 0.8}


def _canonical_url(surface: str) -> str:
    scheme, _, rest = surface.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme.lower()}://{host.lower()}{slash}{path}"


_PATTERNS: tuple[tuple[str, re.Pattern[str], Callable[[str], str]], ...] = (
    ("email", _EMAIL, str.lower),
    ("url", _URL, _canonical_url),
    ("handle", _HANDLE, str.lower),
    ("hashtag", _HASHTAG, str.lower),
)


def find_entities(text: str) -> list[Entity]:
    """Return the entities of ``text``, each once, sorted by id; at most :data:`MAX_ENTITIES`."""
    found: dict[str, Entity] = {}
    for entity in _iter_entities(text):
        found.setdefault(entity.id, entity)
    return sorted(found.values(), key=lambda entity: entity.id)[:MAX_ENTITIES]


def merge_entity_ids(groups: Iterable[Iterable[str]]) -> list[str]:
    """Return the union of several nodes' entity ids, sorted; at most :data:`MAX_ENTITIES`."""
    return sorted({entity_id for group in groups for entity_id in group})[:MAX_ENTITIES]


def list_topics(entity_ids: Iterable[str]) -> list[str]:
    """List the names of the hashtags among ``entity_ids``, in their order."""
    return [entity_id.removeprefix("hashtag:") for entity_id in entity_ids if entity_id.startswith("hashtag:")]


def _iter_entities(text: str) -> Iterator[Entity]:
    for kind, pattern, canonical in _PATTERNS:
        for match in pattern.finditer(text):
            surface = match.group().rstrip(".,;:!?") if kind == "url" else match.group()
            name = canonical(match.group(1) if match.re.groups else surface)
            yield Entity(f"{kind}:{name}", kind, surface, _CONFIDENCE[kind])
