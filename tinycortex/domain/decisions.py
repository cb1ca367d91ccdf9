"""What the delegates report, as plain values; the handlers turn them into follow-ups and outcomes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractDecision:
    """The admission of one chunk.

    Attributes:
        kept: whether the chunk is admitted.
        tree_scope: scope of the source tree that it belongs to.
        document_subtree: whether its document's own seal places it, so that no append is due.
    """

    kept: bool
    tree_scope: str
    document_subtree: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendDecision:
    """The state of a tree's first buffer after a push.

    Attributes:
        tree_id: the tree that took the node.
        gate_met: whether its level 0 is due to be sealed.
    """

    tree_id: str
    gate_met: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleBuffer:
    """One buffer that has waited longer than the age asked for."""

    tree_id: str
    level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReembedProgress:
    """The result of one batch.

    Attributes:
        written: vectors stored, plus items marked as skipped for good.
        more_remaining: whether work is left at the signature.
    """

    written: int
    more_remaining: bool
