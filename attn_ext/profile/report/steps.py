"""A step of each trace: its timeline, and a table of its kernels (its ops, without a device)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from attn_ext.profile.columns import us
from attn_ext.profile.event import Event
from attn_ext.profile.kernel_name import decode
from attn_ext.profile.occupancy import Device, occupancy_of
from attn_ext.profile.report.classes import class_of
from attn_ext.profile.report.model import Group, Source
from attn_ext.profile.report.timeline import LIMIT, Timeline, timeline
from attn_ext.profile.table import UNKNOWN
from attn_ext.profile.trace import Region

#: Events drawn in all timelines of a page, and rows of a table.
_PAGE, _TABLE = 6000, 40


class Cell(NamedTuple):
    """`tip` says more than the heading does."""

    text: str
    tip: str = ""


@dataclass
class Step:
    name: str
    about: str
    timeline: Timeline
    head: list[tuple[str, str]]
    rows: list[list[Cell]]
    left_out: int


def steps(group: Group, sources_in_all: int) -> list[Step]:
    limit = min(LIMIT, _PAGE // max(1, sources_in_all))
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
        head, rows = _KERNELS, _kernels(step, source.devices)
    else:
        count = len(step.operators)
        about = f"{us(drawn.length_us)} us, {count} op{'s' * (count != 1)}"
        head, rows = _OPS, _ops(step)
    return Step(source.row.variant, about, drawn, head, rows[:_TABLE], max(0, len(rows) - _TABLE))


def busy_us(events: Sequence[Event]) -> float:
    """Time in which at least one of the events runs."""
    busy, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start_us):
        busy += max(0.0, event.end_us - max(event.start_us, until))
        until = max(until, event.end_us)
    return busy


_KERNELS = [
    ("device event", "a kernel, a copy or a fill"),
    ("kind", "what it does, by its name"),
    ("times", "how often a step runs it"),
    ("us", "sum of its durations"),
    ("share", "of the step's device time"),
    ("tensor cores", "whether it multiplies on them, as far as its name tells"),
    ("occupancy", "warps that it keeps on the device, of those that fit"),
    ("grid", "blocks launched, x y z"),
    ("block", "threads of a block, x y z"),
    ("registers", "of a thread"),
    ("shared KiB", "shared memory of a block"),
]


def _kernels(step: Region, devices: Mapping[int, Device]) -> list[list[Cell]]:
    """The device events by name and launch, in order of their first start."""
    found: dict[Any, list[Event]] = {}
    for event in sorted(step.device_events, key=lambda event: event.start_us):
        key = (event.name, *(str(event.args.get(name)) for name in ("grid", "block")))
        found.setdefault(key, []).append(event)
    total = step.gpu_us or 1.0
    return [_kernel(events, total, devices) for events in found.values()]


def _kernel(events: list[Event], total: float, devices: Mapping[int, Device]) -> list[Cell]:
    first, time = events[0], sum(event.duration_us for event in events)
    read = decode(first.name)
    occupancy = occupancy_of(first, devices)
    shared = first.args.get("shared memory")
    if first.category != "kernel":
        cores = Cell("")
    else:
        cores = Cell({True: "yes", False: "no", None: UNKNOWN}[read.tensor_cores], read.reading)
    return [
        Cell(first.name, f"{first.name}\n{read.reading}"),
        Cell(class_of(first).label, read.reading),
        Cell(str(len(events))),
        Cell(us(time) or ""),
        Cell(f"{time / total:.1%}"),
        cores,
        Cell(f"{occupancy.achieved_percent:.1f}%", str(occupancy)) if occupancy else Cell(""),
        Cell(_dims(first.args.get("grid"))),
        Cell(_dims(first.args.get("block"))),
        Cell(str(first.args.get("registers per thread", ""))),
        Cell(f"{shared / 1024:.1f}" if isinstance(shared, (int, float)) else ""),
    ]


def _dims(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else ""


_OPS = [
    ("op", "what the dispatcher called"),
    ("times", "how often a step calls it"),
    ("self us", "without the ops that it calls"),
    ("share", "of the self times of all ops"),
    ("us", "with the ops that it calls"),
]


def _ops(step: Region) -> list[list[Cell]]:
    """The ops by name, those that take the longest themselves first."""
    own: dict[str, float] = defaultdict(float)
    whole: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for op, self_us in self_times(step.ops):
        own[op.name] += self_us
        whole[op.name] += op.duration_us
        counts[op.name] += 1
    total = sum(own.values()) or 1.0
    names = sorted(own, key=lambda name: -own[name])
    return [
        [
            Cell(name, name),
            Cell(str(counts[name])),
            Cell(us(own[name]) or ""),
            Cell(f"{own[name] / total:.1%}"),
            Cell(us(whole[name]) or ""),
        ]
        for name in names
    ]


def self_times(ops: Sequence[Event]) -> list[tuple[Event, float]]:
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
