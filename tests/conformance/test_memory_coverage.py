"""reembed_batch: everything kept gets a vector or a reason, and the chain ends."""

import asyncio
from collections.abc import Sequence

import pytest
from sqlalchemy import func, select

from tinycortex import Database, ReembedProgress
from tinycortex.config import MemorySettings
from tinycortex.memory.delegates import MemoryDelegates
from tinycortex.memory.embedding import HashEmbedder, unpack_vector
from tinycortex.models import ChunkEmbeddingRow, ChunkRow, ChunkSkipRow, SummaryEmbeddingRow, SummaryRow, TreeRow
from tinycortex.testing import ManualClock
from tinycortex.testing.factories import NOW_MS, ChunkRowFactory, insert_rows

SETTINGS = MemorySettings(embed_batch=8)
SIGNATURE = "moody@2"


class Moody:
    """Has no vector for texts that say so, until it is told to."""

    signature = SIGNATURE

    def __init__(self) -> None:
        self.refuses = True
        self.seen: list[str] = []

    def embed(self, texts: Sequence[str]) -> list[list[float] | None]:
        self.seen += texts
        return [None if "unreadable" in text and self.refuses else [1.0, 2.0] for text in texts]


@pytest.fixture
def embedder() -> Moody:
    return Moody()


@pytest.fixture
def memory(database: Database, clock: ManualClock, embedder: Moody) -> MemoryDelegates:
    return MemoryDelegates(database, SETTINGS, clock, embedder=embedder)


def add_chunks(database: Database, count: int, *, unreadable: int = 0, status: str = "admitted") -> None:
    insert_rows(
        database,
        *(
            ChunkRowFactory.build(
                content=f"text {number}" if number >= unreadable else f"unreadable {number}", lifecycle_status=status
            )
            for number in range(count)
        ),
    )


def run(memory: MemoryDelegates, signature: str = SIGNATURE) -> ReembedProgress:
    return asyncio.run(memory.reembed_batch(signature))


def uncovered(memory: MemoryDelegates, signature: str = SIGNATURE) -> bool:
    return asyncio.run(memory.has_uncovered_reembed_work(signature))


def count(database: Database, model: type[ChunkEmbeddingRow | ChunkSkipRow | SummaryEmbeddingRow]) -> int:
    with database.reading() as session:
        return session.scalar(select(func.count()).select_from(model)) or 0


def test_the_chain_ends_although_some_cannot_be_embedded(
    database: Database, memory: MemoryDelegates, embedder: Moody
) -> None:
    """Twenty texts, five of them unreadable, take three batches of eight, and each is asked for once."""
    add_chunks(database, 20, unreadable=5)
    passes = [run(memory)]
    while passes[-1].more_remaining:
        passes.append(run(memory))
    assert [progress.written for progress in passes] == [8, 8, 4]
    assert (count(database, ChunkEmbeddingRow), count(database, ChunkSkipRow)) == (15, 5)
    assert len(embedder.seen) == len(set(embedder.seen)) == 20
    assert not uncovered(memory)
    assert run(memory) == ReembedProgress(written=0, more_remaining=False)
    with database.reading() as session:
        skip = session.scalars(select(ChunkSkipRow)).first()
        assert skip is not None
        assert skip.reason
        assert skip.skipped_at_ms == NOW_MS


def test_cleared_marks_are_tried_again(database: Database, memory: MemoryDelegates, embedder: Moody) -> None:
    """When the fault is gone, one call brings the skipped texts back."""
    add_chunks(database, 6, unreadable=2)
    run(memory)
    embedder.refuses = False
    assert run(memory).written == 0
    assert memory.clear_reembed_skips("another") == 0
    assert memory.clear_reembed_skips(SIGNATURE) == 2
    assert uncovered(memory)
    assert run(memory) == ReembedProgress(written=2, more_remaining=False)
    assert memory.clear_reembed_skips() == 0


