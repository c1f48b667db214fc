"""Bars: one for each row, in parts, all on the same scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from attn_ext.profile.report.svg import chart, label, percent, tag, title

_BAR, _TEXT, _GAP = 22, 20, 12


@dataclass(frozen=True)
class Part:
    """A stretch of a bar: `kind` is its class in the style sheet; the only one needs no name."""

    kind: str
    name: str
    value: float


@dataclass
class Bar:
    """`text` stands above the bar, at the other end from its name."""

    name: str
    text: str
    parts: Sequence[Part]

    @property
    def length(self) -> float:
        return sum(part.value for part in self.parts)


def bars(rows: Sequence[Bar], summary: str, unit: str) -> Markup:
    """The chart. `summary` is what a screen reader says of it, `unit` that of the values."""
    longest = max((row.length for row in rows), default=0.0) or 1.0
    drawn = []
    for number, row in enumerate(rows):
        top = number * (_TEXT + _BAR + _GAP)
        drawn.append(label("0", top + 14, row.name, "name"))
        drawn.append(label("100%", top + 14, row.text, "value", "end"))
        at = 0.0
        for part in row.parts:
            share = f"{part.value / (row.length or 1.0):.1%} of {row.name}"
            text = [f"{part.name or row.name}: {part.value:,.4g} {unit}"]
            text += [share] if len(row.parts) > 1 else []
            drawn.append(
                tag(
                    "svg",
                    title("\n".join(text)),
                    tag("rect", width="100%", height="100%"),
                    *([label("6", 15, part.name)] if part.name else []),
                    x=percent(at / longest),
                    y=top + _TEXT,
                    width=percent(part.value / longest),
                    height=_BAR,
                    class_=f"box {part.kind}",
                )
            )
            at += part.value
    height = len(rows) * (_TEXT + _BAR + _GAP)
    return chart(height, summary, *drawn, class_="bars")
