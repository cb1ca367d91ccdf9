"""append_node and list_stale_buffers: once only, exact gates, and ages from the first push."""

import asyncio

import pytest
from sqlalchemy import select, update

from tinycortex import AppendDecision, Database, LeafRef, SourceTarget, StaleBuffer, SummaryRef, TopicTarget
from tinycortex.config import MemorySettings
from tinycortex.memory.delegates import MemoryDelegates
from tinycortex.models import BufferRow, ChunkRow, SummaryRow, TreeRow
from tinycortex.repositories.trees import tree_id_of
from tinycortex.testing import ManualClock
from tinycortex.testing.factories import NOW_MS, ChunkRowFactory, insert_rows

SETTINGS = MemorySettings(input_token_budget=100, output_token_budget=50, fan_out=3)
TREE = tree_id_of("source", "room")
HOUR = 3_600


@pytest.fixture
def memory(database: Database, clock: ManualClock) -> MemoryDelegates:
    return MemoryDelegates(database, SETTINGS, clock)


def add_chunk(database: Database, chunk_id: str, *, tokens: int = 10, **columns: object) -> None:
    columns = {"id": chunk_id, "token_count": tokens, "lifecycle_status": "admitted", **columns}
    insert_rows(database, ChunkRowFactory.build(**columns))


def add_summary(database: Database, summary_id: str, tree_id: str, level: int = 1, children: str = "[]") -> None:
    insert_rows(
        database,
        SummaryRow(
            id=summary_id,
            tree_id=tree_id,
            tree_kind="source",
            level=level,
            child_ids_json=children,
            content="A summary.",
            token_count=30,
            time_range_start_ms=1,
            time_range_end_ms=2,
            sealed_at_ms=3,
        ),
    )


def add_tree(database: Database, tree_id: str, kind: str = "topic", **columns: object) -> None:
    insert_rows(database, TreeRow(id=tree_id, kind=kind, scope=tree_id, created_at_ms=0, **columns))


def push(memory: MemoryDelegates, chunk_id: str, scope: str = "room") -> AppendDecision | None:
    return asyncio.run(memory.append_node(LeafRef(chunk_id=chunk_id), SourceTarget(source_id=scope)))


def push_topic(memory: MemoryDelegates, node: LeafRef | SummaryRef, tree_id: str = "ops") -> AppendDecision | None:
    return asyncio.run(memory.append_node(node, TopicTarget(tree_id=tree_id)))


def stale(memory: MemoryDelegates, max_age_secs: int = HOUR) -> list[StaleBuffer]:
    return asyncio.run(memory.list_stale_buffers(max_age_secs))


def buffer(database: Database, tree_id: str = TREE, level: int = 0) -> tuple[str, int, int | None]:
    with database.reading() as session:
        row = session.get_one(BufferRow, (tree_id, level))
        return row.item_ids_json, row.token_sum, row.oldest_at_ms


def test_the_first_push_makes_the_tree(database: Database, memory: MemoryDelegates) -> None:
    """Its id follows from kind and scope, so every database and every process makes the same one."""
    add_chunk(database, "c1")
    assert push(memory, "c1") == AppendDecision(tree_id=TREE, gate_met=False)
    assert buffer(database) == ('["c1"]', 10, NOW_MS)
    with database.reading() as session:
        tree = session.scalars(select(TreeRow)).one()
        assert (tree.id, tree.kind, tree.scope, tree.status) == (TREE, "source", "room", "active")
        assert session.get_one(ChunkRow, "c1").lifecycle_status == "buffered"


def test_a_tree_that_another_program_made_is_used(database: Database, memory: MemoryDelegates) -> None:
    """Kind and scope identify it, whatever its id."""
    insert_rows(database, TreeRow(id="theirs", kind="source", scope="room", created_at_ms=0))
    add_chunk(database, "c1")
    assert push(memory, "c1") == AppendDecision(tree_id="theirs", gate_met=False)


def test_a_push_happens_once(database: Database, memory: MemoryDelegates) -> None:
    """A run that was killed after its commit repeats and reports the same."""
    add_chunk(database, "c1", tokens=100)
    first = push(memory, "c1")
    assert first == AppendDecision(tree_id=TREE, gate_met=True)
    assert push(memory, "c1") == first
    assert buffer(database) == ('["c1"]', 100, NOW_MS)


def test_the_gate_is_met_at_the_budget_exactly(database: Database, memory: MemoryDelegates) -> None:
    """Ninety-nine tokens wait, a hundred are sealed."""
    add_chunk(database, "c1", tokens=99)
    add_chunk(database, "c2", tokens=1)
    assert push(memory, "c1") == AppendDecision(tree_id=TREE, gate_met=False)
    assert push(memory, "c2") == AppendDecision(tree_id=TREE, gate_met=True)


def test_the_age_of_a_buffer_is_that_of_its_first_push(
    database: Database, memory: MemoryDelegates, clock: ManualClock
) -> None:
    """Later pushes do not make it younger."""
    add_chunk(database, "c1")
    add_chunk(database, "c2")
    push(memory, "c1")
    clock.advance(5_000)
    push(memory, "c2")
    assert buffer(database) == ('["c1","c2"]', 20, NOW_MS)


@pytest.mark.parametrize("columns", [{"lifecycle_status": "sealed"}, {"parent_summary_id": "s1"}], ids=str)
def test_a_sealed_chunk_is_not_pushed_again(
    database: Database, memory: MemoryDelegates, columns: dict[str, object]
) -> None:
    """A repeat that comes after the seal finds the chunk in the tree."""
    add_chunk(database, "c1")
    with database.transaction() as session:
        session.execute(update(ChunkRow).values(columns))
    assert push(memory, "c1") == AppendDecision(tree_id=TREE, gate_met=False)
    with database.reading() as session:
        assert session.scalars(select(BufferRow)).all() == []


