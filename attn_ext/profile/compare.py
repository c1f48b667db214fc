"""What changed between two traces, region by region: kernels gone, added, slower or faster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any, NamedTuple

from attn_ext.profile.event import Event
from attn_ext.profile.fields import FIELDS, Field
from attn_ext.profile.figures import Row
from attn_ext.profile.kernel_name import decode
from attn_ext.profile.region import Region
from attn_ext.profile.trace import Trace

#: A kernel took another time where it differs by this share and by this many us: below is noise.
_SHARE, _LEAST_US = 0.05, 1.0
_STEP = "step"


@dataclass(frozen=True)
class Work:
    """Device events of one name in a region."""

    count: int
    us: float


@dataclass(frozen=True)
class Change:
    """`before` or `after` is None where there are no such events."""

    name: str
    before: Work | None
    after: Work | None

    @property
    def kind(self) -> str:
        """gone, added, count, slower, faster or same."""
        if self.before is None or self.after is None:
            return "added" if self.before is None else "gone"
        if self.before.count != self.after.count:
            return "count"
        more = self.after.us - self.before.us
        if abs(more) < max(_LEAST_US, _SHARE * self.before.us):
            return "same"
        return "slower" if more > 0 else "faster"


class Figure(NamedTuple):
    """A figure of a region on both sides; None is unknown, or no such region."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Difference:
    """A region on both sides. Of several of a name (steps, layers), the one whose device time is in
    the middle stands for all."""

    name: str
    before: Region | None
    after: Region | None
    figures: list[Figure]
    changes: list[Change]

    def to_dict(self) -> dict[str, Any]:
        figures = {f.name: {"before": f.before, "after": f.after} for f in self.figures}
        changes = [
            {"name": change.name, "kind": change.kind, **asdict(change)} for change in self.changes
        ]
        there = {"before": self.before is not None, "after": self.after is not None}
        return {"region": self.name, "there": there, "figures": figures, "changes": changes}


#: The figures that are compared, fields of a guess.
_FIGURES = ("kernels", "memcpy", "memset", "memcpy_bytes", "gpu_us", "cpu_us", "bound", "copies",
            "peak_bytes")  # fmt: skip


def diff(
    before: Trace,
    after: Trace,
    pattern: str | None = None,
    by: str = "name",
    rows: tuple[Row | None, Row | None] = (None, None),
) -> list[Difference]:
    """Compares two traces.

    Args:
        before, after: the traces.
        pattern: the ranges to compare, by a shell-style pattern of their name. None compares the
            steps where both traces have some, else the attention calls by op and shape.
        by: "name" tells kernels apart by their names, "class" by what decode makes of them, which
            also compares kernels of different makers.
        rows: what runs measured beside the traces, of their steps.

    Returns:
        A Difference for each region name, those of `before` first.
    """
    sides = [
        _groups(trace, pattern, bool(before.steps and after.steps)) for trace in (before, after)
    ]
    names = dict.fromkeys(name for side in sides for name in side)
    found = []
    for name in names:
        one, other = (_middle(side.get(name, [])) for side in sides)
        measured = rows if name == _STEP and pattern is None else (None, None)
        figures = [
            Figure(
                what,
                _figure(FIELDS[what], one, before, measured[0]),
                _figure(FIELDS[what], other, after, measured[1]),
            )
            for what in _FIGURES
        ]
        known = [f for f in figures if (f.before, f.after) != (None, None)]
        found.append(Difference(name, one, other, known, _changes(one, other, by)))
    return found


def _figure(field: Field, region: Region | None, trace: Trace, row: Row | None) -> Any:
    """None where it is not known: nothing recorded of the device, or a part of it lost."""
    if field.of_row and row and (measured := field.of_row(row)) is not None:
        return measured
    if region is None or field.of_step is None:
        return None
    if field.device and (not trace.saw_device or region.lost):
        return None
    return field.of_step(region)


def _groups(trace: Trace, pattern: str | None, steps: bool) -> dict[str, list[Region]]:
    groups: dict[str, list[Region]] = defaultdict(list)
    if pattern is not None:
        for region in trace.regions(pattern):
            groups[region.name].append(region)
    elif steps:
        groups[_STEP] = trace.steps
    else:
        for region in trace.attention():
            shape = region.calls[0].shape
            groups[f"{region.name} ({shape})" if shape else region.name].append(region)
    return groups


def _middle(regions: list[Region]) -> Region | None:
    whole = [region for region in regions if not region.lost] or regions
    if not whole:
        return None
    middle = median_low(region.gpu_us for region in whole)
    return next(region for region in whole if region.gpu_us == middle)


def _changes(before: Region | None, after: Region | None, by: str) -> list[Change]:
    """In the order of the names on the device, those that are gone among the others."""
    sides = [_work(region.device_events if region else (), by) for region in (before, after)]
    names = dict.fromkeys(name for side in sides for name in side)
    return [Change(name, sides[0].get(name), sides[1].get(name)) for name in names]


def _work(events: Iterable[Event], by: str) -> dict[str, Work]:
    work: dict[str, Work] = {}
    for event in sorted(events, key=lambda event: event.start_us):
        name = event.name if by == "name" else decode(event.name).family
        so_far = work.get(name, Work(0, 0.0))
        work[name] = Work(so_far.count + 1, so_far.us + event.duration_us)
    return work
