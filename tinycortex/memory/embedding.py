"""Embedder: texts into vectors. The built-in one hashes words; no model is asked."""

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from tinycortex.errors import JobFailure
from tinycortex.memory.words import list_words

Vector = Sequence[float]

NOT_EMBEDDABLE = "the embedder has no vector for this text"


class Embedder(Protocol):
    """Makes vectors of texts.

    Attributes:
        signature: names the model and its dimensions; vectors of two signatures are never compared.
    """

    @property
    def signature(self) -> str:
        """Return the name under which the vectors are stored."""
        ...

    def embed(self, texts: Sequence[str]) -> Sequence[Vector | None]:
        """Return one vector for each text, and None for a text that has none and never will.

        Raises:
            ValueError: a text is the fault. The texts are then asked for one by one, and those that
                raise it again are marked as skipped.
            Exception: anything else is an outage: nothing is marked, and the job is tried again.
        """
        ...


class HashEmbedder:
    """Hashes words into 256 signed dimensions, normalised to length 1; the same bytes on every platform."""

    signature = "hash-v1@256"
    _DIMENSIONS = 256

    def embed(self, texts: Sequence[str]) -> list[list[float] | None]:
        """Return one vector for each text; None for a text without any word or sign in it."""
        return [self._embed_one(text) for text in texts]

    def _embed_one(self, text: str) -> list[float] | None:
        # A text of emoji or dashes has no words; its characters stand in.
        features = Counter(list_words(text) or [char for char in text if not char.isspace()])
        sums = [0.0] * self._DIMENSIONS
        for feature, count in features.items():
            place, sign = _place(feature, self._DIMENSIONS)
            # Square roots are exact in IEEE arithmetic; logarithms differ between platforms.
            sums[place] += sign * math.sqrt(count)
        length = math.sqrt(math.fsum(value * value for value in sums))
        return [value / length for value in sums] if length else None


@lru_cache(maxsize=65_536)
def _place(feature: str, dimensions: int) -> tuple[int, int]:
    number = int.from_bytes(hashlib.blake2b(feature.encode("utf-8", "replace"), digest_size=8).digest(), "little")
    return (number >> 1) % dimensions, 1 if number & 1 else -1


@dataclass(frozen=True, slots=True)
class Embedded:
    """What became of one text: a vector, or the reason why there is none."""

    vector: Vector | None
    reason: str | None = None


def embed_each(embedder: Embedder, texts: Sequence[str]) -> list[Embedded]:
    """Embed ``texts`` together, and one by one when one of them is at fault.

    Raises:
        JobFailure: the embedder returned something other than one vector for each text.
        Exception: what the embedder raised, unless it blames a text.
    """
    if not texts:
        return []
    try:
        vectors = embedder.embed(texts)
    except ValueError as error:
        if len(texts) == 1:
            return [Embedded(None, f"{type(error).__name__}: {error}"[:500])]
        return [embedded for text in texts for embedded in embed_each(embedder, [text])]
    if len(vectors) != len(texts):
        raise JobFailure.unrecoverable(
            "bad_embedder", f"{embedder.signature} returned {len(vectors)} vectors for {len(texts)} texts"
        )
    return [_check(vector) for vector in vectors]


def _check(vector: Vector | None) -> Embedded:
    if vector is None or len(vector) == 0:
        return Embedded(None, NOT_EMBEDDABLE)
    if not all(map(math.isfinite, vector)):
        return Embedded(None, "the embedder's vector is not finite")
    return Embedded(vector)


def pack_vector(vector: Vector) -> bytes:
    """Return a vector as the tables hold it: little-endian 32-bit floats."""
    return struct.pack(f"<{len(vector)}f", *vector)


def unpack_vector(blob: bytes) -> list[float]:
    """Return the vector that :func:`pack_vector` packed."""
    return list(struct.unpack(f"<{len(blob) // 4}f", blob))
