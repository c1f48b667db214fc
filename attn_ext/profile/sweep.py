"""A measured call over several lengths: figures by length, growth, the file and the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attn_ext.profile.case import CaseError
from attn_ext.profile.columns import mib, us
from attn_ext.profile.figures import SCHEMA, Row, Summary
from attn_ext.profile.growth import Growth, growth
from attn_ext.profile.table import UNKNOWN, Line, Span, cut, grid, where


class Figure:
    """A figure that is followed over the lengths."""

    def __init__(
        self, key: str, title: str, of: Callable[[Row], float | None], text: Callable[[Any], Any]
    ) -> None:
        self.key, self.title, self.of, self.text = key, title, of, text


@dataclass
class Sweep:
    """Summaries of the same variants, one for each length, from the shortest to the longest."""

    summaries: list[Summary]

    @property
    def lengths(self) -> list[int]:
        return [summary.facts["case"]["seq"] for summary in self.summaries]

    @property
    def variants(self) -> list[str]:
        return [row.variant for row in self.summaries[0].rows]

    @property
    def figures(self) -> tuple[Figure, Figure]:
        """Time and memory. The time is the device's on a GPU, that of a call on a CPU."""
        gpu = self.summaries[0].on_gpu
        name = "gpu_us" if gpu else "call_us"
        title = "GPU us: sum of a call's device events" if gpu else "call us: wall time of a call"
        time = Figure(name, title, lambda row: row.gpu_us if gpu else row.call_us, us)
        title = "peak MiB: allocated on top of the inputs"
        return time, Figure("peak_bytes", title, lambda row: row.peak_bytes, mib)

    def of(self, figure: Figure, variant: str) -> dict[int, float]:
        """Length -> the variant's figure, where it is known."""
        found = {}
        for length, summary in zip(self.lengths, self.summaries, strict=True):
            row = next(row for row in summary.rows if row.variant == variant)
            if (value := figure.of(row)) is not None:
                found[length] = value
        return found

    def growth(self, figure: Figure, variant: str) -> Growth | None:
        return growth(self.of(figure, variant))

    def to_dict(self) -> dict[str, Any]:
        """What sweep.json holds."""
        fits: dict[str, dict[str, Any]] = {}
        for figure in self.figures:
            for variant in self.variants:
                if fit := self.growth(figure, variant):
                    fits.setdefault(variant, {})[figure.key] = fit._asdict()
        summaries = [summary.to_dict() for summary in self.summaries]
        return {"schema": SCHEMA, "lengths": self.lengths, "growth": fits, "summaries": summaries}


def lengths_of(text: str) -> list[int]:
    """ "512..4096" is 512, 1024, 2048, 4096, "512,700" what it says.

    Raises:
        CaseError: anything else, or a length below 1.
    """
    expected = "lengths such as 512..16384 (doubling) or 512,1000,4096"
    first, dots, last = text.partition("..")
    try:
        given = [int(part) for part in ([first, last] if dots else text.split(","))]
    except ValueError:
        raise CaseError("seq", expected, text) from None
    if min(given) < 1 or (dots and given[0] > given[1]):
        raise CaseError("seq", expected, text)
    if not dots:
        return sorted(set(given))
    doubled = [given[0]]
    while doubled[-1] * 2 <= given[1]:
        doubled.append(doubled[-1] * 2)
    return doubled if doubled[-1] == given[1] else [*doubled, given[1]]


def render(sweep: Sweep, title: str) -> list[Line]:
    """A table for each figure: a row for each variant, a column for each length, the growth."""
    lines = [[Span(cut(title), "bold")], [Span(cut(where(sweep.summaries[0])), "dim")]]
    for figure in sweep.figures:
        lines += [[], [Span(figure.title)]]
        titles = ["variant", *map(str, sweep.lengths), "grows as", "off by", "at the end"]
        lines += grid(titles, [_cells(sweep, figure, variant) for variant in sweep.variants])
    lines += [
        [Span("grows as    the power of the length that fits best over all lengths", "dim")],
        [Span("off by      how far a typical point lies from that fit", "dim")],
        [Span("at the end  the power between the two longest lengths", "dim")],
    ]
    for variant, reason in _reasons(sweep).items():
        lines.append([Span(cut(f"{variant}: {reason}"), "yellow")])
    return lines


def _cells(sweep: Sweep, figure: Figure, variant: str) -> list[str]:
    found, fit = sweep.of(figure, variant), sweep.growth(figure, variant)
    cells = [figure.text(found[at]) if at in found else UNKNOWN for at in sweep.lengths]
    if fit is None:
        return [variant, *cells, UNKNOWN, UNKNOWN, UNKNOWN]
    power, local = f"seq^{fit.exponent:.2f}", f"seq^{fit.local:.2f}"
    return [variant, *cells, power, f"{fit.residual:.0%}", local]


def _reasons(sweep: Sweep) -> dict[str, str]:
    """Why a variant has no figure, from the shortest length on which it has none."""
    reasons: dict[str, str] = {}
    for length, summary in zip(sweep.lengths, sweep.summaries, strict=True):
        for row in summary.rows:
            if row.error is not None:
                reasons.setdefault(row.variant, f"from seq {length} on: {row.error}")
    return reasons


def lengths_fit(lengths: Sequence[int]) -> None:
    """Raises CaseError for fewer than 3 lengths: no growth can be told from them."""
    if len(lengths) < 3:
        raise CaseError("seq", "at least 3 lengths", ", ".join(map(str, lengths)))
