"""Vectors: stable, normalised, and fair about what cannot be embedded."""

import hashlib
import math
from collections.abc import Sequence

import pytest

from tinycortex.errors import JobFailure
from tinycortex.memory.embedding import NOT_EMBEDDABLE, HashEmbedder, embed_each, pack_vector, unpack_vector


class Picky:
    """Has no vector for one text, and takes offence at another."""

    signature = "picky@1"

    def embed(self, texts: Sequence[str]) -> list[list[float] | None]:
        if "bad" in texts:
            raise ValueError("too long")
        return [None if text == "none" else [float(len(text))] for text in texts]


def test_vectors_have_length_one_and_depend_on_words_only() -> None:
    """Order, case and punctuation do not matter; other words do."""
    one, same, other = HashEmbedder().embed(["Alice met Bob", "bob, MET alice!", "nobody met Carol"])
    assert one is not None
    assert same is not None
    assert other is not None
    assert len(one) == 256
    assert math.isclose(math.fsum(value * value for value in one), 1)
    assert one == same
    assert one != other


def test_the_vector_of_a_text_is_the_same_everywhere() -> None:
    """A stored vector can be compared with one made years later on another machine."""
    vector = HashEmbedder().embed(["The deploy went out on Tuesday: the deploy, at last."])[0]
    assert vector is not None
    digest = hashlib.sha256(pack_vector(vector)).hexdigest()
    assert digest == "302b8921504022784699c42cb232324d9e6c775770ff6c6a2420140944b9778c"


@pytest.mark.parametrize("text", ["", " \n\u3000"])
def test_a_blank_text_has_no_vector(text: str) -> None:
    """There is nothing to hash."""
    assert HashEmbedder().embed([text]) == [None]


def test_signs_stand_in_for_words() -> None:
    """A text of emoji has a vector all the same."""
    assert HashEmbedder().embed(["👍👍"])[0] is not None


def test_one_text_at_fault_does_not_cost_the_others_their_vectors() -> None:
    """A text that the embedder blames or has nothing for gets a reason; the rest get vectors."""
    results = embed_each(Picky(), ["abc", "bad", "none", "de"])
    assert [result.vector for result in results] == [[3.0], None, None, [2.0]]
    assert [result.reason for result in results] == [None, "ValueError: too long", NOT_EMBEDDABLE, None]
    assert embed_each(Picky(), []) == []


def test_an_outage_blames_no_text() -> None:
    """Anything but a ValueError goes up, so that the job is tried again."""

    class Down(Picky):
        def embed(self, texts: Sequence[str]) -> list[list[float] | None]:
            raise ConnectionError(len(texts))

    with pytest.raises(ConnectionError):
        embed_each(Down(), ["abc"])


def test_an_embedder_that_miscounts_is_reported() -> None:
    """Vectors that cannot be told apart are not guessed at."""

    class Short(Picky):
        def embed(self, texts: Sequence[str]) -> list[list[float] | None]:
            return [[1.0]] * (len(texts) - 1)

    with pytest.raises(JobFailure) as failure:
        embed_each(Short(), ["a", "b"])
    assert failure.value.code == "bad_embedder"


def test_a_vector_that_is_not_finite_is_no_vector() -> None:
    """NaN would poison every comparison."""

    class Wild(Picky):
        def embed(self, texts: Sequence[str]) -> list[list[float] | None]:
            return [[math.nan]] * len(texts)

    assert embed_each(Wild(), ["a"])[0].vector is None


def test_vectors_are_stored_as_little_endian_floats() -> None:
    """The bytes are the contract's, and read back."""
    assert pack_vector([1.0, -2.0]) == b"\x00\x00\x80\x3f\x00\x00\x00\xc0"
    assert unpack_vector(pack_vector([1.0, -2.0])) == [1.0, -2.0]
