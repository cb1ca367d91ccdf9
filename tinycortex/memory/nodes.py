"""Node: what a summary is made of, be it a chunk or another summary."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from tinycortex.memory.admission import score_chunk
from tinycortex.repositories.chunks import Chunk, ChunkRepository
from tinycortex.repositories.scores import ScoreRepository
from tinycortex.repositories.trees import Summary, TreeRepository


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One child of a summary to be.

    Attributes:
        id: the chunk's or the summary's.
        is_leaf: whether it is a chunk.
        place: sorts nodes by time, source and place in the source, whatever order they were pushed in.
        covered: whether a summary of its own tree has it already.
    """

    id: str
    is_leaf: bool
    place: tuple[int, str, int, str]
    content: str
    token_count: int
    start_ms: int
    end_ms: int
    score: float
    entity_ids: tuple[str, ...]
    covered: bool


def list_nodes(session: Session, ids: Sequence[str]) -> list[Node]:
    """List the chunks and summaries with ``ids``, in that order; missing ones are left out."""
    chunks = {node.id: node for node in list_leaves(session, ChunkRepository(session).list_by_ids(ids))}
    others = [node_id for node_id in ids if node_id not in chunks]
    summaries = {summary.id: summary_node(summary) for summary in TreeRepository(session).list_summaries_by_ids(others)}
    return [nodes[node_id] for node_id in ids for nodes in (chunks, summaries) if node_id in nodes]


def list_leaves(session: Session, chunks: Iterable[Chunk]) -> list[Node]:
    """List chunks as nodes, in their order."""
    chunks = list(chunks)
    totals = ScoreRepository(session).find_totals([chunk.id for chunk in chunks])
    return [_leaf(chunk, totals.get(chunk.id)) for chunk in chunks]


def _leaf(chunk: Chunk, total: float | None) -> Node:
    score = score_chunk(chunk)
    return Node(
        id=chunk.id,
        is_leaf=True,
        place=(chunk.timestamp_ms, chunk.source_id, chunk.seq_in_source, chunk.id),
        content=chunk.content,
        token_count=chunk.token_count,
        start_ms=chunk.time_range_start_ms,
        end_ms=chunk.time_range_end_ms,
        score=score.total if total is None else total,
        entity_ids=tuple(entity.id for entity in score.entities),
        covered=chunk.is_sealed,
    )


def summary_node(summary: Summary) -> Node:
    """Return a summary as a child of the one above it."""
    return Node(
        id=summary.id,
        is_leaf=False,
        place=(summary.time_range_start_ms, summary.tree_id, summary.level, summary.id),
        content=summary.content,
        token_count=summary.token_count,
        start_ms=summary.time_range_start_ms,
        end_ms=summary.time_range_end_ms,
        score=summary.score,
        entity_ids=summary.entity_ids,
        covered=summary.parent_id is not None,
    )
