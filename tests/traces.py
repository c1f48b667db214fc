"""Traces made by hand, in the form that torch's profiler writes on a CUDA machine."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from attn_ext.profile import Trace

Entry = dict[str, Any]
MAIN, AUTOGRAD = 10, 11
STREAM = 7


def span(name: str, start: float, duration: float, tid: int = MAIN) -> Entry:
    return _complete("user_annotation", name, start, duration, tid)


def step(start: float, duration: float = 100.0, tid: int = MAIN) -> Entry:
    return span("attn_ext.step", start, duration, tid)


def op(name: str, start: float, duration: float = 1.0, **args: Any) -> Entry:
    return _complete("cpu_op", name, start, duration, MAIN, **args)


def launch(
    correlation: int, start: float, name: str = "cudaLaunchKernel", duration: float = 2.0,
    tid: int = MAIN,
) -> Entry:  # fmt: skip
    category = "cuda_driver" if name.startswith("cu") and name[2].isupper() else "cuda_runtime"
    return _complete(category, name, start, duration, tid, correlation=correlation)


def kernel(correlation: int, start: float, duration: float, name: str = "kernel_x") -> Entry:
    return _complete("kernel", name, start, duration, STREAM, pid=0, correlation=correlation)


def memcpy(correlation: int, start: float, duration: float, size: int) -> Entry:
    name = "Memcpy DtoD (Device -> Device)"
    return _complete(
        "gpu_memcpy", name, start, duration, STREAM, pid=0, correlation=correlation, bytes=size
    )


def memset(correlation: int, start: float, duration: float) -> Entry:
    name = "Memset (Device)"
    return _complete(
        "gpu_memset", name, start, duration, STREAM, pid=0, correlation=correlation, bytes=4
    )


def allocation(start: float, size: int) -> Entry:
    args = {"Bytes": size, "Device Type": 0, "Device Id": -1}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "s": "t", "pid": 1,
            "tid": MAIN, "ts": start, "args": args}  # fmt: skip


def naive_step(number: int, start: float) -> list[Entry]:
    """A step of the naive variant: 5 kernels, a copy and the memset of a GEMM, 61 us in all. The
    device is behind: it works on the step when the host is in the next one."""
    base = 100 * number
    device = start + 120.0
    entries = [step(start)]
    entries += [launch(base + i, start + 5 * i) for i in range(5)]
    entries += [kernel(base + i, device + 10 * i, 10.0) for i in range(5)]
    entries += [launch(base + 5, start + 30, "cudaMemcpyAsync")]
    entries += [memcpy(base + 5, device + 50, 10.0, 4096)]
    entries += [launch(base + 6, start + 40, "cudaMemsetAsync"), memset(base + 6, device + 60, 1.0)]
    return entries


def trace(*entries: Entry) -> Trace:
    return Trace({"traceEvents": list(entries)})


def write(path: Path, *entries: Entry) -> Path:
    document = json.dumps({"schemaVersion": 1, "traceEvents": entries}).encode()
    path.write_bytes(gzip.compress(document) if path.suffix == ".gz" else document)
    return path


def _complete(
    category: str, name: str, start: float, duration: float, tid: int, pid: int = 1, **args: Any
) -> Entry:
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start,
            "dur": duration, "args": args}  # fmt: skip
