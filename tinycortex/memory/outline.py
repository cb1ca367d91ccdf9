"""Outline: the memory's trees as nested values, for people to look at."""

from collections import defaultdict
from dataclasses import dataclass

from tinycortex.db import Database
from tinycortex.repositories.trees import Summary, Tree, TreeRepository

_PREVIEW_CHARACTERS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferOutline:
    """What waits at one level."""

    level: int
    items: int
    token_sum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryOutline:
    """One summary and what it covers.

    Attributes:
        id: the summary's id.
        level: 1 for a summary of chunks.
        token_count: its length (tokens).
        doc_id: the document that it is part of, or None.
        content: its text.
        children: the summaries right below it.
        leaf_count: chunks, or nodes borrowed from other trees, below it at any depth.
    """

    id: str
    level: int
    token_count: int
    doc_id: str | None
    content: str
    children: tuple["SummaryOutline", ...]
    leaf_count: int

    @property
    def preview(self) -> str:
        """Return the first words of the text, on one line."""
        line = " ".join(self.content[: 4 * _PREVIEW_CHARACTERS].split())
        return line if len(line) <= _PREVIEW_CHARACTERS else f"{line[: _PREVIEW_CHARACTERS - 1].rstrip()}…"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOutline:
    """One tree: what waits in it, and what has been sealed, newest levels on top."""

    id: str
    kind: str
    scope: str
    status: str
    max_level: int
    root_id: str | None
    buffers: tuple[BufferOutline, ...]
    summaries: tuple[SummaryOutline, ...]


class Outline:
    """Reads whole trees, all from one snapshot."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def count_summaries(self) -> int:
        """Count the summaries of all trees, without reading them."""
        with self._database.reading() as session:
            return TreeRepository(session).count_summaries()

    def list_trees(self, scope: str | None = None) -> list[TreeOutline]:
        """List the trees over ``scope``, or all of them, by kind and scope."""
        with self._database.reading() as session:
            trees = TreeRepository(session)
            return [_outline(trees, tree) for tree in trees.list_trees(scope)]


def _outline(trees: TreeRepository, tree: Tree) -> TreeOutline:
    summaries = trees.list_summaries(tree.id)
    here = {summary.id for summary in summaries}
    below: dict[str | None, list[Summary]] = defaultdict(list)
    for summary in summaries:
        # A root's parent may be missing; it still has to be shown.
        below[summary.parent_id if summary.parent_id in here else None].append(summary)
    return TreeOutline(
        id=tree.id,
        kind=tree.kind,
        scope=tree.scope,
        status=tree.status,
        max_level=tree.max_level,
        root_id=tree.root_id,
        buffers=tuple(
            BufferOutline(level=buffer.level, items=len(buffer.item_ids), token_sum=buffer.token_sum)
            for buffer in trees.list_buffers(tree.id)
            if buffer.item_ids
        ),
        summaries=tuple(_nest(summary, below) for summary in below[None]),
    )


def _nest(summary: Summary, below: dict[str | None, list[Summary]]) -> SummaryOutline:
    children = tuple(_nest(child, below) for child in below[summary.id])
    leaves = len(summary.child_ids) if summary.level <= 1 else 0
    return SummaryOutline(
        id=summary.id,
        level=summary.level,
        token_count=summary.token_count,
        doc_id=summary.doc_id,
        content=summary.content,
        children=children,
        leaf_count=leaves + sum(child.leaf_count for child in children),
    )
