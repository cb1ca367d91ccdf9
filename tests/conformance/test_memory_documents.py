"""seal_document: one version's subtree, built once, whatever was extracted or killed before."""

import asyncio
import json
from collections.abc import Callable, Sequence

import pytest
from sqlalchemy import select

from tinycortex import Database, LeafRef, SealDocumentPayload, SealPayload, SourceTarget
from tinycortex.config import MemorySettings
from tinycortex.memory.delegates import MemoryDelegates
from tinycortex.models import BufferRow, ChunkRow, SummaryEmbeddingRow, SummaryRow, TreeRow
from tinycortex.repositories.trees import tree_id_of
from tinycortex.testing import ManualClock
from tinycortex.testing.factories import ChunkRowFactory, insert_rows

SETTINGS = MemorySettings(input_token_budget=100, output_token_budget=50, fan_out=3)
TREE = tree_id_of("source", "conn")


@pytest.fixture
def memory(database: Database, clock: ManualClock) -> MemoryDelegates:
    return MemoryDelegates(database, SETTINGS, clock)


def add_document(
    database: Database, doc_id: str, chunks: int, *, tokens: int = 100, junk: Sequence[int] = ()
) -> SealDocumentPayload:
    ids = [f"{doc_id}-{number}" for number in range(chunks)]
    insert_rows(
        database,
        *(
            ChunkRowFactory.build(
                id=chunk_id,
                source_kind="document",
                source_id=f"{doc_id}@1",
                path_scope="conn",
                content="ok" if number in junk else f"Section {number} of {doc_id} explains how part{number} works.",
                token_count=2 if number in junk else tokens,
                seq_in_source=number,
            )
            for number, chunk_id in enumerate(ids)
        ),
    )
    return SealDocumentPayload(tree_scope="conn", doc_id=doc_id, version_ms=1, chunk_ids=ids)


def seal(memory: MemoryDelegates, payload: SealDocumentPayload) -> SealPayload | None:
    return asyncio.run(memory.seal_document(payload))


def summaries(database: Database) -> list[SummaryRow]:
    with database.reading() as session:
        return list(session.scalars(select(SummaryRow).order_by(SummaryRow.level, SummaryRow.id)))


def items(database: Database, level: int) -> list[str]:
    with database.reading() as session:
        row = session.get(BufferRow, (TREE, level))
        found: list[str] = [] if row is None else json.loads(row.item_ids_json)
        return found


def test_a_small_document_is_one_summary(database: Database, memory: MemoryDelegates) -> None:
    """It is the root, waits among its like, and carries document and version."""
    payload = add_document(database, "doc", 2, tokens=50)
    assert seal(memory, payload) is None
    [root] = summaries(database)
    assert (root.tree_id, root.level, root.doc_id, root.version_ms, root.parent_id) == (TREE, 1, "doc", 1, None)
    assert json.loads(root.child_ids_json) == payload.chunk_ids
    assert items(database, 1) == [root.id]
    with database.reading() as session:
        chunks = session.scalars(select(ChunkRow)).all()
        assert {(chunk.lifecycle_status, chunk.parent_summary_id) for chunk in chunks} == {("sealed", root.id)}
        tree = session.get_one(TreeRow, TREE)
        assert (tree.kind, tree.scope, tree.root_id, tree.max_level) == ("source", "conn", root.id, 1)
        assert session.get_one(SummaryEmbeddingRow, (root.id, "hash-v1@256"))


def test_a_large_document_is_a_subtree_of_even_groups(database: Database, memory: MemoryDelegates) -> None:
    """Four full chunks make four summaries, then two of two, then the root."""
    seal(memory, add_document(database, "doc", 4))
    found = summaries(database)
    assert [summary.level for summary in found] == [1, 1, 1, 1, 2, 2, 3]
    root = found[-1]
    by_id = {summary.id: summary for summary in found}
    assert [len(json.loads(by_id[child].child_ids_json)) for child in json.loads(root.child_ids_json)] == [2, 2]
    assert all(by_id[str(summary.parent_id)].level == summary.level + 1 for summary in found[:-1])
    assert items(database, 3) == [root.id]
    assert items(database, 1) == items(database, 2) == []


