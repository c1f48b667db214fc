"""Folders of traces as `attn-ext run` and `attn-ext sweep` leave them, for the tests of reports."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import traces
from traces import kernel, launch, memcpy, memset, op, step

from attn_ext.profile import Case

#: A step of the naive variant on an H200: op, what it starts, the kernel's name, its microseconds.
_NAIVE = (
    ("aten::bmm", "cudaMemsetAsync", "", 1.2),
    ("aten::bmm", "cuLaunchKernelEx", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", 96.3),
    ("attn_ext::scale", "cudaLaunchKernel", "attn_scale_cuda_bf16_kernel", 98.1),
    ("aten::copy_", "cudaMemcpyAsync", "", 130.5),
    ("attn_ext::masked_fill_", "cudaLaunchKernel", "attn_masked_fill_cuda_bf16_kernel", 77.0),
    ("attn_ext::softmax", "cudaLaunchKernel", "attn_softmax_cuda_bf16_rows_kernel", 112.4),
    ("aten::bmm", "cuLaunchKernelEx", "nvjet_tst_128x64_64x8_2x1_v_bz_NNN", 103.4),
)
_FLASH = (
    ("attn_ext::flash_attention_forward", "cudaLaunchKernel",
     "attn_flash_fwd_sm90_d64_bf16_kernel", 62.0),
)  # fmt: skip
_H200 = {
    "id": 0, "name": "NVIDIA H200", "computeMajor": 9, "computeMinor": 0, "numSms": 132,
    "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048, "regsPerBlock": 65536,
    "regsPerMultiprocessor": 65536, "sharedMemPerBlock": 49152, "sharedMemPerBlockOptin": 232448,
    "sharedMemPerMultiprocessor": 233472,
}  # fmt: skip


def gpu_trace(path: Path, kernels: int = 1, **metadata: Any) -> Path:
    """A step of so many kernels of 10 us, as another tool's user would have it."""
    entries = [step(0.0)]
    for number in range(kernels):
        entries += [launch(1 + number, 5.0 * number), kernel(1 + number, 120.0 + 10 * number, 10.0)]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": entries, **metadata}))
    return path


def cpu_trace(path: Path) -> Path:
    """One step of two ops, one copy of 256 bytes."""
    shapes = {"Input Dims": [[8, 4]], "Input type": ["double"]}
    return traces.write(
        path, step(0.0), op("aten::clone", 1.0, 9.0), op("aten::copy_", 2.0, **shapes),
        traces.allocation(3.0, 256),
    )  # fmt: skip


def run_folder(path: Path, seq: int = 1024, **changes: Any) -> Path:
    """A run of naive, flash and cuDNN, the last of which could not run. `changes` are naive's."""
    path.mkdir()
    (path / "summary.json").write_text(json.dumps(summary(seq, **changes)))
    _write(path / "naive.json.gz", _NAIVE)
    _write(path / "flash.json.gz", _FLASH)
    return path


def sweep_folder(path: Path) -> Path:
    """The same at three lengths, without their traces."""
    path.mkdir()
    summaries = []
    for seq in (512, 1024, 2048):
        found = summary(seq)
        for row in found["rows"][:2]:
            del row["trace"]
            row["gpu_us"] *= (seq / 1024) ** 2
            row["peak_bytes"] = int(
                row["peak_bytes"] * (seq / 1024) ** (2 if row["kernels"] > 1 else 1)
            )
        summaries.append(found)
    document = {"schema": 1, "lengths": [512, 1024, 2048], "growth": {}, "summaries": summaries}
    (path / "sweep.json").write_text(json.dumps(document))
    return path


def summary(seq: int, **changes: Any) -> dict[str, Any]:
    naive = {"variant": "naive", "trace": "naive.json.gz", "kernels": 5, "memcpy": 1,
             "memcpy_bytes": 1 << 28, "memset": 1, "gpu_us": 618.9, "call_us": 657.7,
             "cpu_us": 140.4, "peak_bytes": 528 << 20}  # fmt: skip
    flash = {"variant": "flash", "trace": "flash.json.gz", "kernels": 1, "memcpy": 0,
             "memcpy_bytes": 0, "memset": 0, "gpu_us": 62.0, "call_us": 72.4, "cpu_us": 44.3,
             "peak_bytes": 33 << 19}  # fmt: skip
    cudnn = {"variant": "sdpa_cudnn", "error": "cuDNN <attention> has been disabled."}
    return {"schema": 1, "kind": "gpu", "device": "NVIDIA H200", "torch": "2.11.0",
            "case": vars(Case(seq=seq)), "rows": [naive | changes, flash, cudnn]}  # fmt: skip


def _write(path: Path, works: Any) -> None:
    """Two steps of these works, each call 14 us after the one before it."""
    entries: list[traces.Entry] = []
    number = 0
    for start in (1000.0, 3000.0):
        at, device = start + 5, start + 20
        for name, call, kernel_name, length in works:
            number += 1
            device = max(device, at + 12)
            entries += [op(name, at, 12.0), launch(number, at + 4, call, 4.0)]
            if call == "cudaMemcpyAsync":
                entries += [
                    op("aten::clone", at - 1, 13.9),
                    memcpy(number, device, length, 1 << 28),
                ]
            elif call == "cudaMemsetAsync":
                entries.append(memset(number, device, length))
            else:
                entries.append(kernel(number, device, length, kernel_name))
                entries[-1]["args"] |= {
                    "grid": [1024, 1, 1], "block": [256, 1, 1], "registers per thread": 168,
                    "shared memory": 213188, "est. achieved occupancy %": 0, "stream": 7,
                    "device": 0,
                }  # fmt: skip
            at, device = at + 14, device + length + 1
        entries.append(step(start, at - start))
    document = {"schemaVersion": 1, "deviceProperties": [_H200], "traceEvents": entries}
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
