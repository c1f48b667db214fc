"""Reads a torch.profiler trace (Chrome JSON, plain or gzip) with the standard library alone.

The model: a trace holds *events*; a *region* is one occurrence of a record_function range and owns
what happened in it. Host events (ops, runtime calls, allocations) belong to a region by time and
thread; device events (kernels, copies, fills) belong to it because a runtime call of the region
started them: both carry the same correlation id, whenever the device got to the work.
"""

from __future__ import annotations

import gc
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cached_property
from os import PathLike
from typing import Any

from attn_ext.profile import stream
from attn_ext.profile.attention import Call, find
from attn_ext.profile.event import Copy, Event, is_launch
from attn_ext.profile.kernel_name import decode
from attn_ext.profile.occupancy import Device, devices
from attn_ext.profile.region import GRAPH, Region
from attn_ext.profile.stream import TraceError

__all__ = ["STEP", "Copy", "Event", "Region", "Trace", "TraceError", "is_launch"]

#: The range that `attn-ext run` puts round each step.
STEP = "attn_ext.step"


class Trace:
    """A trace in memory. `Trace.load(path)` reads one; no GPU and no torch are needed."""

    def __init__(self, document: Mapping[str, Any], name: str = "trace") -> None:
        """`document` is the parsed JSON object; its "traceEvents" may come one by one.

        Raises:
            TraceError: of several processes, whose launches cannot be told apart; starts with
                `name`.
        """
        #: All that stands beside the events: schemaVersion, deviceProperties, ...
        self.metadata = {key: value for key, value in document.items() if key != "traceEvents"}
        self.ops: list[Event] = []
        #: record_function ranges, the profiler's own steps among them.
        self.ranges: list[Event] = []
        self.runtime: list[Event] = []
        self.kernels: list[Event] = []
        self.memcpy: list[Event] = []
        self.memset: list[Event] = []
        self.allocations: list[Event] = []
        lists = {
            "cpu_op": self.ops,
            "user_annotation": self.ranges,
            "cuda_runtime": self.runtime,
            "cuda_driver": self.runtime,
            "kernel": self.kernels,
            "gpu_memcpy": self.memcpy,
            "gpu_memset": self.memset,
            "cpu_instant_event": self.allocations,
        }
        with _without_collector():
            for event in _events(document.get("traceEvents", ()), lists):
                if event.category != "cpu_instant_event" or _is_host_allocation(event):
                    lists[event.category].append(event)
        for events in lists.values():
            events.sort(key=lambda event: event.start_us)
        self._refuse_mixed(name)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Trace:
        """Reads a Chrome trace, gzip or not.

        Raises:
            TraceError: not a file that can be read, damaged, or not a trace.
        """
        metadata: dict[str, Any] = {}

        def events() -> Iterator[Any]:
            for key, value in stream.read(path):
                if key is None:
                    yield value
                else:
                    metadata[key] = value

        trace = cls({"traceEvents": events()}, str(path))
        trace.metadata = metadata
        return trace

    @property
    def saw_device(self) -> bool:
        """Whether CUDA was recorded at all. Where not, a count of no kernels means unknown."""
        return bool(self.runtime or self.kernels or self.memcpy or self.memset)

    @cached_property
    def steps(self) -> list[Region]:
        """The steps of `attn-ext run`, or those that torch's profiler marked, in order of time."""
        return self.regions(STEP) or self.regions("ProfilerStep#*")

    @cached_property
    def device_by_correlation(self) -> dict[int, list[Event]]:
        started = defaultdict(list)
        for event in (*self.kernels, *self.memcpy, *self.memset):
            if event.correlation is not None:
                started[event.correlation].append(event)
        return dict(started)

    @cached_property
    def devices(self) -> dict[int, Device]:
        """The GPUs that the trace describes, by index."""
        return devices(self.metadata)

    @cached_property
    def calls(self) -> list[Call]:
        """All attention calls of ops, in order of time."""
        with _without_collector():
            return find(self.ops)

    def regions(self, pattern: str) -> list[Region]:
        """The ranges whose name matches a shell-style pattern, in order of time.

        Where ranges that match lie inside each other, the inner one owns what happens in it.
        """
        found = [Region(span) for span in self.ranges if fnmatchcase(span.name, pattern)]
        owner = _Owner([(region.span, region) for region in found])
        self._fill(found, owner)
        for call in self.calls:
            if region := owner.of(call.parts[0]):
                region.calls.append(call)
        return found

    def attention(self, backward: bool | None = None) -> list[Region]:
        """A region for each attention call, in order of time: its kernels, copies and work.

        `backward` keeps the gradients alone, or leaves them out; None is both.
        """
        found = []
        for call in self.calls:
            if backward in (None, call.backward):
                first, last = call.parts[0], call.parts[-1]
                name = f"{call.name} backward" if call.backward else call.name
                span = first._replace(name=name, duration_us=last.end_us - first.start_us)
                found.append(Region(span, calls=[call], parts=call.parts))
        pieces = [(part, region) for region in found for part in region.parts]
        pieces.sort(key=lambda piece: piece[0].start_us)
        self._fill(found, _Owner(pieces, threads_help=False))
        graphs = [region for region in self._replayed() if backward in
                  (None, region.calls[0].backward)]  # fmt: skip
        return sorted([*found, *graphs], key=lambda region: region.span.start_us)

    def _replayed(self) -> Iterator[Region]:
        """Attention in replayed CUDA graphs, which have no ops: by the names of kernels. A kernel
        and those that prepare and finish its work, one after the other, are a call."""
        for launch in self.runtime:
            if "GraphLaunch" not in launch.name:
                continue
            region: Region | None = None
            for event in sorted(self.device_by_correlation.get(launch.correlation or -1, ()),
                                key=lambda event: event.start_us):  # fmt: skip
                kernel = decode(event.name)
                if event.category != "kernel" or not kernel.attention:
                    region = None
                    continue
                backward = kernel.direction == "backward"
                if region is None or region.calls[0].backward != backward or any(
                    event.name == other.name for other in region.kernels
                ):  # fmt: skip
                    call = Call(kernel.title, kernel.family, backward, [])
                    span = launch._replace(name=call.name, category=GRAPH, duration_us=0.0)
                    region = Region(span, calls=[call], devices=self.devices)
                    yield region
                region.kernels.append(event)

    def _fill(self, regions: list[Region], owner: _Owner) -> None:
        lists: list[tuple[list[Event], Callable[[Region], list[Event]]]] = [
            (self.ops, lambda region: region.ops),
            (self.allocations, lambda region: region.allocations),
            (self.runtime, lambda region: region.runtime),
        ]
        for events, of in lists:
            for event in events:
                if region := owner.of(event):
                    of(region).append(event)
        for region in regions:
            region.devices = self.devices
            self._add_device_events(region)

    def _refuse_mixed(self, name: str) -> None:
        process: dict[int, int | str] = {}
        for call in self.runtime:
            number = call.correlation
            if number is not None and process.setdefault(number, call.pid) != call.pid:
                raise TraceError(
                    f"{name}: expected the trace of one process, got several (such as "
                    f"{process[number]} and {call.pid}) whose launches have the same numbers; read "
                    "the file of each process"
                )

    def outside(self, regions: Iterable[Region]) -> list[Event]:
        """The device events that no call of these regions started."""
        owned = {id(event) for region in regions for event in region.device_events}
        events = (*self.kernels, *self.memcpy, *self.memset)
        return [event for event in events if id(event) not in owned]

    def _add_device_events(self, region: Region) -> None:
        kinds = {
            "kernel": region.kernels, "gpu_memcpy": region.memcpy, "gpu_memset": region.memset,
        }  # fmt: skip
        correlations = {call.correlation for call in region.runtime}
        for correlation in correlations - {None}:
            for event in self.device_by_correlation.get(correlation or 0, ()):
                kinds[event.category].append(event)
        for events in kinds.values():
            events.sort(key=lambda event: event.start_us)
        region.find_lost(self.device_by_correlation)


