"""What the benchmarks make of their measurements: medians, ratios, verdicts, and the pages that show them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from rich.progress import Progress

from benchmarks.backlogs import Backlogs
from benchmarks.chart import draw, position
from benchmarks.figures import RATIO, Row, Target, Verdict, percentile, ratios, readable, readable_count
from benchmarks.plan import QUICK, Plan
from benchmarks.report import document_of, table_of

FAST = Row("worker ÷ bare driver", RATIO, (3.0, 5.0, 4.0), Target.at_least(2, goal=4))
SLOW = Row("enqueue <one> & more", "ms", (9.0,), Target.at_most(3, goal=1))
FREE = Row("extra", "jobs/s", (1.0, 2.0))


@contextmanager
def planned(folder: Path, rounds: int) -> Iterator[Plan]:
    with Progress(disable=True) as progress:
        yield Plan(rounds=rounds, sizes=QUICK, backlogs=Backlogs(folder), progress=progress)


def test_a_ratio_is_taken_within_its_round() -> None:
    """A round in which everything was slow says as much as any other."""
    assert ratios((10.0, 1.0, 20.0), (5.0, 0.5, 10.0)) == (2.0, 2.0, 2.0)


def test_what_was_not_measured_in_the_same_rounds_has_no_ratio() -> None:
    """A missing round would pair the others wrongly."""
    with pytest.raises(ValueError, match="zip"):
        ratios((1.0, 2.0), (1.0,))


def test_the_median_is_quoted_and_the_spread_is_shown() -> None:
    """One odd round moves the spread alone."""
    assert (FAST.median, FAST.low, FAST.high) == (4.0, 3.0, 5.0)


@pytest.mark.parametrize(
    ("target", "value", "verdict"),
    [
        (Target.at_least(2, goal=4), 4, Verdict.GOAL),
        (Target.at_least(2, goal=4), 2, Verdict.HOLDS),
        (Target.at_least(2, goal=4), 1.99, Verdict.MISSED),
        (Target.at_least(2, goal=4), 0, Verdict.MISSED),
        (Target.at_most(2, goal=1.4), 1.4, Verdict.GOAL),
        (Target.at_most(2, goal=1.4), 2, Verdict.HOLDS),
        (Target.at_most(2, goal=1.4), 2.01, Verdict.MISSED),
    ],
)
def test_a_figure_is_held_against_bound_and_goal(target: Target, value: float, verdict: Verdict) -> None:
    """Both are included, whichever way is better."""
    assert target.judge(value) is verdict


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1, 100), (0.001, 1)])
def test_a_percentile_is_one_of_the_values(share: float, value: float) -> None:
    """It is the least one that so many do not exceed."""
    assert percentile(range(100, 0, -1), share) == value


@pytest.mark.parametrize(
    ("value", "text"), [(0.0834, "0.083"), (1.4, "1.40"), (99.999, "100.00"), (1234.5, "1,234"), (45_000, "45,000")]
)
def test_a_figure_is_shown_with_the_digits_that_count(value: float, text: str) -> None:
    """Nobody reads more of a figure that changes with the disk's mood."""
    assert readable(value) == text


@pytest.mark.parametrize(("rows", "text"), [(200, "200"), (1_000, "1 k"), (1_500, "1.5 k"), (1_000_000, "1 M")])
def test_a_number_of_rows_is_shown_in_short(rows: int, text: str) -> None:
    """As in the names of the figures."""
    assert readable_count(rows) == text


def test_contestants_take_turns(tmp_path: Path) -> None:
    """A B A B, never A A B B."""
    order: list[str] = []

    def contestant(name: str) -> dict[str, float]:
        order.append(name)
        return {name: len(order)}

    with planned(tmp_path, rounds=2) as plan:
        found = plan.interleave("", {"a": lambda: contestant("a"), "b": lambda: contestant("b")})
    assert order == ["a", "b", "a", "b"]
    assert found == {"a": (1, 3), "b": (2, 4)}


def test_the_table_shows_every_row() -> None:
    """With a target or without."""
    assert table_of({"one": [FAST, FREE], "other": [SLOW]}).row_count == 3


def test_the_document_holds_every_value_and_what_it_should_be() -> None:
    """Whoever reads it needs no other page."""
    document = json.loads(json.dumps(document_of({"one": [FAST, FREE], "other": [SLOW]}, rounds=3, is_quick=False)))
    fast, free, slow = document["rows"]
    assert fast["values"] == [3, 5, 4]
    assert (fast["benchmark"], fast["at_least"], fast["goal"], fast["verdict"]) == ("one", 2, 4, "goal")
    assert (slow["benchmark"], slow["at_most"], slow["verdict"]) == ("other", 3, "MISSED")
    assert "verdict" not in free


def test_the_chart_has_a_bar_for_each_target() -> None:
    """It is well-formed whatever a row is called, and fits light and dark."""
    drawn = draw([FAST, FREE, SLOW])
    texts = [element.text for element in ET.fromstring(drawn).iter() if element.tag.endswith("text")]  # noqa: S314 - ours
    assert FAST.what in texts
    assert SLOW.what in texts
    assert FREE.what not in texts
    assert "prefers-color-scheme: dark" in drawn


def test_a_bar_goes_to_the_better_side_of_its_bound() -> None:
    """Whether more is better or less, and never beyond the scale."""
    bound = position(1)
    for row, is_better in ((FAST, True), (SLOW, False)):
        assert row.target is not None
        assert (position(row.target.score(row.median)) > bound) is is_better
    assert position(1_000_000) == position(8)
    assert position(0) == position(1 / 8)
