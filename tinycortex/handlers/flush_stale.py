"""flush_stale: force a seal of every buffer that has waited too long (spec: Pipeline shape; contract §4.11)."""

from tinycortex.domain.jobs import NewJob
from tinycortex.domain.outcomes import Done
from tinycortex.domain.payloads import FlushStalePayload, SealPayload
from tinycortex.handlers.context import JobContext


async def flush_stale(ctx: JobContext, payload: FlushStalePayload) -> Done:
    """Enqueue one forced seal for each stale buffer, all with one flush instant."""
    flushed_at_ms = ctx.clock.now_ms()
    stale = await ctx.delegates.list_stale_buffers(payload.max_age_secs)
    return Done(
        follow_ups=[
            NewJob.seal(SealPayload(tree_id=buffer.tree_id, level=buffer.level, force_now_ms=flushed_at_ms))
            for buffer in stale
        ]
    )
