"""seal_level: one level, one summary, one transaction; and it converges whatever is killed."""

import asyncio
import json
from collections.abc import Callable, Sequence

import pytest
from sqlalchemy import func, select

from tinycortex import Database, JobFailure, LeafRef, SealPayload, SourceTarget, SummaryRef, TopicTarget
from tinycortex.config import MemorySettings
from tinycortex.memory.delegates import MemoryDelegates
from tinycortex.memory.seal import MAX_TRIES
from tinycortex.models import (
    BufferRow,
    ChunkRow,
    EntityRow,
    SummaryEmbeddingRow,
    SummaryRow,
    SummarySkipRow,
    TreeRow,
)
from tinycortex.repositories.trees import tree_id_of
from tinycortex.testing import ManualClock
from tinycortex.testing.factories import NOW_MS, ChunkRowFactory, insert_rows

SETTINGS = MemorySettings(input_token_budget=100, output_token_budget=50, fan_out=3, max_cascade_depth=3)
TREE = tree_id_of("source", "room")


@pytest.fixture
def memory(database: Database, clock: ManualClock) -> MemoryDelegates:
    return MemoryDelegates(database, SETTINGS, clock)


def push_chunks(database: Database, memory: MemoryDelegates, *numbers: int, tokens: int = 50) -> None:
    for number in numbers:
        insert_rows(
            database,
            ChunkRowFactory.build(
                id=f"c{number}",
                content=f"Note {number} says that topic{number} was discussed. Mail a{number}@example.com #t{number}",
                token_count=tokens,
                timestamp_ms=1_000 + number,
                source_id="room",
                seq_in_source=number,
                lifecycle_status="admitted",
            ),
        )
        asyncio.run(memory.append_node(LeafRef(chunk_id=f"c{number}"), SourceTarget(source_id="room")))


def seal(memory: MemoryDelegates, level: int = 0, *, force: bool = False, tree_id: str = TREE) -> SealPayload | None:
    payload = SealPayload(tree_id=tree_id, level=level, force_now_ms=NOW_MS if force else None)
    return asyncio.run(memory.seal_level(payload))


def items(database: Database, level: int, tree_id: str = TREE) -> list[str]:
    with database.reading() as session:
        row = session.get(BufferRow, (tree_id, level))
        found: list[str] = [] if row is None else json.loads(row.item_ids_json)
        return found


def summaries(database: Database) -> list[SummaryRow]:
    with database.reading() as session:
        rows = session.scalars(select(SummaryRow).order_by(SummaryRow.level, SummaryRow.time_range_start_ms)).all()
        return list(rows)


def test_a_full_level_becomes_one_summary(database: Database, memory: MemoryDelegates, clock: ManualClock) -> None:
    """Children, links, buffers, tree, entities and vector are all written at once."""
    push_chunks(database, memory, 1, 2)
    clock.advance(7)
    assert seal(memory) is None
    [summary] = summaries(database)
    assert (summary.tree_id, summary.tree_kind, summary.level, summary.parent_id) == (TREE, "source", 1, None)
    assert json.loads(summary.child_ids_json) == ["c1", "c2"]
    assert (summary.time_range_start_ms, summary.time_range_end_ms, summary.sealed_at_ms) == (1_001, 1_002, NOW_MS + 7)
    assert json.loads(summary.entities_json) == [
        "email:a1@example.com",
        "email:a2@example.com",
        "hashtag:t1",
        "hashtag:t2",
    ]
    assert json.loads(summary.topics_json) == ["t1", "t2"]
    assert summary.content
    assert 0 < summary.token_count <= 50
    assert 0 < summary.score <= 1
    assert items(database, 0) == []
    assert items(database, 1) == [summary.id]
    with database.reading() as session:
        chunks = session.scalars(select(ChunkRow)).all()
        assert {(chunk.lifecycle_status, chunk.parent_summary_id) for chunk in chunks} == {("sealed", summary.id)}
        tree = session.get_one(TreeRow, TREE)
        assert (tree.root_id, tree.max_level, tree.last_sealed_at_ms) == (summary.id, 1, NOW_MS + 7)
        assert session.get_one(BufferRow, (TREE, 0)).oldest_at_ms is None
        assert session.get_one(BufferRow, (TREE, 1)).token_sum == summary.token_count
        assert session.get_one(SummaryEmbeddingRow, (summary.id, "hash-v1@256")).dim == 256
        indexed = session.scalars(select(EntityRow).where(EntityRow.node_id == summary.id)).all()
        assert {(row.node_kind, row.tree_id) for row in indexed} == {("summary", TREE)}
        assert len(indexed) == 4


