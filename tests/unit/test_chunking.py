"""Text into chunks: nothing lost, nothing over the limit, nothing torn."""

import hashlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tinycortex.errors import InvalidInputError
from tinycortex.memory.chunking import Piece, canonical_text, chunk_id, split_text
from tinycortex.memory.tokens import clip_tokens, count_tokens

FAMILY = "👩\u200d👩\u200d👧\u200d👦"
PERSIAN = "می\u200cخواهم کتاب\u200cها را بخوانم. "  # noqa: RUF001 - Persian, with its zero-width non-joiners

# Letters, digits, every sort of white space, marks, joiners, flags and astral characters, often repeated.
ALPHABET = "ab Z9-.!? \n\t\u00a0\u2007\u3000é\u0301\u200d\u200c👩👧🇩🇪中。ن"
TEXTS = st.lists(
    st.tuples(st.sampled_from(ALPHABET) | st.characters(exclude_categories=["Cs"]), st.integers(1, 40)), max_size=60
).map(lambda runs: "".join(char * count for char, count in runs).replace("\x00", ""))


def join(pieces: list[Piece]) -> str:
    return "".join(piece.text[piece.overlap :] for piece in pieces)


def check(text: str, max_tokens: int, overlap: float) -> list[Piece]:
    canonical = canonical_text(text)
    pieces = split_text(canonical, max_tokens, overlap)
    assert join(pieces) == (canonical if canonical.strip() else "")
    for before, piece in zip([Piece("", 0), *pieces], pieces, strict=False):
        assert piece.text.strip()
        assert count_tokens(piece.text) <= max_tokens
        assert before.text.endswith(piece.text[: piece.overlap])
    return pieces


# A run of white space before a mark that cannot be parted from it: torn, it would weigh more than the whole.
@example(text="a  " + "\u0301" * 2 + "\u200d" * 13 + "a", max_tokens=22, overlap=0.0)
@settings(max_examples=300, deadline=None)
@given(text=TEXTS, max_tokens=st.integers(16, 80), overlap=st.sampled_from([0.0, 0.12, 0.5]))
def test_pieces_keep_the_limit_and_reproduce_the_text(text: str, max_tokens: int, overlap: float) -> None:
    """Whatever the text is made of, joined pieces are the text, and none is over the limit or blank."""
    check(text, max_tokens, overlap)


@pytest.mark.parametrize(
    "text",
    [
        FAMILY * 5_000,
        PERSIAN * 2_000,
        "deadbeef01" * 20_000,
        "one two three. " * 10_000,
        "中文没有空格。" * 5_000,
        "first line\r\nsecond line\r" * 1_000,
        "\ufeffwith a mark",
        "word" + " " * 200_000 + "word",
        "z" + "\u0301" * 20_000,
    ],
    ids=["families", "persian", "hex", "prose", "chinese", "crlf", "bom", "a lake of spaces", "marks"],
)
def test_hard_texts(text: str) -> None:
    """The texts that broke other chunkers come out whole."""
    assert check(text, 3_000, 0.12)


def test_one_line_of_five_megabytes() -> None:
    """A line without a single break is cut in linear time."""
    pieces = check("a1b2c3d4e5" * 500_000, 3_000, 0.12)
    assert len(pieces) > 1_000


@pytest.mark.parametrize("text", ["", " ", "\n\n\t ", "\ufeff", "\u3000" * 10_000])
def test_blank_texts_have_no_pieces(text: str) -> None:
    """Nothing readable, no chunk."""
    assert split_text(canonical_text(text), 100, 0.12) == []


@pytest.mark.parametrize("cluster", [FAMILY, "e\u0301", "🇩🇪", "👍🏽", "क्ष", "\u1112\u1161\u11ab"])
def test_no_character_is_torn(cluster: str) -> None:
    """What a reader sees as one character is in one piece, or wholly in the repeated prefix."""
    for piece in check(cluster * 500, 60, 0.12):
        assert len(piece.text) % len(cluster) == 0
        assert piece.overlap % len(cluster) == 0


def test_a_character_larger_than_a_chunk_is_split_all_the_same() -> None:
    """A heap of marks on one letter ends up in pieces rather than in an error."""
    assert len(check("z" + "\u0301" * 500, 16, 0)) > 1


