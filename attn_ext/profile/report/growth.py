"""How time and memory grow with the length: runs that differ in nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from attn_ext.profile.columns import mib, us
from attn_ext.profile.figures import Row
from attn_ext.profile.growth import growth as power_law
from attn_ext.profile.report.model import Group
from attn_ext.profile.report.plot import Axis, Line, Point, plot
from attn_ext.profile.report.scale import decades
from attn_ext.profile.report.sections import Key, Section

_Family = dict[int, Group]


def growth(groups: Sequence[Group]) -> Iterator[Section]:
    """A chart of time and one of memory for each shape that was run at several lengths."""
    for family in _families(groups):
        on_gpu = next(iter(family.values())).summary.on_gpu
        clock = "device time of a call" if on_gpu else "time of a call"
        yield from _section(
            family, f"Growth of time{_of(family, groups)}", clock, "us",
            (lambda row: row.gpu_us) if on_gpu else (lambda row: row.call_us),
            lambda value: f"{us(value)} us",
        )  # fmt: skip
        yield from _section(
            family, f"Growth of memory{_of(family, groups)}",
            "most memory allocated at once in a call, on top of its inputs", "MiB",
            lambda row: row.peak_bytes / 2**20 if row.peak_bytes else None,
            lambda value: f"{mib(round(value * 2**20))} MiB",
        )  # fmt: skip


def _families(groups: Sequence[Group]) -> list[_Family]:
    """Groups by length, where only the length differs. A length that is there twice: the last."""
    families: dict[object, _Family] = defaultdict(dict)
    for group in groups:
        if group.case:
            alike = (replace(group.case, seq=1), group.summary.facts.get("device"))
            families[alike][group.case.seq] = group
    return [dict(sorted(family.items())) for family in families.values() if len(family) > 1]


def _of(family: _Family, groups: Sequence[Group]) -> str:
    """What the family is of, where there are others."""
    if len(_families(groups)) == 1:
        return ""
    case = next(iter(family.values())).case
    return f": {case}".replace(f"seq {case.seq}, ", "") if case else ""


def _section(
    family: _Family,
    title: str,
    what: str,
    unit: str,
    figure: Callable[[Row], float | None],
    say: Callable[[float], str],
) -> Iterator[Section]:
    values: dict[str, dict[int, float]] = defaultdict(dict)
    for seq, group in family.items():
        for row in group.summary.rows:
            value = figure(row)
            if value:
                values[row.variant][seq] = value
    values = {variant: found for variant, found in values.items() if len(found) > 1}
    if not values:
        return
    kinds = {variant: f"s{number % 9}" for number, variant in enumerate(values)}
    lines = [
        Line(variant, kinds[variant], [
            Point(float(seq), value, f"{variant}, length {seq:,}: {say(value)}")
            for seq, value in found.items()
        ])
        for variant, found in values.items()
    ]  # fmt: skip
    ends = decades(
        min(min(found.values()) for found in values.values()),
        max(max(found.values()) for found in values.values()),
    )
    lengths = list(family)
    powers = {variant: _named(variant, found) for variant, found in values.items()}
    yield Section(
        title,
        f"The {what}. Both axes are logarithmic: a straight line is a power of the length n, and "
        "the legend has the one that fits best. Work that is done for every pair of positions "
        "grows as n^2.",
        plot(
            Axis("length", lengths[0], lengths[-1], [(float(n), f"{n:,}") for n in lengths]),
            Axis(f"{what.split(',')[0]}, {unit}", ends[0], ends[-1], [
                (end, f"{end:,.10g}") for end in ends
            ]),
            lines,
            f"{title}: " + "; ".join(powers.values()),
        ),
        [Key(kinds[variant], powers[variant]) for variant in values],
    )  # fmt: skip


def _named(variant: str, found: dict[int, float]) -> str:
    """The variant with the power that fits, where there are lengths enough to tell."""
    fit = power_law(found)
    return variant if fit is None else f"{variant} ~ n^{fit.exponent:.2f}"
