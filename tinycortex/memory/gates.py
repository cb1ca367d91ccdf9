"""When a level is due to be sealed (contract §3). Pure."""

from tinycortex.config import MemorySettings
from tinycortex.domain.payloads import SealPayload
from tinycortex.repositories.trees import Buffer, TreeRepository

_MIN_FORCED = 2
"""A forced seal of a lone summary would only lay another level over it."""


def is_due(buffer: Buffer, settings: MemorySettings, *, forced: bool = False) -> bool:
    """Tell whether a buffer's level is to be sealed.

    Level 0 is due at ``input_token_budget`` tokens, a higher level at ``fan_out`` items; forced, level 0
    with any item and a higher level with two. Nothing is due from level ``max_cascade_depth`` on.
    """
    if not buffer.item_ids or buffer.level >= settings.max_cascade_depth:
        return False
    if buffer.level == 0:
        return forced or buffer.token_sum >= settings.input_token_budget
    return len(buffer.item_ids) >= (_MIN_FORCED if forced else settings.fan_out)


def find_due(trees: TreeRepository, tree_id: str, level: int, settings: MemorySettings) -> SealPayload | None:
    """Return the seal of one level when its gate is met, else None."""
    if is_due(trees.get_buffer(tree_id, level), settings):
        return SealPayload(tree_id=tree_id, level=level)
    return None