def test_only_what_is_kept_is_embedded(database: Database, memory: MemoryDelegates) -> None:
    """Pending and dropped chunks need no vector; a batch of exactly what there is leaves nothing."""
    for status in ("pending_extraction", "dropped"):
        add_chunks(database, 3, status=status)
    assert not uncovered(memory)
    for status in ("admitted", "buffered", "sealed"):
        add_chunks(database, 2, status=status)
    add_chunks(database, 2)
    assert run(memory) == ReembedProgress(written=8, more_remaining=False)


def test_summaries_are_embedded_after_chunks(database: Database, memory: MemoryDelegates, embedder: Moody) -> None:
    """Deleted ones are not."""
    add_chunks(database, 1)
    insert_rows(database, TreeRow(id="t", kind="topic", scope="t", created_at_ms=0))
    insert_rows(
        database,
        *(
            SummaryRow(
                id=f"s{deleted}",
                tree_id="t",
                tree_kind="topic",
                level=1,
                content=f"summary {deleted}",
                token_count=2,
                time_range_start_ms=0,
                time_range_end_ms=0,
                sealed_at_ms=0,
                deleted=deleted,
            )
            for deleted in (0, 1)
        ),
    )
    assert run(memory) == ReembedProgress(written=2, more_remaining=False)
    assert embedder.seen == ["text 0", "summary 0"]
    assert count(database, SummaryEmbeddingRow) == 1


def test_vectors_are_stored_in_the_contract_s_form(database: Database, clock: ManualClock) -> None:
    """Little-endian 32-bit floats, their number, and the time in seconds."""
    memory = MemoryDelegates(database, SETTINGS, clock)
    add_chunks(database, 1)
    run(memory, HashEmbedder.signature)
    with database.reading() as session:
        row = session.scalars(select(ChunkEmbeddingRow)).one()
    expected = HashEmbedder().embed(["text 0"])[0]
    assert expected is not None
    assert unpack_vector(row.vector) == pytest.approx(expected)
    assert (row.dim, row.created_at) == (256, NOW_MS / 1000)


def test_another_signature_is_nobody_s_work(database: Database, memory: MemoryDelegates) -> None:
    """A job for an embedder that is no longer in use ends at once."""
    add_chunks(database, 1)
    assert run(memory, "old@1") == ReembedProgress(written=0, more_remaining=False)
    assert not uncovered(memory, "old@1")
    assert asyncio.run(memory.active_signature()) == SIGNATURE


def test_an_outage_marks_nothing(database: Database, clock: ManualClock) -> None:
    """The job is tried again later, with every text still to do."""

    class Down(Moody):
        def embed(self, texts: Sequence[str]) -> list[list[float] | None]:
            raise TimeoutError(len(texts))

    memory = MemoryDelegates(database, SETTINGS, clock, embedder=Down())
    add_chunks(database, 2)
    with pytest.raises(TimeoutError):
        run(memory)
    assert uncovered(memory)
    assert (count(database, ChunkEmbeddingRow), count(database, ChunkSkipRow)) == (0, 0)


def test_a_chunk_deleted_meanwhile_is_left_out(database: Database, clock: ManualClock) -> None:
    """Its vector would belong to nothing."""

    class Deleting(Moody):
        def embed(self, texts: Sequence[str]) -> list[list[float] | None]:
            with database.transaction() as session:
                session.delete(session.scalars(select(ChunkRow)).first())
            return super().embed(texts)

    memory = MemoryDelegates(database, SETTINGS, clock, embedder=Deleting())
    add_chunks(database, 2)
    assert run(memory) == ReembedProgress(written=1, more_remaining=False)


def test_an_extraction_leaves_work_to_find(database: Database, memory: MemoryDelegates) -> None:
    """The chunk just admitted is looked at first, and once it is covered the rest is."""
    prose = "Alice asked Bob to ship the release by Friday evening, and he agreed to do it."
    insert_rows(database, ChunkRowFactory.build(id="c1", content=prose, token_count=25))
    asyncio.run(memory.extract_chunk("c1"))
    assert uncovered(memory)
    run(memory)
    assert not uncovered(memory)
    add_chunks(database, 1)
    assert uncovered(memory)