def test_cuts_prefer_paragraphs_then_sentences_then_words() -> None:
    """A piece ends where a reader would pause."""
    words = "alpha beta gamma delta " * 3
    assert split_text(f"{words}end.\n\nShort one. {words}{words}", 30, 0)[0].text.endswith("end.\n\n")
    assert split_text(f"{words}end. {words}", 30, 0)[0].text.endswith("end. ")
    assert split_text(words * 2, 30, 0)[0].text.endswith(" ")


def test_overlap_is_about_its_share_and_starts_at_a_word() -> None:
    """Prose repeats up to 12 % of the limit, from the start of a word."""
    pieces = check("alpha beta gamma delta " * 3_000, 1_000, 0.12)
    for piece in pieces[1:]:
        assert 60 <= count_tokens(piece.text[: piece.overlap]) <= 120
        assert piece.text.split()[0] in {"alpha", "beta", "gamma", "delta"}


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\xef\xbb\xbfa\r\nb\rc\n", "a\nb\nc\n"),
        ("ä€".encode("utf-16"), "ä€"),
        (b"\xfe\xff\x00a", "a"),
        ("e\u0301", "e\u0301"),
        ("a" + " " * 64 + "b", "a" + " " * 64 + "b"),
        ("a" + "\n" * 65 + "b", "a" + "\n" * 64 + "b"),
    ],
)
def test_canonical_text(raw: bytes | str, text: str) -> None:
    """Marks go, line ends become LF, lakes of white space are cut; all else stays letter by letter."""
    assert canonical_text(raw) == text


@pytest.mark.parametrize("raw", [b"\x89PNG\r\n\x1a\n", b"a\x00b", b"caf\xe9", "a\x00b", "a\ud800b"])
def test_what_is_no_text_is_refused(raw: bytes | str) -> None:
    """Binary data, NUL and lone surrogates stop at the door."""
    with pytest.raises(InvalidInputError):
        canonical_text(raw)


@pytest.mark.parametrize(
    ("text", "at_least"),
    [("deadbeef01" * 100, 500), ("中" * 100, 100), (FAMILY * 10, 120), ("a b c d e f g h", 5), ("x" * 4_000, 1_300)],
)
def test_dense_text_is_not_underestimated(text: str, at_least: int) -> None:
    """Four characters a token would be far off for hex, Chinese and emoji."""
    assert count_tokens(text) >= at_least


def test_prose_costs_about_a_token_per_word() -> None:
    """The estimate is high, but not so high that budgets mean nothing."""
    prose = "The deploy went out on Tuesday and nobody noticed anything strange about it. " * 50
    words = len(prose.split())
    assert words <= count_tokens(prose) <= 2 * words


@given(left=TEXTS, right=TEXTS)
def test_counting_is_monotone_enough(left: str, right: str) -> None:
    """A text costs at least as much as its start, but for white space that joins up at the seam."""
    assert count_tokens(left + right) + 64 >= count_tokens(left)
    assert count_tokens("") == 0


@given(text=TEXTS, max_tokens=st.integers(3, 50))
def test_clip_keeps_the_budget(text: str, max_tokens: int) -> None:
    """A clipped text is a prefix within the budget, and not empty unless the text is."""
    clipped = clip_tokens(text, max_tokens)
    assert text.startswith(clipped)
    assert count_tokens(clipped) <= max_tokens
    assert bool(clipped) == bool(text)


def test_chunk_ids_follow_the_contract() -> None:
    """The id is a hash of kind, source, place and content, and of nothing else."""
    raw = b"file\x00/notes/a.md\x00\x00\x00\x00\x02\x00h\xc3\xa9"
    assert chunk_id("file", "/notes/a.md", 2, "hé") == hashlib.sha256(raw).hexdigest()[:32]


@pytest.mark.parametrize(("max_tokens", "overlap"), [(15, 0.1), (100, -0.1), (100, 0.6)])
def test_impossible_limits_are_refused(max_tokens: int, overlap: float) -> None:
    """A limit that no chunk could keep is an error, not an endless loop."""
    with pytest.raises(InvalidInputError):
        split_text("text", max_tokens, overlap)
