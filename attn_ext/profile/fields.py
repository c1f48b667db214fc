"""The fields of a guess: what each is, and how it is read from a step or from what a run measured.

A value is None where it is not known. What the profiler slows down (the host's time, and so what
limits a call) is taken from the unprofiled figures of a run where there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from attn_ext.profile.figures import Row
from attn_ext.profile.region import Region


class Field(NamedTuple):
    """Attributes:
    kind: count, us, bytes, percent, rate, yes, text (one for each step), or names (several).
    of_step: from a region; None where only a run knows it.
    of_row: from the row of a run, which is asked first.
    device: whether it needs that the profiler recorded the device.
    meaning: in words.
    """

    name: str
    kind: str
    meaning: str
    of_step: Callable[[Region], Any] | None = None
    of_row: Callable[[Row], Any] | None = None
    device: bool = True


def _sum_bytes(sizes: list[int | None]) -> int | None:
    return None if None in sizes else sum(size or 0 for size in sizes)


def _call(attribute: str) -> Callable[[Region], Any]:
    """What all attention calls of a step have in common."""

    def of(step: Region) -> Any:
        seen = {getattr(call, attribute, None) or getattr(call.shape, attribute, None)
                for call in step.calls}  # fmt: skip
        return seen.pop() if len(seen) == 1 else None

    return of


def _sure_bound(step: Region) -> str | None:
    # A profiled host is slower: where the device binds nevertheless, it does so without.
    bound = step.bound
    return "GPU" if bound and bound.verdict == "GPU" else None


def _occupancy(step: Region) -> float | None:
    return step.occupancy.achieved_percent if step.occupancy else None


def _of_peak(step: Region) -> float | None:
    return step.roofline.percent if step.roofline else None


_FIELDS = (
    Field("kernels", "count", "kernels on the device", lambda step: len(step.kernels)),
    Field("memcpy", "count", "copies by the device", lambda step: len(step.memcpy)),
    Field("memset", "count", "fills by the device", lambda step: len(step.memset)),
    Field("memcpy_bytes", "bytes", "bytes of these copies",
          lambda step: _sum_bytes([event.bytes for event in step.memcpy])),
    Field("launches", "count", "launches of kernels", lambda step: len(step.launches)),
    Field("ops", "count", "operators on the host", lambda step: len(step.operators), device=False),
    Field("copies", "count", "tensors that ops copied, seen on the host",
          lambda step: len(step.copies), device=False),
    Field("copy_bytes", "bytes", "bytes of these copies",
          lambda step: _sum_bytes([copy.bytes for copy in step.copies]), device=False),
    Field("gpu_us", "us", "sum of the device events", lambda step: step.gpu_us),
    Field("cpu_us", "us", "time of the host to issue the work",
          lambda step: step.cpu_us, lambda row: row.cpu_us, device=False),
    Field("call_us", "us", "wall time of a call, not profiled", None, lambda row: row.call_us),
    Field("peak_bytes", "bytes", "most memory at once, on top of the inputs",
          lambda step: step.peak_bytes, lambda row: row.peak_bytes, device=False),
    Field("occupancy", "percent", "achieved occupancy of the longest kernel", _occupancy),
    Field("tflops", "rate", "10^12 useful operations a second", lambda step: step.tflops),
    Field("gbps", "rate", "10^9 bytes a second, of the least traffic", lambda step: step.gbps),
    Field("peak", "percent", "of the peak that is the limit, see roofline", _of_peak),
    Field("tensor_cores", "yes", "products on tensor cores", lambda step: step.tensor_cores),
    Field("bound", "text", "GPU, CPU or mixed", _sure_bound, lambda row: row.bound),
    Field("backend", "text", "which attention ran", _call("backend"), device=False),
    Field("dtype", "text", "of query, key and value", _call("dtype"), device=False),
    Field("kernel", "names", "names of the kernels",
          lambda step: [kernel.name for kernel in step.kernels]),
    Field("op", "names", "names of the operators",
          lambda step: [op.name for op in step.operators], device=False),
)  # fmt: skip
#: By name.
FIELDS: Mapping[str, Field] = {field.name: field for field in _FIELDS}
