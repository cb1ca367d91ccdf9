"""seal_level: one level of one tree into one summary (spec: Pipeline shape; contract §3)."""

from dataclasses import dataclass

from sqlalchemy.orm import Session

from tinycortex.config import MemorySettings
from tinycortex.db import Database
from tinycortex.domain.clock import Clock
from tinycortex.domain.payloads import SealPayload
from tinycortex.errors import JobFailure
from tinycortex.memory.authoring import Author, Draft, TreeRef
from tinycortex.memory.buffers import SOURCE
from tinycortex.memory.gates import find_due, is_due
from tinycortex.memory.nodes import Node, list_nodes
from tinycortex.repositories.trees import Buffer, Tree, TreeRepository

MAX_TRIES = 5
"""Times that a seal begins anew because another process took what it was summarising."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one seal takes out of a buffer.

    Attributes:
        tree: the tree.
        nodes: the children of the summary to be.
        taken: ids of the children, and of items that only leave the buffer: they are gone, or covered by
            a summary already.
        tokens: what ``taken`` weighs.
        leaves_some: whether one summary could not take all that was there.
    """

    tree: Tree
    nodes: tuple[Node, ...]
    taken: frozenset[str]
    tokens: int
    leaves_some: bool


class LevelSealer:
    """Seals levels. A transaction is open only to read the buffer and to write the finished summary."""

    def __init__(self, database: Database, settings: MemorySettings, clock: Clock, author: Author) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._author = author

    def seal(self, payload: SealPayload) -> SealPayload | None:
        """Seal one summary's worth of a level, and return what is due after it.

        That is the same level again while enough is left in it, since one summary takes no more than
        ``input_token_budget`` tokens or ``fan_out`` items; then the parent level when its gate is met. A
        level that is not due, or has been sealed by a run that was killed, reports the same.

        Raises:
            JobFailure: other processes kept changing the buffer (transient).
        """
        for _ in range(MAX_TRIES):
            with self._database.reading() as session:
                plan = self._plan(session, payload)
                if plan is None:
                    return self._find_following(session, payload, insist=False)
            draft = None
            if plan.nodes:
                tree = TreeRef(plan.tree.id, plan.tree.kind)
                draft = self._author.draft(tree, payload.level + 1, plan.nodes)
            with self._database.transaction() as session:
                if self._write(session, payload.level, plan, draft):
                    return self._find_following(session, payload, insist=plan.leaves_some)
        raise JobFailure.transient(
            "buffer_contended", f"level {payload.level} of {payload.tree_id} changed during each of {MAX_TRIES} seals"
        )

    def _plan(self, session: Session, payload: SealPayload) -> _Plan | None:
        trees = TreeRepository(session)
        tree = trees.find_tree(payload.tree_id)
        buffer = trees.get_buffer(payload.tree_id, payload.level)
        if tree is None or not tree.is_active or not self._is_due(buffer, payload):
            return None
        nodes = list_nodes(session, buffer.item_ids)
        # A topic's tree borrows nodes, whose covering summary is then another tree's.
        fresh = [node for node in nodes if not (node.covered and (tree.kind == SOURCE or payload.level > 0))]
        chosen = self._choose(fresh, payload.level)
        staying = {node.id for node in fresh}.difference(node.id for node in chosen)
        return _Plan(
            tree=tree,
            nodes=tuple(chosen),
            taken=frozenset(buffer.item_ids).difference(staying),
            tokens=sum(node.token_count for node in nodes if node.id not in staying),
            leaves_some=bool(staying),
        )

    def _choose(self, nodes: list[Node], level: int) -> list[Node]:
        if level > 0:
            return nodes[: self._settings.fan_out]
        # Sorted, so that a summary reads in the order of its sources and does not depend on which worker
        # was faster.
        chosen: list[Node] = []
        tokens = 0
        for node in sorted(nodes, key=lambda node: node.place):
            tokens += node.token_count
            if chosen and tokens > self._settings.input_token_budget:
                break
            chosen.append(node)
        return chosen

    def _write(self, session: Session, level: int, plan: _Plan, draft: Draft | None) -> bool:
        """Write what was planned, unless part of it has left the buffer meanwhile."""
        trees, now_ms = TreeRepository(session), self._clock.now_ms()
        tree = trees.lock(plan.tree.id)
        buffer = trees.get_buffer(plan.tree.id, level)
        if tree is None or not tree.is_active or not plan.taken.issubset(buffer.item_ids):
            return False
        trees.save_buffer(buffer.without_items(plan.taken, plan.tokens, now_ms), now_ms)
        if draft is not None:
            summary = draft.summary
            self._author.write(session, draft, owns_leaves=tree.kind == SOURCE)
            parent = trees.get_buffer(tree.id, level + 1)
            trees.save_buffer(parent.with_item(summary.id, summary.token_count, now_ms), now_ms)
            trees.raise_root(tree, summary)
        return True

    def _find_following(self, session: Session, payload: SealPayload, *, insist: bool) -> SealPayload | None:
        trees = TreeRepository(session)
        tree = trees.find_tree(payload.tree_id)
        if tree is None or not tree.is_active:
            return None
        # A forced seal goes on only with what it found: forcing each later push would make tiny summaries.
        if insist and self._is_due(trees.get_buffer(tree.id, payload.level), payload):
            return payload
        levels = (payload.level, payload.level + 1)
        return next((due for level in levels if (due := find_due(trees, tree.id, level, self._settings))), None)

    def _is_due(self, buffer: Buffer, payload: SealPayload) -> bool:
        return is_due(buffer, self._settings, forced=payload.force_now_ms is not None)
