"""Reads a torch.profiler trace (Chrome JSON, plain or gzip) with the standard library alone.

The model: a trace holds *events*; a *region* is one occurrence of a record_function range and owns
what happened in it. Host events (ops, runtime calls, allocations) belong to a region by time and
thread; device events (kernels, copies, fills) belong to it because a runtime call of the region
started them: both carry the same correlation id, whenever the device got to the work.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from attn_ext.profile.errors import InputError
from attn_ext.profile.event import Copy, Event, copy_of, is_launch

__all__ = ["STEP", "Copy", "Event", "Region", "Trace", "TraceError", "is_launch"]

#: The range that `attn-ext run` puts round each step.
STEP = "attn_ext.step"

# aten::mul, not "autograd::engine::evaluate_function: MulBackward0" or "Torch-Compiled Region".
_OPERATOR = re.compile(r"\w+::\w+(\.\w+)?")


class TraceError(InputError):
    """A file that is not a trace, or only a part of one. The text names the file and the reason."""


@dataclass
class Region:
    """One occurrence of a range, and what happened in it."""

    span: Event
    #: What the host recorded, nested ones too: operators, autograd's nodes, compiled regions.
    ops: list[Event] = field(default_factory=list)
    #: All calls of the CUDA runtime and driver.
    runtime: list[Event] = field(default_factory=list)
    kernels: list[Event] = field(default_factory=list)
    memcpy: list[Event] = field(default_factory=list)
    memset: list[Event] = field(default_factory=list)
    #: Launches whose kernel the trace does not have: the counts above are then too low.
    lost: list[Event] = field(default_factory=list)
    allocations: list[Event] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def launches(self) -> list[Event]:
        return [call for call in self.runtime if is_launch(call)]

    @property
    def device_events(self) -> list[Event]:
        return [*self.kernels, *self.memcpy, *self.memset]

    @property
    def gpu_us(self) -> float:
        """Sum of the durations of the device events, in us."""
        return sum(event.duration_us for event in self.device_events)

    @property
    def operators(self) -> list[Event]:
        """The ops that the dispatcher called, without autograd's and the compiler's own marks."""
        return [op for op in self.ops if _OPERATOR.fullmatch(op.name)]

    @property
    def copies(self) -> list[Copy]:
        """The tensor copies that ops made (clone and contiguous end here). Copies of a single
        number, such as a Python scalar that takes a tensor's dtype, are left out."""
        return [copy for op in self.ops if (copy := copy_of(op)) is not None]

    @property
    def peak_bytes(self) -> int | None:
        """Most bytes of host tensors alive at once, beyond those alive when the region began.

        None where the trace has no allocations (a profiler without profile_memory).
        """
        held, peak = 0, None
        for event in self.allocations:
            held += event.bytes or 0
            peak = max(peak or 0, held)
        return peak


class Trace:
    """A trace in memory. `Trace.load(path)` reads one; no GPU and no torch are needed."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """`document` is the parsed JSON object, with its "traceEvents"."""
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
        for event in _events(document["traceEvents"]):
            if event.category != "cpu_instant_event" or _is_host_allocation(event):
                lists.get(event.category, []).append(event)
        for events in lists.values():
            events.sort(key=lambda event: event.start_us)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Trace:
        """Reads a Chrome trace, gzip or not.

        Raises:
            TraceError: not a file that can be read, damaged, or not a trace.
        """
        try:
            raw = Path(path).read_bytes()
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror}") from error
        try:
            text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"{path}: damaged or truncated gzip: {error}") from error
        if not text.strip():
            raise TraceError(f"{path}: expected a Chrome trace, got an empty file")
        try:
            # Op names may hold control characters and bytes that are not UTF-8.
            document = json.loads(text.decode(errors="replace"), strict=False)
        except ValueError as error:
            raise TraceError(f"{path}: damaged or truncated JSON: {error}") from error
        if isinstance(document, list):  # the format allows the bare array of events
            document = {"traceEvents": document}
        if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
            raise TraceError(f"{path}: expected a Chrome trace, got JSON without traceEvents")
        return cls(document)

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

    def regions(self, pattern: str) -> list[Region]:
        """The ranges whose name matches a shell-style pattern, in order of time.

        Where ranges that match lie inside each other, the inner one owns what happens in it.
        """
        regions = [Region(span) for span in self.ranges if fnmatchcase(span.name, pattern)]
        owner = _Owner(regions)
        for op in self.ops:
            if region := owner.of(op):
                region.ops.append(op)
        for event in self.allocations:
            if region := owner.of(event):
                region.allocations.append(event)
        for call in self.runtime:
            if region := owner.of(call):
                region.runtime.append(call)
        for region in regions:
            self._add_device_events(region)
        return regions

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
        launches = region.launches
        for call in launches:
            # A runtime launch may show the driver's launch inside it: that one has the kernel.
            if call.correlation not in self.device_by_correlation and not any(
                _encloses(call, inner) for inner in launches
            ):
                region.lost.append(call)


class _Owner:
    """Finds the region of a host event among regions that may overlap on different threads."""

    def __init__(self, regions: list[Region]) -> None:
        self._regions = regions
        self._starts = [region.span.start_us for region in regions]
        self._longest = max((region.span.duration_us for region in regions), default=0.0)

    def of(self, event: Event) -> Region | None:
        """The last region to begin round the event's start: on its thread, else on another one
        of its process (autograd's threads work for the step that waits for them)."""
        elsewhere = None
        at = bisect_right(self._starts, event.start_us)
        while at > 0 and self._starts[at - 1] >= event.start_us - self._longest:
            at -= 1
            span = self._regions[at].span
            if event.start_us <= span.end_us and event.pid == span.pid:
                if event.tid == span.tid:
                    return self._regions[at]
                elsewhere = elsewhere or self._regions[at]
        return elsewhere


def _encloses(outer: Event, inner: Event) -> bool:
    return (
        outer is not inner
        and outer.tid == inner.tid
        and outer.start_us <= inner.start_us
        and inner.end_us <= outer.end_us
    )


def _events(raw: list[Any]) -> Iterator[Event]:
    """The complete and instant events of a category, those without a time left out."""
    for entry in raw:
        if not isinstance(entry, dict) or entry.get("ph") not in ("X", "i"):
            continue
        start, duration = entry.get("ts"), entry.get("dur", 0.0)
        if not isinstance(start, (int, float)) or not isinstance(duration, (int, float)):
            continue
        args = entry.get("args")
        yield Event(
            name=str(entry.get("name", "")),
            category=str(entry.get("cat", "")).lower(),
            start_us=float(start),
            duration_us=float(duration),
            pid=entry.get("pid", 0),
            tid=entry.get("tid", 0),
            args=args if isinstance(args, dict) else {},
        )


def _is_host_allocation(event: Event) -> bool:
    # Device Type is c10::DeviceType: 0 is the CPU.
    return event.name == "[memory]" and event.args.get("Device Type") == 0
