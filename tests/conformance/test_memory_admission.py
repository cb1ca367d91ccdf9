"""extract_chunk: score, entities, and one decision however often it is asked for."""

import asyncio

import pytest
from sqlalchemy import select

from tinycortex import Database, ExtractDecision
from tinycortex.config import MemorySettings
from tinycortex.memory.delegates import MemoryDelegates
from tinycortex.models import ChunkRow, EntityRow, ScoreRow
from tinycortex.testing import ManualClock
from tinycortex.testing.factories import ChunkRowFactory, insert_rows

NOTE = "Alice asked Bob to ship the release. Write to alice@example.com about #launch."


@pytest.fixture
def memory(database: Database, clock: ManualClock) -> MemoryDelegates:
    return MemoryDelegates(database, MemorySettings(), clock)


def extract(memory: MemoryDelegates, chunk_id: str) -> ExtractDecision | None:
    return asyncio.run(memory.extract_chunk(chunk_id))


def lifecycle(database: Database, chunk_id: str) -> str | None:
    with database.reading() as session:
        return session.scalar(select(ChunkRow.lifecycle_status).where(ChunkRow.id == chunk_id))


def test_a_note_is_admitted_with_score_and_entities(database: Database, memory: MemoryDelegates) -> None:
    """The row says why; the index says who and what is in it."""
    insert_rows(database, ChunkRowFactory.build(id="c1", content=NOTE, token_count=25, path_scope="team"))
    decision = extract(memory, "c1")
    assert decision == ExtractDecision(kept=True, tree_scope="team", document_subtree=False)
    assert lifecycle(database, "c1") == "admitted"
    with database.reading() as session:
        score = session.get_one(ScoreRow, "c1")
        assert (score.dropped, score.reason) == (0, None)
        assert 0.3 <= score.total <= 1
        entities = {row.entity_id: row for row in session.scalars(select(EntityRow))}
    assert set(entities) == {"email:alice@example.com", "hashtag:launch"}
    assert {(row.node_id, row.node_kind, row.tree_id) for row in entities.values()} == {("c1", "leaf", None)}


def test_junk_is_dropped_with_a_reason(database: Database, memory: MemoryDelegates) -> None:
    """What is not worth keeping is marked, scored and left out of the index."""
    insert_rows(database, ChunkRowFactory.build(id="c1", content="ok @bob", token_count=3))
    assert extract(memory, "c1") == ExtractDecision(kept=False, tree_scope="slack:#eng")
    assert lifecycle(database, "c1") == "dropped"
    with database.reading() as session:
        assert session.get_one(ScoreRow, "c1").reason
        assert session.get_one(ScoreRow, "c1").dropped == 1
        assert session.scalars(select(EntityRow)).all() == []


@pytest.mark.parametrize("text", [NOTE, "ok"])
def test_asked_again_it_says_the_same(database: Database, memory: MemoryDelegates, text: str) -> None:
    """A run that was killed after its commit repeats without a trace."""
    insert_rows(database, ChunkRowFactory.build(id="c1", content=text, token_count=20))
    first = extract(memory, "c1")
    before = lifecycle(database, "c1")
    assert extract(memory, "c1") == first
    assert lifecycle(database, "c1") == before


@pytest.mark.parametrize(("status", "kept"), [("buffered", True), ("sealed", True), ("dropped", False)])
def test_a_decision_once_taken_stands(database: Database, clock: ManualClock, status: str, kept: bool) -> None:
    """A chunk that is further on is neither set back nor decided anew, whatever the threshold is by now."""
    memory = MemoryDelegates(database, MemorySettings(admission_threshold=0 if status == "dropped" else 1), clock)
    insert_rows(database, ChunkRowFactory.build(id="c1", content=NOTE, lifecycle_status=status))
    decision = extract(memory, "c1")
    assert decision is not None
    assert decision.kept is kept
    assert lifecycle(database, "c1") == status


def test_a_chunk_of_another_program_without_a_lifecycle_is_pending(database: Database, memory: MemoryDelegates) -> None:
    """The contract lets the column be empty."""
    insert_rows(database, ChunkRowFactory.build(id="c1", content=NOTE, token_count=25, lifecycle_status=None))
    assert extract(memory, "c1") is not None
    assert lifecycle(database, "c1") == "admitted"


@pytest.mark.parametrize("tags", ["", "{}", '[{"name":"x"}]', '["starred"]'])
def test_tags_of_another_program_do_not_stop_an_extraction(
    database: Database, memory: MemoryDelegates, tags: str
) -> None:
    """Whatever is in the column, the chunk is scored."""
    insert_rows(database, ChunkRowFactory.build(id="c1", content=NOTE, token_count=25, tags_json=tags))
    assert extract(memory, "c1") is not None


def test_a_document_s_chunk_is_left_to_its_document(database: Database, memory: MemoryDelegates) -> None:
    """The decision says so, and the handler appends nothing."""
    insert_rows(database, ChunkRowFactory.build(id="c1", content=NOTE, source_kind="document", path_scope="conn"))
    decision = extract(memory, "c1")
    assert decision is not None
    assert decision.document_subtree
    assert decision.tree_scope == "conn"


def test_a_missing_chunk_is_none(memory: MemoryDelegates) -> None:
    """There is nothing to decide."""
    assert extract(memory, "gone") is None
