"""append_node and list_stale_buffers: what waits in a tree, and for how long."""

from sqlalchemy.orm import Session

from tinycortex.config import MemorySettings
from tinycortex.db import Database
from tinycortex.domain.clock import Clock
from tinycortex.domain.decisions import AppendDecision, StaleBuffer
from tinycortex.domain.payloads import AppendTarget, LeafRef, NodeRef, TopicTarget
from tinycortex.memory.gates import is_due
from tinycortex.repositories.chunks import Chunk, ChunkRepository, Lifecycle
from tinycortex.repositories.scores import ScoreRepository
from tinycortex.repositories.trees import Summary, Tree, TreeRepository

SOURCE, TOPIC = "source", "topic"

_EARLIEST_MS = -(2**63)


class Buffers:
    """Pushes nodes into trees, and finds the buffers that have waited too long."""

    def __init__(self, database: Database, settings: MemorySettings, clock: Clock) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock

    def append(self, node: NodeRef, target: AppendTarget) -> AppendDecision | None:
        """Push a node into the target's level 0, once only: not when it waits there, nor when it is sealed.

        A source's tree is made when there is none. None: the node is missing or dropped, or the tree is
        missing or archived. The gate is reported of a repeated push too.
        """
        with self._database.transaction() as session:
            found = _find_node(session, node)
            if found is None:
                return None
            tree = self._lock_tree(session, target)
            if tree is None or not tree.is_active:
                return None
            trees, now_ms = TreeRepository(session), self._clock.now_ms()
            buffer = trees.get_buffer(tree.id, 0)
            if found.id not in buffer.item_ids and not _is_in(trees, tree, found):
                buffer = buffer.with_item(found.id, found.token_count, now_ms)
                trees.save_buffer(buffer, now_ms)
                if isinstance(found, Chunk) and tree.kind == SOURCE:
                    ChunkRepository(session).mark_buffered(found.id)
                    ScoreRepository(session).place_node(found.id, tree.id)
            return AppendDecision(tree_id=tree.id, gate_met=is_due(buffer, self._settings))

    def list_stale(self, max_age_secs: int) -> list[StaleBuffer]:
        """List, oldest first, the level-0 buffers that have held something for ``max_age_secs`` or longer.

        Of higher levels, those that have held two summaries or more for ``tree_flush_age_secs``.
        """
        now_ms = self._clock.now_ms()
        with self._database.reading() as session:
            trees = TreeRepository(session)
            low = trees.list_buffers_since(max(now_ms - max_age_secs * 1000, _EARLIEST_MS))
            high = trees.list_buffers_since(now_ms - self._settings.tree_flush_age_secs * 1000)
        found = [buffer for buffer in low if buffer.level == 0] + [buffer for buffer in high if buffer.level > 0]
        return [
            StaleBuffer(tree_id=buffer.tree_id, level=buffer.level)
            for buffer in found
            if is_due(buffer, self._settings, forced=True)
        ]

    def _lock_tree(self, session: Session, target: AppendTarget) -> Tree | None:
        trees = TreeRepository(session)
        if isinstance(target, TopicTarget):
            return trees.lock(target.tree_id)
        return trees.ensure_tree(SOURCE, target.source_id, self._clock.now_ms())


def _find_node(session: Session, node: NodeRef) -> Chunk | Summary | None:
    if isinstance(node, LeafRef):
        chunk = ChunkRepository(session).find(node.chunk_id)
        return None if chunk is None or chunk.lifecycle_status == Lifecycle.DROPPED else chunk
    return next(iter(TreeRepository(session).list_summaries_by_ids([node.summary_id])), None)


def _is_in(trees: TreeRepository, tree: Tree, found: Chunk | Summary) -> bool:
    """Tell whether a summary of the tree covers the node already."""
    if isinstance(found, Chunk) and tree.kind == SOURCE:
        return found.is_sealed
    # A tree's own summary is in it at a higher level; pushed below itself it would close a circle.
    own = isinstance(found, Summary) and found.tree_id == tree.id
    return own or trees.is_child(tree.id, found.id)
