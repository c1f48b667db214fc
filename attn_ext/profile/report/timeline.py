"""A step drawn along its time: the host's threads, the device's streams, and what started what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from attn_ext.profile.columns import mib, us
from attn_ext.profile.event import Event
from attn_ext.profile.report.classes import class_of
from attn_ext.profile.report.scale import ticks
from attn_ext.profile.report.svg import chart, label, percent, tag, title
from attn_ext.profile.trace import Region

#: Events drawn of a step; of a longer one, the longest events.
LIMIT = 1500
#: Levels of nesting drawn of a thread.
DEPTH = 10

_ROW, _GAP, _RULER, _HEAD, _MEMORY = 20, 2, 22, 22, 56


@dataclass
class Lane:
    """A thread or a stream: its events in rows, each row inside the one above it.

    The device's events have the colour of their work; without a device, the ops have it.
    """

    name: str
    rows: list[list[Event]]
    device: bool
    coloured: bool
    top: float = 0.0

    @property
    def height(self) -> float:
        return _HEAD + len(self.rows) * (_ROW + _GAP)

    def y(self, row: int) -> float:
        return self.top + _HEAD + row * (_ROW + _GAP)


@dataclass
class Timeline:
    """`picture` is the SVG, `names` the SVG of the lanes' names, which stays when it scrolls."""

    picture: Markup
    names: Markup
    start_us: float
    length_us: float
    shown: int
    total: int


def timeline(step: Region, limit: int = LIMIT) -> Timeline:
    """Draws the step from its first event to its last, its device events wherever they lie."""
    host, device = [*step.ops, *step.runtime], step.device_events
    total = len(host) + len(device)
    host, device = _longest(host, device, limit)
    events = [step.span, *host, *device]
    start = min(event.start_us for event in events)
    length = max(event.end_us for event in events) - start or 1.0
    lanes = _lanes(host, device, step.span)
    top = float(_RULER)
    for lane in lanes:
        lane.top = top
        top += lane.height
    memory = list(_memory(step, start, length, top))
    names = [label("6", lane.top + 15, lane.name, "lane") for lane in lanes]
    if memory:
        peak = f"memory of the host, peak {mib(step.peak_bytes)} MiB"
        names.append(label("6", top + 15, peak, "lane"))
        top += _HEAD + _MEMORY
    shown = sum(len(row) for lane in lanes for row in lane.rows)

    def x(moment: float) -> float:
        return (moment - start) / length

    drawn = [_box(event, x, lane, row) for lane, row, event in _places(lanes)]
    picture = chart(
        top + 4,
        f"Timeline of a step of {us(length)} us: {len(step.ops)} host events, "
        f"{len(step.device_events)} device events",
        *_ruler(length, top),
        *_arrows(lanes, x),
        *drawn,
        *memory,
        class_="timeline",
    )
    # An image of its own that does not scroll with the picture.
    fixed = chart(top + 4, "", *names, class_="names", aria_hidden="true")
    return Timeline(picture, fixed, start, length, shown, total)


