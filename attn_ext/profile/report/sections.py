"""The charts of a group, each as a section of the page; one without data is left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

from attn_ext.profile.columns import mib, us
from attn_ext.profile.event import Event
from attn_ext.profile.report.bars import Bar, Part, bars
from attn_ext.profile.report.classes import CLASSES, Class, class_of
from attn_ext.profile.report.model import Group
from attn_ext.profile.report.steps import self_times
from attn_ext.profile.trace import Region


class Key(NamedTuple):
    """An entry of a legend: `kind` is its class in the style sheet."""

    kind: str
    label: str


@dataclass
class Section:
    """A heading, a sentence on what is seen, and a chart."""

    title: str
    text: str
    chart: Markup
    legend: Sequence[Key] = ()


def sections(group: Group) -> list[Section]:
    return [*_by_class(group), *_memory(group)]


def _by_class(group: Group) -> Iterator[Section]:
    """Device time; where nothing ran on a device, the ops' own."""
    on_device = any(source.step.device_events for source in group.sources)
    rows, seen = [], set()
    for source in group.sources:
        times: dict[Class, float] = defaultdict(float)
        for event, time in _times(source.step, on_device):
            times[class_of(event)] += time
        seen |= set(times)
        if times:
            parts = [Part(one.key, one.label, times[one]) for one in CLASSES if one in times]
            rows.append(Bar(source.row.variant, f"{us(sum(times.values()))} us", parts))
    if not rows:
        return
    what = "Device" if on_device else "Host"
    spoken = "; ".join(f"{row.name} {row.text}" for row in rows)
    yield Section(
        f"{what} time by kind of work",
        "Durations of the device events of one step, added up by what they do."
        if on_device
        else "Times of the ops of one step, without the ops that they call, by what they do.",
        bars(rows, f"{what} time of a step by kind of work: {spoken}", "us"),
        [Key(one.key, one.label) for one in CLASSES if one in seen],
    )


def _times(step: Region, on_device: bool) -> list[tuple[Event, float]]:
    if on_device:
        return [(event, event.duration_us) for event in step.device_events]
    return self_times(step.ops)


def _memory(group: Group) -> Iterator[Section]:
    rows = [
        Bar(row.variant, f"{mib(row.peak_bytes)} MiB", [
            Part("peak", "", row.peak_bytes / 2**20)
        ])
        for row in group.summary.rows if row.peak_bytes is not None
    ]  # fmt: skip
    if len(rows) > 1:
        yield Section(
            "Peak memory",
            "Most bytes allocated at once in a call, on top of its inputs.",
            bars(rows, "Peak memory: " + "; ".join(f"{r.name} {r.text}" for r in rows), "MiB"),
        )
