"""seal_document: build one document version's subtree (spec: Pipeline shape; contract §4.11)."""

from tinycortex.domain.jobs import NewJob
from tinycortex.domain.outcomes import Done
from tinycortex.domain.payloads import SealDocumentPayload
from tinycortex.handlers.context import JobContext


async def seal_document(ctx: JobContext, payload: SealDocumentPayload) -> Done:
    """Build the subtree and merge it; a document without chunks is nothing to do."""
    if not payload.chunk_ids:
        return Done()
    following = await ctx.delegates.seal_document(payload)
    return Done() if following is None else Done(follow_ups=[NewJob.seal(following)])