def test_a_level_below_its_gate_is_left_alone(database: Database, memory: MemoryDelegates) -> None:
    """Unless it is forced."""
    push_chunks(database, memory, 1, tokens=99)
    assert seal(memory) is None
    assert items(database, 0) == ["c1"]
    assert seal(memory, force=True) is None
    assert items(database, 0) == []
    assert len(summaries(database)) == 1


def test_the_parent_is_due_at_the_fan_out_exactly(database: Database, memory: MemoryDelegates) -> None:
    """Two summaries wait, the third one asks for the level above."""
    answers = []
    for number in range(3):
        push_chunks(database, memory, number, tokens=100)
        answers.append(seal(memory))
    assert answers == [None, None, SealPayload(tree_id=TREE, level=1)]
    assert seal(memory, 1) is None
    *low, top = summaries(database)
    assert top.level == 2
    assert json.loads(top.child_ids_json) == [summary.id for summary in low]
    assert {summary.parent_id for summary in low} == {top.id}
    with database.reading() as session:
        tree = session.get_one(TreeRow, TREE)
        assert (tree.root_id, tree.max_level) == (top.id, 2)


def test_a_seal_that_was_killed_after_its_commit_reports_the_same(database: Database, memory: MemoryDelegates) -> None:
    """The level is empty by then, and still the parent's seal is asked for."""
    for number in range(3):
        push_chunks(database, memory, number, tokens=100)
        first = seal(memory)
    assert first == SealPayload(tree_id=TREE, level=1)
    assert seal(memory) == first
    assert len(summaries(database)) == 3
    assert seal(memory, 1) is None
    assert seal(memory, 1) is None
    assert len(summaries(database)) == 4


def test_an_oversized_level_is_sealed_in_portions(database: Database, memory: MemoryDelegates) -> None:
    """Each takes no more than the input budget, and asks for the next while the gate is met."""
    push_chunks(database, memory, 1, 2, 3, 4, 5, tokens=60)
    again = SealPayload(tree_id=TREE, level=0)
    assert [seal(memory) for _ in range(4)] == [again, again, again, SealPayload(tree_id=TREE, level=1)]
    assert items(database, 0) == ["c5"]
    assert [json.loads(summary.child_ids_json) for summary in summaries(database)] == [["c1"], ["c2"], ["c3"], ["c4"]]


def test_a_forced_seal_empties_an_oversized_level(database: Database, memory: MemoryDelegates) -> None:
    """It asks for itself, forced as before, until nothing is left; then the parent follows."""
    push_chunks(database, memory, 1, 2, 3, tokens=60)
    again = SealPayload(tree_id=TREE, level=0, force_now_ms=NOW_MS)
    assert [seal(memory, force=True) for _ in range(3)] == [again, again, SealPayload(tree_id=TREE, level=1)]
    assert items(database, 0) == []


def test_a_chunk_larger_than_the_budget_is_sealed_alone(database: Database, memory: MemoryDelegates) -> None:
    """Something is always taken, so that nothing is stuck."""
    push_chunks(database, memory, 1, tokens=5_000)
    seal(memory)
    assert items(database, 0) == []


def test_the_order_of_pushes_does_not_matter(database: Database, memory: MemoryDelegates) -> None:
    """Children are sorted by time and place, so that workers that race end up with one summary."""
    push_chunks(database, memory, 2, 1, 3, tokens=33)
    seal(memory, force=True)
    [summary] = summaries(database)
    assert json.loads(summary.child_ids_json) == ["c1", "c2", "c3"]


