"""seal_document: the subtree of one version of a document (spec: Pipeline shape, seal_document)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from tinycortex.config import MemorySettings
from tinycortex.db import Database
from tinycortex.domain.clock import Clock
from tinycortex.domain.payloads import SealDocumentPayload, SealPayload
from tinycortex.errors import JobFailure
from tinycortex.memory.admission import is_kept, score_chunk
from tinycortex.memory.authoring import Author, Draft, TreeRef
from tinycortex.memory.buffers import SOURCE
from tinycortex.memory.gates import find_due
from tinycortex.memory.nodes import Node, list_leaves, summary_node
from tinycortex.memory.seal import MAX_TRIES
from tinycortex.repositories.chunks import Chunk, ChunkRepository, Lifecycle
from tinycortex.repositories.trees import TreeRepository, tree_id_of


@dataclass(frozen=True, slots=True)
class _Plan:
    tree: TreeRef
    leaves: tuple[Node, ...]


class DocumentSealer:
    """Builds a document's summaries bottom-up, and merges the root into its connection's tree.

    The root waits in the tree's buffer of its own level, so that every summary's children are one level
    below it. A transaction is open only to read the chunks and to write the finished subtree.
    """

    def __init__(self, database: Database, settings: MemorySettings, clock: Clock, author: Author) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._author = author

    def seal(self, payload: SealDocumentPayload) -> SealPayload | None:
        """Seal the admitted chunks of one version; return the seal of the root's level when it is due.

        Admission is worked out here where it has yet to be decided, so the result does not depend on which
        chunks have been extracted. Chunks that wait in a buffer, or are sealed, are left where they are. A
        version that has been sealed changes nothing and reports the same.

        Raises:
            JobFailure: other processes kept changing the chunks (transient).
        """
        for _ in range(MAX_TRIES):
            with self._database.reading() as session:
                kept = [chunk for chunk in self._list_chunks(session, payload) if self._is_kept(chunk)]
                plan = self._plan(session, payload, [chunk for chunk in kept if _is_free(chunk)])
                if not plan.leaves:
                    return self._find_due(session, plan.tree.id, payload) if kept else None
            drafts, roots = self._draft(payload, plan)
            with self._database.transaction() as session:
                if self._write(session, payload, plan, drafts, roots):
                    return self._find_due(session, plan.tree.id, payload)
        raise JobFailure.transient(
            "document_contended", f"chunks of {payload.doc_id} changed during each of {MAX_TRIES} seals"
        )

    def _list_chunks(self, session: Session, payload: SealDocumentPayload) -> list[Chunk]:
        return ChunkRepository(session).list_by_ids(payload.chunk_ids)

    def _is_kept(self, chunk: Chunk) -> bool:
        return is_kept(chunk, score_chunk(chunk, self._settings.admission_threshold))

    def _plan(self, session: Session, payload: SealDocumentPayload, chunks: list[Chunk]) -> _Plan:
        tree = TreeRepository(session).find_tree_of(SOURCE, payload.tree_scope)
        tree_id = tree_id_of(SOURCE, payload.tree_scope) if tree is None else tree.id
        leaves = list_leaves(session, chunks) if tree is None or tree.is_active else []
        return _Plan(TreeRef(tree_id, SOURCE), tuple(leaves))

    def _draft(self, payload: SealDocumentPayload, plan: _Plan) -> tuple[list[Draft], list[Draft]]:
        """Return every summary of the subtree, lowest level first, and those on top."""
        level = 1
        top = [self._draft_one(payload, plan, level, group) for group in self._group_by_tokens(plan.leaves)]
        drafts = list(top)
        # One root as a rule; the deepest level allowed may have several.
        while len(top) > 1 and level < self._settings.max_cascade_depth:
            level += 1
            nodes = [summary_node(draft.summary) for draft in top]
            top = [self._draft_one(payload, plan, level, group) for group in self._group_evenly(nodes)]
            drafts += top
        return drafts, top

    def _draft_one(self, payload: SealDocumentPayload, plan: _Plan, level: int, nodes: Sequence[Node]) -> Draft:
        return self._author.draft(plan.tree, level, nodes, doc_id=payload.doc_id, version_ms=payload.version_ms)

    def _group_by_tokens(self, nodes: Sequence[Node]) -> Iterator[list[Node]]:
        group: list[Node] = []
        tokens = 0
        for node in nodes:
            if group and tokens + node.token_count > self._settings.input_token_budget:
                yield group
                group, tokens = [], 0
            group.append(node)
            tokens += node.token_count
        if group:
            yield group

    def _group_evenly(self, nodes: list[Node]) -> Iterator[list[Node]]:
        # Even groups: eleven summaries make six and five rather than ten and a lone one.
        count = -(-len(nodes) // self._settings.fan_out)
        size, larger = divmod(len(nodes), count)
        start = 0
        for number in range(count):
            end = start + size + (number < larger)
            yield nodes[start:end]
            start = end

    def _write(
        self,
        session: Session,
        payload: SealDocumentPayload,
        plan: _Plan,
        drafts: Sequence[Draft],
        roots: Sequence[Draft],
    ) -> bool:
        """Write the subtree, unless one of its chunks or its tree is no longer what was planned with."""
        trees, now_ms = TreeRepository(session), self._clock.now_ms()
        tree = trees.ensure_tree(SOURCE, payload.tree_scope, now_ms)
        chunks = ChunkRepository(session).list_by_ids([leaf.id for leaf in plan.leaves])
        free = [chunk for chunk in chunks if _is_free(chunk) and chunk.lifecycle_status != Lifecycle.DROPPED]
        if tree.id != plan.tree.id or not tree.is_active or len(free) != len(plan.leaves):
            return False
        for draft in drafts:
            self._author.write(session, draft, owns_leaves=True)
            # raise_root compares with the tree as it stood, so lowest first ends with the highest.
            trees.raise_root(tree, draft.summary)
        for root in roots:
            summary = root.summary
            buffer = trees.get_buffer(tree.id, summary.level)
            trees.save_buffer(buffer.with_item(summary.id, summary.token_count, now_ms), now_ms)
        return True

    def _find_due(self, session: Session, tree_id: str, payload: SealDocumentPayload) -> SealPayload | None:
        trees = TreeRepository(session)
        level = trees.find_document_level(tree_id, payload.doc_id, payload.version_ms)
        tree = trees.find_tree(tree_id)
        if level is None or tree is None or not tree.is_active:
            return None
        return find_due(trees, tree_id, level, self._settings)


def _is_free(chunk: Chunk) -> bool:
    return not chunk.is_sealed and chunk.lifecycle_status != Lifecycle.BUFFERED
