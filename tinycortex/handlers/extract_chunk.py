"""extract_chunk: score one chunk, decide its admission (spec: Pipeline shape; contract §4.11)."""

from tinycortex.domain.jobs import NewJob
from tinycortex.domain.outcomes import Done
from tinycortex.domain.payloads import (
    AppendBufferPayload,
    ExtractChunkPayload,
    LeafRef,
    ReembedBackfillPayload,
    SourceTarget,
)
from tinycortex.handlers.context import JobContext


async def extract_chunk(ctx: JobContext, payload: ExtractChunkPayload) -> Done:
    """Admit or drop the chunk; a kept one goes to its tree's buffer, and arms the embedding chain."""
    decision = await ctx.delegates.extract_chunk(payload.chunk_id)
    if decision is None or not decision.kept:
        return Done()
    follow_ups = []
    if not decision.document_subtree:
        node, target = LeafRef(chunk_id=payload.chunk_id), SourceTarget(source_id=decision.tree_scope)
        follow_ups.append(NewJob.append_buffer(AppendBufferPayload(node=node, target=target)))
    signature = await ctx.delegates.active_signature()
    if signature is not None and await ctx.delegates.has_uncovered_reembed_work(signature):
        follow_ups.append(NewJob.reembed_backfill(ReembedBackfillPayload(signature=signature)))
    return Done(follow_ups=follow_ups)
