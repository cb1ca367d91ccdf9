"""The chart: a bar for each figure with a target, from its bound to the right where it is better, else to the left."""

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from benchmarks.figures import RATIO, Row, Target, readable

_WIDTH, _TOP, _LINE, _BOTTOM = 960, 56, 26, 40
_LEFT, _RIGHT = 440, 740
"""Between these is the scale; labels stand to its left, values to its right."""
_REACH = 3
"""The scale goes from 2^-3 to 2^3 times the bound; a bar beyond ends at its edge."""
_MIDDLE = (_LEFT + _RIGHT) / 2
_STEP = (_RIGHT - _LEFT) / (2 * _REACH)

_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .page { fill: #ffffff; } .faint { fill: #59636e; } .line { stroke: #d1d9e0; } .bound { stroke: #1f2328; }
  .goal { fill: #2da44e; } .holds { fill: #bf8700; } .missed { fill: #cf222e; }
  .mark { stroke: #1f2328; stroke-width: 2; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .page { fill: #0d1117; } .faint { fill: #9198a1; } .line { stroke: #3d444d; }
    .bound, .mark { stroke: #f0f6fc; } .goal { fill: #3fb950; } .holds { fill: #d29922; } .missed { fill: #f85149; }
  }
"""


def draw(rows: Sequence[Row]) -> str:
    """Return the SVG of those of ``rows`` that have a target; its own style makes it readable in light and dark."""
    bars = [(row, row.target) for row in rows if row.target is not None]
    height = _TOP + _LINE * len(bars) + _BOTTOM
    size = f'width="{_WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_WIDTH} {height}" role="img">',
        "<title>Figures against their targets</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" {size} rx="6"/>',
        *_scale(height),
    ]
    for number, (row, target) in enumerate(bars):
        lines += _bar(row, target, _TOP + _LINE * number)
    lines += ["</svg>", ""]
    return "\n".join(lines)


def position(score: float) -> float:
    """Return where ``score``, in times better than the bound, stands on the scale (px); beyond it, its edge."""
    doublings = math.log2(score) if score > 0 else -_REACH
    return _MIDDLE + _STEP * max(-_REACH, min(_REACH, doublings))


def _scale(height: int) -> Iterator[str]:
    foot = height - _BOTTOM + 4
    for power in range(-_REACH, _REACH + 1):
        x = _MIDDLE + _STEP * power
        label = f"{2**power}" if power >= 0 else f"1/{2**-power}"
        kind = "bound" if power == 0 else "line"
        yield f'<line class="{kind}" x1="{x:g}" y1="{_TOP - 6}" x2="{x:g}" y2="{foot}"/>'
        yield f'<text class="faint" x="{x:g}" y="{foot + 16}" text-anchor="middle">{label}</text>'
    yield f'<text class="faint" x="{_MIDDLE:g}" y="22" text-anchor="middle">times better than the bound</text>'
    yield f'<text class="faint" x="{_MIDDLE:g}" y="40" text-anchor="middle">line: bound, tick: goal</text>'


def _bar(row: Row, target: Target, top: int) -> Iterator[str]:
    end, goal = position(target.score(row.median)), position(target.score(target.goal))
    kind = target.judge(row.median).lower()
    unit = "" if row.unit == RATIO else f" {row.unit}"
    value = f"{readable(row.median)}{unit} ({target.sign} {readable(target.bound)})"
    base = top + _LINE - 9
    yield f'<text x="{_LEFT - 14}" y="{base}" text-anchor="end">{escape(row.what)}</text>'
    yield (
        f'<rect class="{kind}" x="{min(end, _MIDDLE):.1f}" y="{top + 5}" '
        f'width="{max(abs(end - _MIDDLE), 1):.1f}" height="{_LINE - 10}"/>'
    )
    yield f'<line class="mark" x1="{goal:.1f}" y1="{top + 2}" x2="{goal:.1f}" y2="{top + _LINE - 2}"/>'
    yield f'<text x="{_RIGHT + 14}" y="{base}">{escape(value)}</text>'
