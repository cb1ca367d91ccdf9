"""The outline of trees, for people."""

import asyncio

from tinycortex import Database, LeafRef, SealPayload, SourceTarget
from tinycortex.config import MemorySettings
from tinycortex.memory.delegates import MemoryDelegates
from tinycortex.memory.outline import Outline
from tinycortex.repositories.trees import tree_id_of
from tinycortex.testing import ManualClock
from tinycortex.testing.factories import ChunkRowFactory, insert_rows

TREE = tree_id_of("source", "room")


def test_a_tree_is_shown_with_what_waits_and_what_is_sealed(database: Database, clock: ManualClock) -> None:
    """Summaries are nested, leaves counted, and the rest of the buffers listed."""
    settings = MemorySettings(input_token_budget=100, output_token_budget=50, fan_out=2)
    memory = MemoryDelegates(database, settings, clock)
    for number in range(7):
        content = f"Note {number} is about\n\n  topic{number}, which is   important to everyone here."
        insert_rows(
            database,
            ChunkRowFactory.build(id=f"c{number}", content=content, token_count=50, timestamp_ms=number),
        )
        asyncio.run(memory.append_node(LeafRef(chunk_id=f"c{number}"), SourceTarget(source_id="room")))
        asyncio.run(memory.seal_level(SealPayload(tree_id=TREE, level=0)))
    asyncio.run(memory.seal_level(SealPayload(tree_id=TREE, level=1)))
    outline = Outline(database)
    [tree] = outline.list_trees()
    assert (tree.id, tree.kind, tree.scope, tree.status, tree.max_level) == (TREE, "source", "room", "active", 2)
    assert [(buffer.level, buffer.items) for buffer in tree.buffers] == [(0, 1), (1, 1), (2, 1)]
    assert [(root.level, root.leaf_count, len(root.children)) for root in tree.summaries] == [(2, 4, 2), (1, 2, 0)]
    assert tree.summaries[0].id == tree.root_id
    assert all(child.leaf_count == 2 for child in tree.summaries[0].children)
    preview = tree.summaries[0].preview
    assert "\n" not in preview
    assert "  " not in preview
    assert len(preview) <= 80
    assert outline.list_trees("room") == [tree]
    assert outline.list_trees("other") == []
