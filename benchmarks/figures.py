"""Figures as values: what was measured in each round, the ratio of two, and the target that one is held against."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Self

Series = Mapping[str, tuple[float, ...]]
"""What was measured, by name: one value a round."""

RATIO = "×"  # noqa: RUF001 - the sign of times, not a letter
"""The unit of a ratio."""


class Verdict(StrEnum):
    """Where a figure stands."""

    GOAL = "goal"
    HOLDS = "holds"
    MISSED = "MISSED"


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure should be.

    Attributes:
        bound: the least, or the most, that is accepted.
        goal: what is hoped for.
        rising: whether more is better.
    """

    bound: float
    goal: float
    rising: bool

    @classmethod
    def at_least(cls, bound: float, *, goal: float) -> Self:
        """Return the target of a figure of which more is better."""
        return cls(bound, goal, rising=True)

    @classmethod
    def at_most(cls, bound: float, *, goal: float) -> Self:
        """Return the target of a figure of which less is better."""
        return cls(bound, goal, rising=False)

    @property
    def sign(self) -> str:
        """The relation that a figure should have to bound and goal."""
        return "≥" if self.rising else "≤"

    def score(self, value: float) -> float:
        """Return how many times better than the bound ``value`` is; below 1 it misses."""
        return value / self.bound if self.rising else self.bound / value

    def judge(self, value: float) -> Verdict:
        """Return where ``value`` stands."""
        score = self.score(value)
        if score >= self.score(self.goal):
            return Verdict.GOAL
        return Verdict.HOLDS if score >= 1 else Verdict.MISSED


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        what: what was measured.
        unit: of the values.
        values: one a round, or one a sample.
        target: what the median should be, where something was promised.
    """

    what: str
    unit: str
    values: tuple[float, ...]
    target: Target | None = None

    @property
    def median(self) -> float:
        """The figure that is quoted."""
        return median(self.values)

    @property
    def low(self) -> float:
        """The least value."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The greatest value."""
        return max(self.values)

    @property
    def verdict(self) -> Verdict | None:
        """Where the median stands; None without a target."""
        return None if self.target is None else self.target.judge(self.median)


def ratios(above: Sequence[float], below: Sequence[float]) -> tuple[float, ...]:
    """Return the ratio of each round, whose median is quoted: the machine's mood is the same above and below.

    Raises:
        ValueError: the two were not measured in the same rounds.
    """
    return tuple(one / other for one, other in zip(above, below, strict=True))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that ``share`` (0 to 1) of all ``values`` do not exceed."""
    return sorted(values)[max(0, -int(-share * len(values)) - 1)]


def readable(value: float) -> str:
    """Return ``value`` with about three digits that count."""
    if abs(value) >= 100:  # noqa: PLR2004 - three digits stand before the point
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def readable_count(count: int) -> str:
    """Return a number of rows in short: ``20 k``, ``1 M``."""
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if count >= size:
            return f"{count / size:g} {letter}"
    return str(count)
