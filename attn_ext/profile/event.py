"""One event of a trace, and what it says by itself."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

# Runtime calls that must lead to a kernel. cudaLaunchKernelExC, cuLaunchKernelEx, cooperative
# launches and graphs are among them; cudaLaunchHostFunc is not.
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cudaGraphLaunch",
             "cuLaunchKernel", "cuLaunchCooperativeKernel", "cuGraphLaunch")  # fmt: skip

#: Bytes of an element by the names of "Input type", those of C++.
ELEMENT_BYTES = {
    "bool": 1, "unsigned char": 1, "signed char": 1, "short int": 2, "short": 2, "int": 4,
    "long int": 8, "long": 8, "c10::Half": 2, "c10::BFloat16": 2, "float": 4, "double": 8,
    "c10::complex<float>": 8, "c10::complex<double>": 16,
}  # fmt: skip


class Event(NamedTuple):
    """One event of a trace. Times in microseconds on the trace's own clock."""

    name: str
    category: str
    start_us: float
    duration_us: float
    pid: int | str
    tid: int | str
    args: Mapping[str, Any]

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us

    @property
    def correlation(self) -> int | None:
        """Joins a runtime call with the device events that it started."""
        value = self.args.get("correlation")
        return value if isinstance(value, int) else None

    @property
    def bytes(self) -> int | None:
        """Bytes of a device copy or fill, or of an allocation (negative where it is freed)."""
        value = self.args.get("bytes", self.args.get("Bytes"))
        return value if isinstance(value, int) else None


class Copy(NamedTuple):
    """An aten::copy_ on the host's side. `bytes` is None where the trace has no shapes."""

    op: Event
    bytes: int | None


def is_launch(call: Event) -> bool:
    """Whether a runtime call launches a kernel (or a graph of them)."""
    return call.name.startswith(_LAUNCHES)


def copy_of(op: Event) -> Copy | None:
    """The copy of a tensor that an op is; None where it is none, or copies a single number."""
    if op.name != "aten::copy_":
        return None
    shapes, types = op.args.get("Input Dims"), op.args.get("Input type")
    if not shapes or not types or not all(isinstance(size, int) for size in shapes[0]):
        return Copy(op, None)
    elements, element = prod(shapes[0]), ELEMENT_BYTES.get(types[0])
    if elements <= 1:
        return None
    return Copy(op, None if element is None else elements * element)