def test_a_full_buffer_takes_a_fan_out_at_a_time(database: Database, memory: MemoryDelegates) -> None:
    """A level above 0 with more than its fan-out is sealed in portions too; a forced lone summary is not."""
    for number in range(7):
        push_chunks(database, memory, number, tokens=100)
        seal(memory)
    assert seal(memory, 1, force=True) == SealPayload(tree_id=TREE, level=1, force_now_ms=NOW_MS)
    assert seal(memory, 1, force=True) is None
    assert len(items(database, 1)) == 1
    assert seal(memory, 1, force=True) is None
    assert len(items(database, 1)) == 1


def test_a_cascade_ends_at_its_deepest_level(database: Database, memory: MemoryDelegates) -> None:
    """Level 2 is the last that is sealed when the depth is 3."""
    insert_rows(database, TreeRow(id=TREE, kind="source", scope="room", created_at_ms=0))
    ids = [f"s{number}" for number in range(6)]
    insert_rows(
        database,
        *(
            SummaryRow(
                id=summary_id,
                tree_id=TREE,
                tree_kind="source",
                level=2 if number < 3 else 3,
                content="Some words about something.",
                token_count=10,
                time_range_start_ms=0,
                time_range_end_ms=0,
                sealed_at_ms=0,
            )
            for number, summary_id in enumerate(ids)
        ),
        BufferRow(tree_id=TREE, level=2, item_ids_json=json.dumps(ids[:3]), updated_at_ms=0),
        BufferRow(tree_id=TREE, level=3, item_ids_json=json.dumps(ids[3:]), updated_at_ms=0),
    )
    assert seal(memory, 2) is None
    assert len(items(database, 3)) == 4
    assert seal(memory, 3, force=True) is None
    assert len(items(database, 3)) == 4


def test_what_is_gone_or_covered_leaves_the_buffer(database: Database, memory: MemoryDelegates) -> None:
    """Ghosts in a buffer neither stop a seal nor keep it busy."""
    insert_rows(database, TreeRow(id=TREE, kind="source", scope="room", created_at_ms=0))
    insert_rows(database, BufferRow(tree_id=TREE, level=0, item_ids_json='["gone"]', token_sum=500, updated_at_ms=0))
    assert seal(memory) is None
    assert items(database, 0) == []
    push_chunks(database, memory, 1, 2)
    with database.transaction() as session:
        session.get_one(ChunkRow, "c1").parent_summary_id = "elsewhere"
    seal(memory)
    assert json.loads(summaries(database)[0].child_ids_json) == ["c2"]


@pytest.mark.parametrize("status", [None, "archived"])
def test_a_missing_or_archived_tree_has_nothing_to_seal(
    database: Database, memory: MemoryDelegates, status: str | None
) -> None:
    """The job ends, and the buffer stays."""
    push_chunks(database, memory, 1, 2)
    if status is None:
        assert seal(memory, tree_id="gone") is None
    else:
        with database.transaction() as session:
            session.get_one(TreeRow, TREE).status = status
        assert seal(memory) is None
    assert items(database, 0) == ["c1", "c2"]


def test_a_topic_tree_leaves_its_guests_where_they_belong(database: Database, memory: MemoryDelegates) -> None:
    """Chunks and summaries of other trees keep their own parents."""
    push_chunks(database, memory, 1, 2)
    seal(memory)
    [home] = summaries(database)
    insert_rows(database, TreeRow(id="ops", kind="topic", scope="ops", created_at_ms=0))
    target = TopicTarget(tree_id="ops")
    asyncio.run(memory.append_node(LeafRef(chunk_id="c1"), target))
    asyncio.run(memory.append_node(SummaryRef(summary_id=home.id), target))
    seal(memory, tree_id="ops", force=True)
    [topic] = [summary for summary in summaries(database) if summary.tree_id == "ops"]
    assert set(json.loads(topic.child_ids_json)) == {"c1", home.id}
    with database.reading() as session:
        assert session.get_one(ChunkRow, "c1").parent_summary_id == home.id
        assert session.get_one(SummaryRow, home.id).parent_id is None
    asyncio.run(memory.append_node(LeafRef(chunk_id="c1"), target))
    assert items(database, 0, "ops") == []


