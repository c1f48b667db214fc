"""What limits a call: the host or the GPU, and of the GPU its arithmetic or its memory.

Peaks are those of NVIDIA's data sheets, dense, without sparsity, at boost clocks; matrix products
of fp16 and bf16 sum in fp32. A GPU or a dtype that is not in the table has none: nothing is
guessed. A GPU under a power limit reaches less.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

#: From which share of the time that the GPU is busy a call is bound by it, and up to which by the
#: host; between the two it is mixed.
GPU_BOUND, CPU_BOUND = 0.9, 0.7


class Bound(NamedTuple):
    """`verdict` is "GPU", "CPU" or "mixed"; both times are of one call, in us."""

    verdict: str
    gpu_us: float
    cpu_us: float

    def __str__(self) -> str:
        return f"{self.verdict} (GPU {self.gpu_us:.1f} us, CPU {self.cpu_us:.1f} us)"


def bound(gpu_us: float | None, cpu_us: float | None) -> Bound | None:
    """Of a call that is repeated: the host issues the next one while the GPU works on this one, so
    the longer of both times decides. None where one of them is not known."""
    if not gpu_us or not cpu_us:
        return None
    busy = gpu_us / max(gpu_us, cpu_us)
    verdict = "GPU" if busy >= GPU_BOUND else "CPU" if busy <= CPU_BOUND else "mixed"
    return Bound(verdict, gpu_us, cpu_us)


@dataclass(frozen=True)
class Peaks:
    """`tflops` by dtype in 10^12 a second, memory bandwidth in 10^9 bytes a second."""

    title: str
    tflops: Mapping[str, float]
    gbps: float


def _peaks(title: str, half: float, fp32: float, gbps: float, tf32: float | None = None) -> Peaks:
    tflops = {"fp16": half, "bf16": half, "fp32": fp32}
    return Peaks(title, tflops | ({"tf32": tf32} if tf32 else {}), gbps)


# By the name that CUDA gives the GPU; the first pattern that is found counts.
_TABLE = (
    (r"H200 NVL", _peaks("H200 NVL", 835.5, 60.0, 4800.0, 417.5)),
    (r"GH200 (144|141)", _peaks("GH200 144 GB", 989.4, 66.9, 4900.0, 494.7)),
    (r"GH200", _peaks("GH200 96 GB", 989.4, 66.9, 4000.0, 494.7)),
    (r"H200", _peaks("H200 SXM", 989.4, 66.9, 4800.0, 494.7)),
    (r"H100 PCIe", _peaks("H100 PCIe", 756.0, 51.2, 2039.0, 378.0)),
    (r"H100 NVL", _peaks("H100 NVL", 835.5, 60.0, 3938.0, 417.5)),
    (r"H100 80GB HBM3|H100 SXM", _peaks("H100 SXM", 989.4, 66.9, 3350.0, 494.7)),
    (r"A100.*80GB.*PCI|A100 80GB PCI|A100-PCI.*80", _peaks("A100 PCIe 80 GB", 312.0, 19.5, 1935.0,
                                                           156.0)),
    (r"A100.*80GB", _peaks("A100 SXM 80 GB", 312.0, 19.5, 2039.0, 156.0)),
    (r"A100.*40GB", _peaks("A100 40 GB", 312.0, 19.5, 1555.0, 156.0)),
    (r"L40S", _peaks("L40S", 362.0, 91.6, 864.0, 183.0)),
    (r"L40$", _peaks("L40", 181.0, 90.5, 864.0, 90.5)),
    (r"L4$", _peaks("L4", 121.0, 30.3, 300.0, 60.0)),
    (r"RTX 4090$", _peaks("RTX 4090", 165.2, 82.6, 1008.0, 82.6)),
    (r"RTX 3090$", _peaks("RTX 3090", 71.0, 35.6, 936.0, 35.6)),
)  # fmt: skip


def peaks(device: str) -> Peaks | None:
    """By the name of a GPU, such as "NVIDIA H200"; None where it is not in the table."""
    return next((found for pattern, found in _TABLE if re.search(pattern, device)), None)


@dataclass(frozen=True)
class Roofline:
    """A call against the peaks of its GPU.

    Attributes:
        limit: "compute" or "memory": which peak the call would reach first, by its intensity.
        intensity: operations on each byte that must be moved.
        ridge: the intensity from which on compute is the limit.
        tflops, gbps: reached, by the least work that the call asks for.
        compute_percent, memory_percent: of the peaks.
    """

    peaks: Peaks
    limit: str
    intensity: float
    ridge: float
    tflops: float
    gbps: float
    compute_percent: float
    memory_percent: float

    @property
    def percent(self) -> float:
        """Of the peak that is the limit."""
        return self.compute_percent if self.limit == "compute" else self.memory_percent

    def __str__(self) -> str:
        return (
            f"{self.percent:.0f} % of the {self.limit} peak of {self.peaks.title}: "
            f"{self.tflops:.1f} TFLOP/s, {self.gbps:.0f} GB/s, {self.intensity:.0f} FLOP a byte"
        )


def place(
    device: str, dtype: str | None, flops: int | None, bytes: int | None, gpu_us: float
) -> Roofline | None:
    """Where a call stands; None where device, dtype or work is not known."""
    found = peaks(device)
    peak = found.tflops.get(dtype or "") if found else None
    if found is None or peak is None or not flops or not bytes or not gpu_us:
        return None
    tflops, gbps = flops / gpu_us / 1e6, bytes / gpu_us / 1e3
    ridge = peak * 1e3 / found.gbps
    return Roofline(
        peaks=found,
        limit="compute" if flops / bytes >= ridge else "memory",
        intensity=flops / bytes,
        ridge=ridge,
        tflops=tflops,
        gbps=gbps,
        compute_percent=100 * tflops / peak,
        memory_percent=100 * gbps / found.gbps,
    )
