"""reembed_backfill: embed a bounded batch, and come back until all is covered (spec: Job outcomes)."""

from tinycortex.domain import policy
from tinycortex.domain.outcomes import Defer, Done
from tinycortex.domain.payloads import ReembedBackfillPayload
from tinycortex.handlers.context import JobContext


async def reembed_backfill(ctx: JobContext, payload: ReembedBackfillPayload) -> Done | Defer:
    """Embed one batch. While it writes and more remains, the row itself is put off: its key stays held.

    A batch that wrote nothing ends the chain even when more seems to remain: coming back would find the same.
    """
    progress = await ctx.delegates.reembed_batch(payload.signature)
    if progress.written == 0 or not progress.more_remaining:
        return Done()
    return Defer(
        until_ms=ctx.clock.now_ms() + policy.REEMBED_BACKFILL_REVISIT_MS,
        reason=f"{progress.written} embedded at {payload.signature}, more to come",
        progress=True,
    )