def test_the_root_s_level_is_due_at_the_fan_out(database: Database, memory: MemoryDelegates) -> None:
    """The third document of a connection asks for the seal of the level that all three wait in."""
    payloads = [add_document(database, f"doc{number}", 1) for number in range(3)]
    assert [seal(memory, payload) for payload in payloads] == [None, None, SealPayload(tree_id=TREE, level=1)]


def test_a_repeat_changes_nothing_and_reports_the_same(database: Database, memory: MemoryDelegates) -> None:
    """A run that was killed after its commit does not lose the follow-up."""
    for number in range(2):
        seal(memory, add_document(database, f"doc{number}", 1))
    payload = add_document(database, "doc2", 1)
    first = seal(memory, payload)
    assert first is not None
    before = [summary.id for summary in summaries(database)]
    assert seal(memory, payload) == first
    assert [summary.id for summary in summaries(database)] == before
    assert len(items(database, 1)) == 3


@pytest.mark.parametrize("extract_first", [False, True])
def test_the_result_does_not_depend_on_extraction(
    database: Database, memory: MemoryDelegates, *, extract_first: bool
) -> None:
    """Junk is left out before it is marked, and what is sealed early is still admitted when it is extracted."""
    payload = add_document(database, "doc", 3, tokens=40, junk=[1])
    if extract_first:
        for chunk_id in payload.chunk_ids:
            asyncio.run(memory.extract_chunk(chunk_id))
    seal(memory, payload)
    if not extract_first:
        decisions = [asyncio.run(memory.extract_chunk(chunk_id)) for chunk_id in payload.chunk_ids]
        assert [decision is not None and decision.kept for decision in decisions] == [True, False, True]
    [root] = summaries(database)
    assert json.loads(root.child_ids_json) == ["doc-0", "doc-2"]
    with database.reading() as session:
        found = session.scalars(select(ChunkRow.lifecycle_status).order_by(ChunkRow.id)).all()
        assert found == ["sealed", "dropped", "sealed"]


def test_nothing_kept_is_nothing_to_do(database: Database, memory: MemoryDelegates) -> None:
    """No tree is made for a document of junk, nor for one whose chunks are gone."""
    assert seal(memory, add_document(database, "doc", 2, junk=[0, 1])) is None
    gone = SealDocumentPayload(tree_scope="conn", doc_id="gone", version_ms=None, chunk_ids=["x", "y"])
    assert seal(memory, gone) is None
    with database.reading() as session:
        assert session.scalars(select(TreeRow)).all() == []


def test_chunks_that_wait_in_a_buffer_stay_there(database: Database, memory: MemoryDelegates) -> None:
    """No chunk ends up under two summaries of one tree."""
    payload = add_document(database, "doc", 2, tokens=40)
    asyncio.run(memory.append_node(LeafRef(chunk_id="doc-0"), SourceTarget(source_id="conn")))
    seal(memory, payload)
    assert json.loads(summaries(database)[0].child_ids_json) == ["doc-1"]
    assert items(database, 0) == ["doc-0"]


def test_an_archived_tree_takes_no_document(database: Database, memory: MemoryDelegates) -> None:
    """The chunks stay as they are."""
    insert_rows(database, TreeRow(id="old", kind="source", scope="conn", status="archived", created_at_ms=0))
    assert seal(memory, add_document(database, "doc", 1)) is None
    assert summaries(database) == []


def test_of_two_runs_at_once_one_takes_effect(database: Database, clock: ManualClock) -> None:
    """Whoever commits second finds the chunks sealed, and reports what the first one did."""

    class Meddler:
        def __init__(self, meddle: Callable[[], object]) -> None:
            self.meddle = meddle

        def summarise(self, texts: Sequence[str], max_tokens: int) -> str:
            self.meddle()
            return texts[0][:max_tokens]

    other = MemoryDelegates(database, SETTINGS, clock)
    payload = add_document(database, "doc", 1)
    memory = MemoryDelegates(database, SETTINGS, clock, summariser=Meddler(lambda: seal(other, payload)))
    assert seal(memory, payload) is None
    assert len(summaries(database)) == 1
    assert len(items(database, 1)) == 1
