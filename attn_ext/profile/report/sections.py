"""The charts of a group, each as a section of the page; one without data is left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from attn_ext.profile.report.bars import Bar, Part, bars
from attn_ext.profile.report.classes import CLASSES, Class, class_of
from attn_ext.profile.report.model import Group, Source
from attn_ext.profile.report.timeline import LIMIT, Timeline, timeline
from attn_ext.profile.table import mib, us
from attn_ext.profile.trace import Event, Region

#: Events drawn in all timelines of a page.
_PAGE_LIMIT = 6000


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


@dataclass
class Step:
    """A source's timeline and its kernels (its ops, where there is no device)."""

    name: str
    about: str
    timeline: Timeline
    head: list[tuple[str, str]]
    rows: list[list[str]]
    left_out: int


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


def steps(group: Group, sources_in_all: int) -> list[Step]:
    limit = min(LIMIT, _PAGE_LIMIT // max(1, sources_in_all))
    return [_step(source, limit) for source in group.sources]


def _step(source: Source, limit: int) -> Step:
    step = source.step
    drawn = timeline(step, limit)
    if step.device_events:
        busy = busy_us(step.device_events)
        about = (
            f"{us(drawn.length_us)} us, the device busy for {us(busy)} us of them "
            f"({busy / drawn.length_us:.0%})"
        )
        head, rows = _kernels(step)
    else:
        count = len(step.operators)
        about = f"{us(drawn.length_us)} us, {count} op{'s' * (count != 1)}"
        head, rows = _ops(step)
    return Step(source.row.variant, about, drawn, head, rows[:_TABLE], max(0, len(rows) - _TABLE))


#: Rows of a table of kernels or ops.
_TABLE = 40


def busy_us(events: list[Event]) -> float:
    """Time in which at least one of the events runs."""
    busy, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start_us):
        busy += max(0.0, event.end_us - max(event.start_us, until))
        until = max(until, event.end_us)
    return busy


def _kernels(step: Region) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """The device events by name and launch, in order of their first start."""
    found: dict[Any, list[Event]] = {}
    for event in sorted(step.device_events, key=lambda event: event.start_us):
        key = (event.name, *(str(event.args.get(name)) for name in ("grid", "block")))
        found.setdefault(key, []).append(event)
    total = step.gpu_us or 1.0
    head = [
        ("device event", "a kernel, a copy or a fill"),
        ("kind", "what it does, by its name"),
        ("times", "how often a step runs it"),
        ("us", "sum of its durations"),
        ("share", "of the step's device time"),
        ("grid", "blocks launched, x y z"),
        ("block", "threads of a block, x y z"),
        ("registers", "of a thread"),
        ("shared KiB", "shared memory of a block"),
    ]
    rows = []
    for events in found.values():
        first, time = events[0], sum(event.duration_us for event in events)
        shared = first.args.get("shared memory")
        rows.append(
            [
                first.name,
                class_of(first).label,
                str(len(events)),
                us(time) or "",
                f"{time / total:.1%}",
                _dims(first.args.get("grid")),
                _dims(first.args.get("block")),
                str(first.args.get("registers per thread", "")),
                f"{shared / 1024:.1f}" if isinstance(shared, (int, float)) else "",
            ]
        )
    return head, rows


def _dims(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else ""


def _ops(step: Region) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """The ops by name, those that take the longest themselves first."""
    own: dict[str, float] = defaultdict(float)
    whole: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for op, self_us in self_times(step.ops):
        own[op.name] += self_us
        whole[op.name] += op.duration_us
        counts[op.name] += 1
    total = sum(own.values()) or 1.0
    head = [
        ("op", "what the dispatcher called"),
        ("times", "how often a step calls it"),
        ("self us", "without the ops that it calls"),
        ("share", "of the self times of all ops"),
        ("us", "with the ops that it calls"),
    ]
    names = sorted(own, key=lambda name: -own[name])
    return head, [
        [name, str(counts[name]), us(own[name]) or "", f"{own[name] / total:.1%}",
         us(whole[name]) or ""]
        for name in names
    ]  # fmt: skip


def self_times(ops: list[Event]) -> list[tuple[Event, float]]:
    """Each op with its duration minus that of the ops directly inside it."""
    inner: dict[int, float] = defaultdict(float)
    open_: dict[Any, list[Event]] = defaultdict(list)
    for op in sorted(ops, key=lambda op: (op.start_us, -op.duration_us)):
        stack = open_[op.pid, op.tid]
        while stack and stack[-1].end_us <= op.start_us:
            stack.pop()
        if stack:
            inner[id(stack[-1])] += op.duration_us
        stack.append(op)
    return [(op, max(0.0, op.duration_us - inner[id(op)])) for op in ops]
