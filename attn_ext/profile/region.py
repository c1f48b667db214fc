"""A region of a trace, one occurrence of a range or an attention call: what happened in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from attn_ext.profile.attention import Call
from attn_ext.profile.event import Copy, Event, copy_of, is_launch
from attn_ext.profile.kernel_name import decode
from attn_ext.profile.occupancy import Device, Occupancy, occupancy_of
from attn_ext.profile.roofline import Bound, Roofline, bound, place

#: Category of the span of a call inside a replayed CUDA graph: the moment of its launch.
GRAPH = "cuda_graph"

# aten::mul, not "autograd::engine::evaluate_function: MulBackward0" or "Torch-Compiled Region".
_OPERATOR = re.compile(r"\w+::\w+(\.\w+)?")


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
    #: The attention calls that began in it.
    calls: list[Call] = field(default_factory=list)
    #: What the region is made of on the host, where that is not its span alone.
    parts: list[Event] = field(default_factory=list)
    #: The GPUs of the trace, by index.
    devices: Mapping[int, Device] = field(default_factory=dict)

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

    @property
    def cpu_us(self) -> float | None:
        """Time of the host to issue the work, in us: its parts, without waits for the device; None
        where it has none of its own (a call inside a replayed CUDA graph).

        A profiled host is slower: compare with `Row.cpu_us`, measured without.
        """
        if self.span.category == GRAPH:
            return None
        parts = self.parts or [self.span]
        waits = [call for call in self.runtime if "Synchronize" in call.name]
        waited = sum(
            wait.duration_us for wait in waits if any(_encloses(part, wait) for part in parts)
        )
        return sum(part.duration_us for part in parts) - waited

    @property
    def bound(self) -> Bound | None:
        """What limits a call that is repeated, by gpu_us and cpu_us; None where there is no device
        time, or some of it was lost."""
        return None if self.lost else bound(self.gpu_us, self.cpu_us)

    @property
    def longest(self) -> Event | None:
        """The kernel that took most time."""
        return max(self.kernels, key=lambda kernel: kernel.duration_us, default=None)

    @property
    def occupancy(self) -> Occupancy | None:
        """Of the longest kernel; None where the trace does not say."""
        return occupancy_of(self.longest, self.devices) if self.longest else None

    @property
    def tensor_cores(self) -> bool | None:
        """Whether a kernel multiplies on tensor cores; None where a name does not tell."""
        told = {decode(kernel.name).tensor_cores for kernel in self.kernels}
        if True in told:
            return True
        return None if None in told or not told else False

    @property
    def flops(self) -> int | None:
        """Of its attention calls, by torch's convention (causal or not); None where unknown."""
        return _sum([call.flops for call in self.calls])

    @property
    def useful_flops(self) -> int | None:
        """The same without the pairs that a causal mask hides."""
        return _sum([call.useful_flops for call in self.calls])

    @property
    def bytes(self) -> int | None:
        """The least that its attention calls move to and from memory."""
        return _sum([call.bytes for call in self.calls])

    @property
    def tflops(self) -> float | None:
        """useful_flops over gpu_us, in 10^12 a second."""
        return self._per_us(self.useful_flops, 1e-6)

    @property
    def gbps(self) -> float | None:
        """bytes over gpu_us, in 10^9 a second: below the true traffic where the call moves more."""
        return self._per_us(self.bytes, 1e-3)

    @property
    def roofline(self) -> Roofline | None:
        """Where the region stands against the peaks of its GPU; None for a GPU not in the table,
        work that is not known, or calls of several dtypes."""
        dtypes = {call.shape.dtype for call in self.calls if call.shape}
        index = self.longest.args.get("device", 0) if self.longest else None
        device = self.devices.get(index) if isinstance(index, int) else None
        if device is None or len(dtypes) != 1 or self.lost:
            return None
        return place(device.name, dtypes.pop(), self.useful_flops, self.bytes, self.gpu_us)

    def path(self, event: Event) -> list[str]:
        """The names of the ops round an event, outermost first: for an event of the device, round
        the call that started it. Empty where none of the region is."""
        at = event
        if event.category in ("kernel", "gpu_memcpy", "gpu_memset"):
            calls = [call for call in self.runtime if call.correlation == event.correlation]
            if event.correlation is None or not calls:
                return []
            at = calls[0]
        around = [op for op in self.ops if op is not event and _encloses(op, at)]
        return [op.name for op in sorted(around, key=lambda op: (op.start_us, -op.duration_us))]

    def find_lost(self, started: Mapping[int, object]) -> None:
        """Fills `lost`, from the correlations that have device events."""
        launches = self.launches
        for call in launches:
            # A runtime launch may show the driver's launch inside it: that one has the kernel.
            if call.correlation not in started and not any(
                _encloses(call, inner) for inner in launches
            ):
                self.lost.append(call)

    def _per_us(self, amount: int | None, factor: float) -> float | None:
        if amount is None or self.lost or not self.gpu_us:
            return None
        return amount / self.gpu_us * factor


def _sum(numbers: list[int | None]) -> int | None:
    if not numbers or None in numbers:
        return None
    return sum(number or 0 for number in numbers)


def _encloses(outer: Event, inner: Event) -> bool:
    return (
        outer is not inner
        and outer.tid == inner.tid
        and outer.start_us <= inner.start_us
        and inner.end_us <= outer.end_us
    )