class Meddler:
    """A summariser during whose work something else happens."""

    def __init__(self, meddle: Callable[[], object]) -> None:
        self.meddle = meddle
        self.calls = 0

    def summarise(self, texts: Sequence[str], max_tokens: int) -> str:
        self.calls += 1
        self.meddle()
        return texts[0][:max_tokens]


def test_no_transaction_is_open_while_summarising(database: Database, clock: ManualClock) -> None:
    """Another process can push meanwhile; its chunk stays for the next seal."""
    other = MemoryDelegates(database, SETTINGS, clock)
    meddler = Meddler(lambda: push_chunks(database, other, 3))
    memory = MemoryDelegates(database, SETTINGS, clock, summariser=meddler)
    push_chunks(database, memory, 1, 2)
    assert seal(memory) is None
    assert meddler.calls == 1
    assert items(database, 0) == ["c3"]
    with database.reading() as session:
        assert session.get_one(BufferRow, (TREE, 0)).token_sum == 50


def test_of_two_seals_of_one_level_one_takes_effect(database: Database, clock: ManualClock) -> None:
    """A holder that lost its lease while summarising writes nothing over what the new one wrote."""
    other = MemoryDelegates(database, SETTINGS, clock)
    meddler = Meddler(lambda: seal(other))
    memory = MemoryDelegates(database, SETTINGS, clock, summariser=meddler)
    push_chunks(database, memory, 1, 2)
    assert seal(memory) is None
    assert len(summaries(database)) == 1
    assert meddler.calls == 1


def test_a_level_that_keeps_changing_is_given_up_for_now(database: Database, clock: ManualClock) -> None:
    """After a few tries the job is left to its retry."""

    def swap() -> None:
        number = meddler.calls
        with database.transaction() as session:
            session.get_one(BufferRow, (TREE, 0)).item_ids_json = "[]"
        push_chunks(database, other, 10 + number, tokens=100)

    other = MemoryDelegates(database, SETTINGS, clock)
    meddler = Meddler(swap)
    memory = MemoryDelegates(database, SETTINGS, clock, summariser=meddler)
    push_chunks(database, memory, 1, 2)
    with pytest.raises(JobFailure) as failure:
        seal(memory)
    assert not failure.value.is_unrecoverable
    assert meddler.calls == MAX_TRIES
    assert summaries(database) == []


def test_a_summary_that_cannot_be_embedded_is_marked(database: Database, clock: ManualClock) -> None:
    """The seal goes on, and the backfill does not come back for it."""

    class Blind:
        signature = "blind@1"

        def embed(self, texts: Sequence[str]) -> list[list[float] | None]:
            return [None] * len(texts)

    memory = MemoryDelegates(database, SETTINGS, clock, embedder=Blind())
    push_chunks(database, memory, 1, 2)
    seal(memory)
    with database.reading() as session:
        assert session.scalar(select(func.count()).select_from(SummarySkipRow)) == 1
        assert session.scalar(select(func.count()).select_from(SummaryEmbeddingRow)) == 0


def test_an_empty_summary_is_a_failure(database: Database, clock: ManualClock) -> None:
    """A model that answers with nothing is asked again, and nothing is sealed."""

    class Mute:
        def summarise(self, texts: Sequence[str], max_tokens: int) -> str:
            return " " * min(len(texts), max_tokens)

    memory = MemoryDelegates(database, SETTINGS, clock, summariser=Mute())
    push_chunks(database, memory, 1, 2)
    with pytest.raises(JobFailure):
        seal(memory)
    assert items(database, 0) == ["c1", "c2"]