class _Owner:
    """Finds the region of a host event among spans that may overlap on different threads."""

    def __init__(self, pieces: list[tuple[Event, Region]], threads_help: bool = True) -> None:
        """`pieces` in order of time; a region may have several. `threads_help`: threads without a
        span of their own work for the others (autograd's, for the step that waits for them)."""
        self._pieces = pieces
        self._starts = [span.start_us for span, _ in pieces]
        self._longest = max((span.duration_us for span, _ in pieces), default=0.0)
        self._threads_help = threads_help

    def of(self, event: Event) -> Region | None:
        """The last span to begin round the event's start: on its thread, else on another one of its
        process."""
        elsewhere = None
        at = bisect_right(self._starts, event.start_us)
        while at > 0 and self._starts[at - 1] >= event.start_us - self._longest:
            at -= 1
            span, region = self._pieces[at]
            if event.start_us <= span.end_us and event.pid == span.pid:
                if event.tid == span.tid:
                    return region
                elsewhere = elsewhere or region
        return elsewhere if self._threads_help else None


@contextmanager
def _without_collector() -> Iterator[None]:
    """Events have no cycles, and a collector that walks millions of them again and again takes
    longer than reading them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _events(raw: Iterable[Any], categories: Container[str]) -> Iterator[Event]:
    """The complete and instant events of some categories, those without a time left out. Equal
    texts are one object: a big trace holds the same names many times."""
    for entry in raw:
        if not isinstance(entry, dict) or entry.get("ph") not in ("X", "i"):
            continue
        category = str(entry.get("cat", "")).lower()
        if category not in categories:
            continue
        start, duration = entry.get("ts"), entry.get("dur", 0.0)
        if not isinstance(start, (int, float)) or not isinstance(duration, (int, float)):
            continue
        args = entry.get("args")
        yield Event(
            name=sys.intern(str(entry.get("name", ""))),
            category=sys.intern(category),
            start_us=float(start),
            duration_us=float(duration),
            pid=entry.get("pid", 0),
            tid=entry.get("tid", 0),
            args={sys.intern(key): value for key, value in args.items()}
            if isinstance(args, dict)
            else {},
        )


def _is_host_allocation(event: Event) -> bool:
    # Device Type is c10::DeviceType: 0 is the CPU.
    return event.name == "[memory]" and event.args.get("Device Type") == 0
