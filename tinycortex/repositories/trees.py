"""TreeRepository: the rows of ``mem_tree_trees``, ``mem_tree_buffers`` and ``mem_tree_summaries``."""

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from sqlalchemy import Row, func, select, update
from sqlalchemy.orm import Session

from tinycortex.models import BufferRow, SummaryRow, TreeRow
from tinycortex.repositories.row_sql import insert_missing, split_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """One row of ``mem_tree_trees`` as it stood when it was read."""

    id: str
    kind: str
    scope: str
    root_id: str | None
    max_level: int
    status: str

    @property
    def is_active(self) -> bool:
        """Tell whether the tree takes nodes and is sealed."""
        return self.status == "active"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """What waits at one level of one tree. A buffer without a row is an empty one."""

    tree_id: str
    level: int
    item_ids: tuple[str, ...] = ()
    token_sum: int = 0
    oldest_at_ms: int | None = None

    def with_item(self, item_id: str, tokens: int, now_ms: int) -> Self:
        """Return the buffer after a push; an item that is in it already changes nothing."""
        if item_id in self.item_ids:
            return self
        return type(self)(
            tree_id=self.tree_id,
            level=self.level,
            item_ids=(*self.item_ids, item_id),
            token_sum=self.token_sum + tokens,
            oldest_at_ms=self.oldest_at_ms if self.item_ids and self.oldest_at_ms is not None else now_ms,
        )

    def without_items(self, gone: Collection[str], tokens: int, now_ms: int) -> Self:
        """Return the buffer after ``gone`` left it with their ``tokens``; what is left waits anew."""
        left = tuple(item_id for item_id in self.item_ids if item_id not in gone)
        return type(self)(
            tree_id=self.tree_id,
            level=self.level,
            item_ids=left,
            token_sum=max(self.token_sum - tokens, 0) if left else 0,
            oldest_at_ms=now_ms if left else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One sealed node as a row of ``mem_tree_summaries``; all but ``parent_id`` is fixed once written."""

    id: str
    tree_id: str
    tree_kind: str
    level: int
    parent_id: str | None = None
    child_ids: tuple[str, ...]
    content: str
    token_count: int
    entity_ids: tuple[str, ...]
    topics: tuple[str, ...]
    time_range_start_ms: int
    time_range_end_ms: int
    score: float
    sealed_at_ms: int
    doc_id: str | None = None
    version_ms: int | None = None


def tree_id_of(kind: str, scope: str) -> str:
    """Return the id that a new tree of ``kind`` over ``scope`` gets, the same in every database."""
    digest = hashlib.sha256(f"{kind}\0{scope}".encode()).hexdigest()
    return f"tree:{digest[:32]}"


class TreeRepository:
    """Trees, their buffers and their summaries. Never commits."""

    def __init__(self, session: Session) -> None:
        self._session = session

    # Trees

    def find_tree(self, tree_id: str) -> Tree | None:
        """Return one tree, or None."""
        return _tree_or_none(self._session.scalars(select(TreeRow).where(TreeRow.id == tree_id)).first())

    def find_tree_of(self, kind: str, scope: str) -> Tree | None:
        """Return the tree of ``kind`` over ``scope``, or None."""
        search = select(TreeRow).where(TreeRow.kind == kind, TreeRow.scope == scope)
        return _tree_or_none(self._session.scalars(search).first())

    def ensure_tree(self, kind: str, scope: str, now_ms: int) -> Tree:
        """Return the tree of ``kind`` over ``scope``, made now when there is none; locked as by :meth:`lock`."""
        insert_missing(
            self._session,
            TreeRow,
            [{"id": tree_id_of(kind, scope), "kind": kind, "scope": scope, "created_at_ms": now_ms}],
        )
        search = select(TreeRow).where(TreeRow.kind == kind, TreeRow.scope == scope).with_for_update()
        return _tree(self._session.scalars(search).one())

    def lock(self, tree_id: str) -> Tree | None:
        """Return one tree, or None, and keep every other writer of it waiting until the transaction ends.

        Buffers are read, changed and written back, so whoever changes one locks its tree first. SQLite has
        one writer at a time anyway, and leaves the clause out.
        """
        search = select(TreeRow).where(TreeRow.id == tree_id).with_for_update()
        return _tree_or_none(self._session.scalars(search.execution_options(populate_existing=True)).first())

    def list_trees(self, scope: str | None = None) -> list[Tree]:
        """List the trees over ``scope``, or all, by kind and scope."""
        search = select(TreeRow).order_by(TreeRow.kind, TreeRow.scope)
        return [_tree(row) for row in self._session.scalars(search if scope is None else search.filter_by(scope=scope))]

    def raise_root(self, tree: Tree, summary: Summary) -> None:
        """Record a seal: the newest summary of the highest level is the tree's root."""
        is_root = summary.level >= tree.max_level
        self._session.execute(
            update(TreeRow)
            .where(TreeRow.id == tree.id)
            .values(
                last_sealed_at_ms=summary.sealed_at_ms,
                max_level=summary.level if is_root else tree.max_level,
                root_id=summary.id if is_root else tree.root_id,
            )
        )

    # Buffers

    def get_buffer(self, tree_id: str, level: int) -> Buffer:
        """Return one buffer; without a row, an empty one."""
        row = self._session.execute(_BUFFERS.where(BufferRow.tree_id == tree_id, BufferRow.level == level)).first()
        return Buffer(tree_id=tree_id, level=level) if row is None else _buffer(row)

    def list_buffers(self, tree_id: str) -> list[Buffer]:
        """List a tree's buffers from level 0 up."""
        search = _BUFFERS.where(BufferRow.tree_id == tree_id).order_by(BufferRow.level)
        return [_buffer(row) for row in self._session.execute(search)]

    def list_buffers_since(self, before_ms: int) -> list[Buffer]:
        """List the buffers of active trees that have held something since ``before_ms`` or longer, oldest first."""
        since = func.coalesce(BufferRow.oldest_at_ms, BufferRow.updated_at_ms)
        search = (
            _BUFFERS.join(TreeRow, TreeRow.id == BufferRow.tree_id)
            .where(TreeRow.status == "active", BufferRow.item_ids_json != "[]", since <= before_ms)
            .order_by(since, BufferRow.tree_id, BufferRow.level)
        )
        return [buffer for row in self._session.execute(search) if (buffer := _buffer(row)).item_ids]

    def save_buffer(self, buffer: Buffer, now_ms: int) -> None:
        """Write one buffer as it is to stand."""
        key = {"tree_id": buffer.tree_id, "level": buffer.level}
        insert_missing(self._session, BufferRow, [{**key, "updated_at_ms": now_ms}])
        self._session.execute(
            update(BufferRow)
            .where(BufferRow.tree_id == buffer.tree_id, BufferRow.level == buffer.level)
            .values(
                item_ids_json=_dump(buffer.item_ids),
                token_sum=buffer.token_sum,
                oldest_at_ms=buffer.oldest_at_ms,
                updated_at_ms=now_ms,
            )
        )

    # Summaries

    def insert_summary(self, summary: Summary) -> None:
        """Insert one summary unless it is there: its id stands for its tree, its level and its children."""
        row = {
            "id": summary.id,
            "tree_id": summary.tree_id,
            "tree_kind": summary.tree_kind,
            "level": summary.level,
            "parent_id": summary.parent_id,
            "child_ids_json": _dump(summary.child_ids),
            "content": summary.content,
            "token_count": summary.token_count,
            "entities_json": _dump(summary.entity_ids),
            "topics_json": _dump(summary.topics),
            "time_range_start_ms": summary.time_range_start_ms,
            "time_range_end_ms": summary.time_range_end_ms,
            "score": summary.score,
            "sealed_at_ms": summary.sealed_at_ms,
            "doc_id": summary.doc_id,
            "version_ms": summary.version_ms,
        }
        insert_missing(self._session, SummaryRow, [row])

    def list_summaries_by_ids(self, ids: Iterable[str]) -> list[Summary]:
        """List the summaries with ``ids``, in that order and each once; missing and deleted ones are left out."""
        wanted = list(dict.fromkeys(ids))
        found = {
            row.id: _summary(row)
            for some in split_ids(wanted)
            for row in self._session.scalars(_SUMMARIES.where(SummaryRow.id.in_(some)))
        }
        return [found[summary_id] for summary_id in wanted if summary_id in found]

    def count_summaries(self) -> int:
        """Count the summaries of all trees."""
        return self._session.scalar(select(func.count()).select_from(SummaryRow)) or 0

    def list_summaries(self, tree_id: str) -> list[Summary]:
        """List a tree's summaries from the highest level down, in the order of their sealing."""
        search = _SUMMARIES.where(SummaryRow.tree_id == tree_id)
        order = (SummaryRow.level.desc(), SummaryRow.time_range_start_ms, SummaryRow.sealed_at_ms, SummaryRow.id)
        return [_summary(row) for row in self._session.scalars(search.order_by(*order))]

    def set_parent(self, ids: Sequence[str], parent_id: str) -> None:
        """Record which summary covers the summaries with ``ids``."""
        for some in split_ids(ids):
            self._session.execute(update(SummaryRow).where(SummaryRow.id.in_(some)).values(parent_id=parent_id))

    def is_child(self, tree_id: str, node_id: str) -> bool:
        """Tell whether a level-1 summary of the tree covers the node."""
        # No engine shares JSON functions with the other, so the text is searched and then read.
        search = select(SummaryRow.child_ids_json).where(
            SummaryRow.tree_id == tree_id,
            SummaryRow.level == 1,
            SummaryRow.child_ids_json.contains(_dump([node_id])[1:-1], autoescape=True),
        )
        return any(node_id in json.loads(child_ids) for child_ids in self._session.scalars(search))

    def find_document_level(self, tree_id: str, doc_id: str, version_ms: int | None) -> int | None:
        """Return the level of a document version's root, or None when it has not been sealed."""
        return self._session.scalar(
            select(func.max(SummaryRow.level)).where(
                SummaryRow.tree_id == tree_id,
                SummaryRow.doc_id == doc_id,
                SummaryRow.version_ms.is_not_distinct_from(version_ms),
            )
        )


_BUFFERS = select(
    BufferRow.tree_id, BufferRow.level, BufferRow.item_ids_json, BufferRow.token_sum, BufferRow.oldest_at_ms
)
_SUMMARIES = select(SummaryRow).where(SummaryRow.deleted == 0).execution_options(populate_existing=True)


def _dump(ids: Sequence[str]) -> str:
    return json.dumps(ids, ensure_ascii=False, separators=(",", ":"))


def _tree_or_none(row: TreeRow | None) -> Tree | None:
    return None if row is None else _tree(row)


def _tree(row: TreeRow) -> Tree:
    return Tree(
        id=row.id, kind=row.kind, scope=row.scope, root_id=row.root_id, max_level=row.max_level, status=row.status
    )


def _buffer(row: Row[str, int, str, int, int | None]) -> Buffer:
    return Buffer(
        tree_id=row.tree_id,
        level=row.level,
        item_ids=tuple(json.loads(row.item_ids_json)),
        token_sum=row.token_sum,
        oldest_at_ms=row.oldest_at_ms,
    )


def _summary(row: SummaryRow) -> Summary:
    return Summary(
        id=row.id,
        tree_id=row.tree_id,
        tree_kind=row.tree_kind,
        level=row.level,
        parent_id=row.parent_id,
        child_ids=tuple(json.loads(row.child_ids_json)),
        content=row.content,
        token_count=row.token_count,
        entity_ids=tuple(json.loads(row.entities_json)),
        topics=tuple(json.loads(row.topics_json)),
        time_range_start_ms=row.time_range_start_ms,
        time_range_end_ms=row.time_range_end_ms,
        score=row.score,
        sealed_at_ms=row.sealed_at_ms,
        doc_id=row.doc_id,
        version_ms=row.version_ms,
    )
