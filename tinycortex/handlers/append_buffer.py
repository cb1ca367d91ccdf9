"""append_buffer: push one node into a tree's first buffer (spec: Pipeline shape; contract §4.11)."""

from tinycortex.domain.jobs import NewJob
from tinycortex.domain.outcomes import Done
from tinycortex.domain.payloads import AppendBufferPayload, SealPayload
from tinycortex.handlers.context import JobContext


async def append_buffer(ctx: JobContext, payload: AppendBufferPayload) -> Done:
    """Push the node, and seal level 0 when its gate is met. A missing node or tree is nothing to do."""
    decision = await ctx.delegates.append_node(payload.node, payload.target)
    if decision is None or not decision.gate_met:
        return Done()
    return Done(follow_ups=[NewJob.seal(SealPayload(tree_id=decision.tree_id, level=0))])
