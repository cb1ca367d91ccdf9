"""seal: seal exactly one level of one tree (spec: Pipeline shape; contract §4.11)."""

from tinycortex.domain.jobs import NewJob
from tinycortex.domain.outcomes import Done
from tinycortex.domain.payloads import SealPayload
from tinycortex.handlers.context import JobContext


async def seal(ctx: JobContext, payload: SealPayload) -> Done:
    """Seal the level; what is due after it, the parent level as a rule, follows as a job of its own."""
    following = await ctx.delegates.seal_level(payload)
    return Done() if following is None else Done(follow_ups=[NewJob.seal(following)])
