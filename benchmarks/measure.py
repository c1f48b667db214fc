"""How every benchmark measures: kernel time, time per call and CPU time per call, interleaved.

kernel_us  sum of the device events (kernels, copies, fills) of one call, from the profiler's raw
           events; a call ends with a synchronize, so its events lie between its marks
call_us    wall time per call of a run of calls, nothing profiled
cpu_us     CPU time per call to issue the same run, before the device has finished it
Each is a median over rounds in which all variants take turns, after warm-up, on random data.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.nn.attention import sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function

from attn_ext.sdpa import TORCH_BACKENDS

RESULTS = Path(__file__).parent / "results"
Calls = dict[str, Callable[[], Any]]
Figures = dict[str, dict[str, float]]


@contextmanager
def pinned(variant: str) -> Iterator[None]:
    """Makes F.scaled_dot_product_attention use torch's backend of that name, and attn_ext its
    portable kernels for flash_sm80; else does nothing.

    A pin costs more CPU time than a fused call, so it is entered outside what is timed.
    """
    if variant == "flash_sm80":
        os.environ["ATTN_EXT_SM"] = "80"
    try:
        with sdpa_kernel(TORCH_BACKENDS[variant]) if variant in TORCH_BACKENDS else nullcontext():
            yield
    finally:
        os.environ.pop("ATTN_EXT_SM", None)


def measure(calls: Calls, rounds: int = 9) -> Figures:
    """{"kernel_us": {variant: median}, "call_us": ..., "cpu_us": ..., "peak_bytes": ...}."""
    for name, call in calls.items():
        with pinned(name):
            for _ in range(3):
                call()
    torch.cuda.synchronize()
    figures = {"kernel_us": _kernel_time(calls, rounds)}
    figures |= _host_time(calls, figures["kernel_us"], rounds=3)
    figures["peak_bytes"] = {name: _peak(name, call) for name, call in calls.items()}
    return figures


def _kernel_time(calls: Calls, rounds: int) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for index in range(rounds + 1):
            for name, call in calls.items():
                with pinned(name), record_function(f"measured {index} {name}"):
                    call()
                    torch.cuda.synchronize()
    marks, device = [], []
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.device_type() == DeviceType.CUDA and not event.name().startswith("measured "):
            device.append((event.start_ns(), event.duration_ns()))
        elif event.name().startswith("measured ") and event.device_type() == DeviceType.CPU:
            _, index, name = event.name().split(" ", 2)
            marks.append((event.start_ns(), event.start_ns() + event.duration_ns(), index, name))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for start, end, index, name in marks:
        inside = [duration for at, duration in device if start <= at < end]
        if index != "0" and inside:  # the first round may lose kernels: CUPTI before 13.1
            times[name].append(sum(inside) / 1e3)
    return {name: median(values) for name, values in times.items() if values}


def _host_time(calls: Calls, kernel_us: dict[str, float], rounds: int) -> Figures:
    wall: dict[str, list[float]] = {name: [] for name in calls}
    issue: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            run = max(1, min(10, int(30e3 / kernel_us.get(name, 1.0))))
            with pinned(name):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(run):
                    call()
                issued = time.perf_counter()
                torch.cuda.synchronize()
                wall[name].append((time.perf_counter() - start) / run * 1e6)
                issue[name].append((issued - start) / run * 1e6)
    return {
        "call_us": {name: median(values) for name, values in wall.items()},
        "cpu_us": {name: median(values) for name, values in issue.items()},
    }


def _peak(name: str, call: Callable[[], Any]) -> int:
    """Bytes that one call allocates on top of what is there before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with pinned(name):
        call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class Result:
    """benchmarks/results/<device>-<name>.json, the one file of this benchmark on this device.

    Written anew with each row, so that a run that is cut short keeps what it measured. On a GPU the
    SM clock is sampled while the `with` block runs.
    """

    def __init__(self, name: str, kind: str, keep: bool = True) -> None:
        self.facts = header(kind)
        device = "-".join(self.facts["device"].lower().replace("(r)", "").split())
        self.path = RESULTS / f"{device}-{name}.json"
        self.rows: list[dict[str, Any]] = []
        self._keep = keep
        self._clocks: list[int] = []
        self._sampler: subprocess.Popen[str] | None = None

    def __enter__(self) -> Result:
        command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
        if self.facts["kind"] == "gpu":
            with suppress(FileNotFoundError):
                self._sampler = subprocess.Popen(
                    [*command, "-lms", "200"], stdout=subprocess.PIPE, text=True
                )
                self._reader = threading.Thread(target=self._sample)
                self._reader.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._sampler is not None:
            self._sampler.terminate()
            self._reader.join()

    def _sample(self) -> None:
        assert self._sampler is not None and self._sampler.stdout is not None
        self._clocks += (int(text) for text in self._sampler.stdout if text.strip().isdigit())

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if not self._keep:
            return
        facts, clocks = dict(self.facts), list(self._clocks)
        if clocks:
            facts["sm_clock_mhz"] = [min(clocks), median(clocks), max(clocks)]
        RESULTS.mkdir(exist_ok=True)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(facts | {"rows": self.rows}, indent=1) + "\n")
        fresh.replace(self.path)


def header(kind: str) -> dict[str, Any]:
    """What a result file says of the machine and the run."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent
    ).stdout.strip()
    facts: dict[str, Any] = {
        "schema": 1,
        "kind": kind,
        "device": torch.cuda.get_device_name() if kind == "gpu" else cpu_name(),
        "torch": torch.__version__,
        "commit": commit or None,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
    }
    if kind == "gpu":
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True,
        ).stdout.split()  # fmt: skip
        facts |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": driver[0] if driver else None,
        }
    return facts


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown CPU"