def _longest(
    host: Sequence[Event], device: Sequence[Event], limit: int
) -> tuple[list[Event], list[Event]]:
    """At most `limit` events: the longest of the device, with their launches, then of the host."""
    if len(host) + len(device) <= limit:
        return list(host), list(device)

    def pick(events: Iterable[Event], count: int) -> list[Event]:
        return sorted(events, key=lambda event: -event.duration_us)[: max(0, count)]

    device = pick(device, limit // 3)
    started = {event.correlation for event in device} - {None}
    launches = [event for event in host if event.correlation in started]
    others = [event for event in host if event.correlation not in started]
    launches = pick(launches, limit // 3)
    return launches + pick(others, limit - len(device) - len(launches)), device


def _lanes(host: Iterable[Event], device: Iterable[Event], span: Event) -> list[Lane]:
    """The host's threads, that of the step first, then the busiest; then the device's streams."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    streams: dict[Any, list[Event]] = defaultdict(list)
    for event in host:
        threads[event.pid, event.tid].append(event)
    for event in device:
        where = (event.args.get("device", event.pid), event.args.get("stream", event.tid))
        streams[where].append(event)
    several = len({place for place, _ in streams}) > 1
    of_step = (span.pid, span.tid)
    ordered = sorted(threads.items(), key=lambda one: (one[0] != of_step, -len(one[1])))
    lanes = []
    for (_, thread), events in ordered:
        name = f"CPU thread {thread}" if len(ordered) > 1 else "CPU"
        lanes.append(Lane(name, _nested(events), device=False, coloured=not streams))
    for (place, stream), events in sorted(streams.items(), key=lambda one: str(one[0])):
        gpu = f"GPU {place}" if several else "GPU"
        name = f"{gpu} stream {stream}"
        lanes.append(Lane(name, _nested(events), device=True, coloured=True))
    return lanes


def _nested(events: list[Event]) -> list[list[Event]]:
    """Rows in which no two events overlap: what an event encloses is in the row below it."""
    rows: list[list[Event]] = []
    open_: list[Event] = []
    for event in sorted(events, key=lambda event: (event.start_us, -event.duration_us)):
        while open_ and open_[-1].end_us <= event.start_us:
            open_.pop()
        if len(open_) >= DEPTH:
            continue
        if len(open_) == len(rows):
            rows.append([])
        rows[len(open_)].append(event)
        open_.append(event)
    return rows


def _places(lanes: Iterable[Lane]) -> Iterator[tuple[Lane, int, Event]]:
    for lane in lanes:
        for row, events in enumerate(lane.rows):
            for event in events:
                yield lane, row, event


def _box(event: Event, x: Any, lane: Lane, row: int) -> Markup:
    """A box whose label is cut at its edge: a picture of its own inside the chart."""
    start = event.start_us
    lines = [event.name, f"{us(event.duration_us)} us"]
    if event.bytes is not None:
        lines.append(f"{event.bytes:,} bytes")
    kind = class_of(event).key if lane.coloured else _host_class(event)
    return tag(
        "svg",
        title("\n".join(lines)),
        tag("rect", width="100%", height="100%"),
        label("4", 14, event.name),
        x=percent(x(start)),
        y=lane.y(row),
        width=percent(x(event.end_us) - x(start)),
        height=_ROW,
        class_=f"box {kind}",
        data_c=event.correlation,
    )


def _host_class(event: Event) -> str:
    return "runtime" if event.category.startswith("cuda") else "host"


def _arrows(lanes: Sequence[Lane], x: Any) -> list[Markup]:
    """From a runtime call to each device event that it started."""
    calls = {
        event.correlation: (lane, row, event)
        for lane, row, event in _places(lanes)
        if not lane.device and event.correlation is not None
    }
    lines = []
    for lane, row, event in _places(lanes):
        if lane.device and event.correlation in calls:
            above, call_row, call = calls[event.correlation]
            lines.append(
                tag(
                    "line",
                    x1=percent(x(call.start_us)),
                    y1=above.y(call_row) + _ROW,
                    x2=percent(x(event.start_us)),
                    y2=lane.y(row),
                    class_="arrow",
                    data_c=event.correlation,
                )
            )
    return lines


def _memory(step: Region, start: float, length: float, top: float) -> Iterator[Markup]:
    """The bytes of host tensors that are alive, as stairs beyond those alive at the beginning."""
    if not step.peak_bytes:
        return
    moments, held = [(0.0, 0)], 0
    for event in step.allocations:
        held += event.bytes or 0
        moments.append(((event.start_us - start) / length, held))
    if len(moments) > LIMIT:
        # Of each stretch its highest moment: peaks stay.
        size = -(-len(moments) // LIMIT)
        moments = [max(moments[at : at + size], key=lambda one: one[1])
                   for at in range(0, len(moments), size)]  # fmt: skip
    low = min(0, *(held for _, held in moments))
    span = max(held for _, held in moments) - low

    def y(held: int) -> str:
        return f"{100 - 100 * (held - low) / span:.2f}"

    stairs = "".join(f"H{1000 * at:.2f}V{y(held)}" for at, held in moments)
    yield tag(
        "svg",
        title(f"host tensors, at most {mib(step.peak_bytes)} MiB"),
        tag("path", d=f"M0 {y(0)}{stairs}H1000V100H0Z", vector_effect="non-scaling-stroke"),
        y=top + _HEAD,
        width="100%",
        height=_MEMORY,
        viewBox="0 0 1000 100",
        preserveAspectRatio="none",
        class_="box memory",
    )


def _ruler(length: float, height: float) -> list[Markup]:
    """Times since the start of the step; the finer ones are for a chart that is zoomed in."""
    drawn = []
    coarse = ticks(length, 6)
    for number, moment in enumerate(ticks(length, 60)):
        if number == 0:
            continue
        fine = not any(abs(moment - one) < 1e-6 * length for one in coarse)
        at = percent(moment / length)
        drawn.append(
            tag(
                "g",
                tag("line", x1=at, y1=_RULER - 4, x2=at, y2=height, class_="grid"),
                label(at, 12, f"{moment:,.10g} us", anchor="middle"),
                class_="tick fine" if fine else "tick",
            )
        )
    return drawn
