"""Points and lines over two axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10

from markupsafe import Markup

from attn_ext.profile.report.svg import chart, label, percent, tag, title

_HEIGHT, _TOP, _FOOT = 320, 36, 40
#: Room left of the axis, for the texts of the ticks, and right of it, as shares of the width.
_LEFT, _RIGHT = 0.13, 0.07


@dataclass(frozen=True)
class Axis:
    """`ticks` are values with their texts; the axis reaches from `low` to `high`."""

    name: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = True

    def share(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        return (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    tip: str


@dataclass
class Line:
    """Points with a name; `kind` is its class in the style sheet. `joined` draws the line."""

    name: str
    kind: str
    points: list[Point]
    joined: bool = True
    dotted: bool = True


def plot(x: Axis, y: Axis, lines: Sequence[Line], summary: str) -> Markup:
    """The chart; `summary` is what a screen reader says of it."""
    floor = _HEIGHT - _FOOT

    def across(value: float) -> str:
        return percent(_LEFT + (1 - _LEFT - _RIGHT) * x.share(value))

    def down(value: float) -> float:
        return floor - (floor - _TOP) * y.share(value)

    drawn = []
    for value, text in y.ticks:
        at = down(value)
        drawn.append(tag("line", x1="0", y1=at, x2="100%", y2=at, class_="grid"))
        drawn.append(label("2", at - 4, text, "tick"))
    for value, text in x.ticks:
        at_x = across(value)
        drawn.append(tag("line", x1=at_x, y1=floor, x2=at_x, y2=floor + 5, class_="grid"))
        drawn.append(label(at_x, floor + 18, text, "tick", "middle"))
    drawn.append(label("50%", _HEIGHT - 4, x.name, "tick", "middle"))
    drawn.append(label("2", 11, y.name, "tick"))
    for line in lines:
        if line.joined:
            drawn += [
                tag(
                    "line", x1=across(a.x), y1=down(a.y), x2=across(b.x), y2=down(b.y),
                    class_=f"line {line.kind}",
                )
                for a, b in zip(line.points, line.points[1:], strict=False)
            ]  # fmt: skip
    for line in lines:
        if line.dotted:
            drawn += [
                tag(
                    "circle", title(point.tip), cx=across(point.x), cy=down(point.y), r=5,
                    class_=f"dot {line.kind}",
                )
                for point in line.points
            ]  # fmt: skip
    return chart(_HEIGHT, summary, *drawn, class_="plot")