def test_what_is_missing_or_dropped_is_none(database: Database, memory: MemoryDelegates) -> None:
    """There is nothing to push, and no tree is made for it."""
    add_chunk(database, "dropped", lifecycle_status="dropped")
    assert push(memory, "gone") is None
    assert push(memory, "dropped") is None
    assert push_topic(memory, SummaryRef(summary_id="gone")) is None
    with database.reading() as session:
        assert session.scalars(select(TreeRow)).all() == []


def test_a_topic_tree_must_exist_and_be_active(database: Database, memory: MemoryDelegates) -> None:
    """Nobody makes one by pushing, and an archived one takes nothing."""
    add_chunk(database, "c1")
    assert push_topic(memory, LeafRef(chunk_id="c1")) is None
    add_tree(database, "ops", status="archived")
    assert push_topic(memory, LeafRef(chunk_id="c1")) is None


def test_a_topic_tree_borrows_chunks_and_summaries(database: Database, memory: MemoryDelegates) -> None:
    """A borrowed chunk keeps its lifecycle; a summary counts with its own tokens."""
    add_tree(database, "ops")
    add_tree(database, "home", kind="source")
    add_chunk(database, "c1", lifecycle_status="sealed", parent_summary_id="s1")
    add_summary(database, "s1", "home")
    push_topic(memory, LeafRef(chunk_id="c1"))
    push_topic(memory, SummaryRef(summary_id="s1"))
    push_topic(memory, SummaryRef(summary_id="s1"))
    assert buffer(database, "ops")[:2] == ('["c1","s1"]', 40)
    with database.reading() as session:
        assert session.get_one(ChunkRow, "c1").lifecycle_status == "sealed"


def test_what_a_topic_tree_has_sealed_is_not_borrowed_again(database: Database, memory: MemoryDelegates) -> None:
    """The children of its level-1 summaries are in it already, ids with odd characters too."""
    add_tree(database, "ops")
    add_chunk(database, 'a"%_é')
    add_chunk(database, "other")
    add_summary(database, "s1", "ops", children='["a\\"%_é"]')
    assert push_topic(memory, LeafRef(chunk_id='a"%_é')) == AppendDecision(tree_id="ops", gate_met=False)
    assert push_topic(memory, SummaryRef(summary_id="s1")) == AppendDecision(tree_id="ops", gate_met=False)
    with database.reading() as session:
        assert session.scalars(select(BufferRow)).all() == []
    push_topic(memory, LeafRef(chunk_id="other"))
    assert buffer(database, "ops")[0] == '["other"]'


def test_a_level_0_buffer_is_stale_at_its_age(database: Database, memory: MemoryDelegates, clock: ManualClock) -> None:
    """Not a millisecond before."""
    add_chunk(database, "c1")
    push(memory, "c1")
    clock.advance(HOUR * 1000 - 1)
    assert stale(memory) == []
    clock.advance(1)
    assert stale(memory) == [StaleBuffer(tree_id=TREE, level=0)]
    assert stale(memory, 2**63 - 1) == []


def test_a_higher_level_is_stale_when_old_and_worth_a_summary(
    database: Database, memory: MemoryDelegates, clock: ManualClock
) -> None:
    """A lone summary is left alone, since a seal would only lay another level over it."""
    add_tree(database, "t")
    insert_rows(
        database,
        BufferRow(tree_id="t", level=1, item_ids_json='["a","b"]', oldest_at_ms=NOW_MS, updated_at_ms=NOW_MS),
        BufferRow(tree_id="t", level=2, item_ids_json='["c"]', oldest_at_ms=NOW_MS, updated_at_ms=NOW_MS),
    )
    clock.advance(SETTINGS.tree_flush_age_secs * 1000 - 1)
    assert stale(memory, 0) == []
    clock.advance(1)
    assert stale(memory, 0) == [StaleBuffer(tree_id="t", level=1)]


def test_stale_buffers_come_oldest_first_and_from_active_trees(
    database: Database, memory: MemoryDelegates, clock: ManualClock
) -> None:
    """An empty buffer is never stale, nor one of an archived tree; one without an age goes by its last change."""
    for tree_id, status in (("b", "active"), ("a", "active"), ("x", "archived"), ("e", "active"), ("n", "active")):
        add_tree(database, tree_id, status=status)
    insert_rows(
        database,
        BufferRow(tree_id="b", level=0, item_ids_json='["c"]', oldest_at_ms=NOW_MS, updated_at_ms=NOW_MS),
        BufferRow(tree_id="a", level=0, item_ids_json='["c"]', oldest_at_ms=NOW_MS, updated_at_ms=NOW_MS),
        BufferRow(tree_id="x", level=0, item_ids_json='["c"]', oldest_at_ms=NOW_MS, updated_at_ms=NOW_MS),
        BufferRow(tree_id="e", level=0, item_ids_json="[ ]", oldest_at_ms=NOW_MS, updated_at_ms=NOW_MS),
        BufferRow(tree_id="n", level=0, item_ids_json='["c"]', oldest_at_ms=None, updated_at_ms=NOW_MS - 1),
    )
    clock.advance(HOUR * 1000)
    assert [found.tree_id for found in stale(memory)] == ["n", "a", "b"]
