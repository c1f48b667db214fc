"""Which backend a call of attention gets, for `attn-ext explain`: asked of torch, and tried."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from attn_ext.explain import Explanation, explain
from attn_ext.profile.calls import (
    NEEDS_CUDA,
    Call,
    CannotRunError,
    inputs,
    on_device,
    pinned,
    prepare,
    synchronize,
)  # fmt: skip
from attn_ext.profile.case import VARIANTS, Case
from attn_ext.profile.figures import Row, read_trace
from attn_ext.profile.trace import Trace

_RANGE = "attn_ext.probe "


@dataclass
class Probed:
    """One call, made: the backends in its trace and, on a GPU, its kernels; or why it failed."""

    asked: str
    ran: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, [])}


def choice(case: Case, device: torch.device) -> Explanation:
    """Asks torch and attn_ext, without making the call."""
    with on_device(device):
        query, key, value = inputs(case, device)
        grouped = case.kv_heads != case.heads
        return explain(query, key, value, is_causal=case.causal, enable_gqa=grouped)


def probe(case: Case, device: torch.device) -> list[Probed]:
    """Makes a small call of the case on every backend, and reads from a trace what it executed.

    One sequence and one group of heads, at the case's length: what is chosen depends on the length
    and the size of a head, hardly on how many there are.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    small = replace(case, batch=1, heads=case.heads // case.kv_heads, kv_heads=1)
    with on_device(device):
        calls = prepare(("sdpa", "auto", *VARIANTS), small, device)
        probed = {call.variant: Probed(call.variant) for call in calls}
        ready = [call for call in calls if _tried(call, probed[call.variant], device)]
        trace = _traced(ready, device)
    for region in trace.regions(f"{_RANGE}*"):
        row = Row(region.name.removeprefix(_RANGE))
        read_trace(row, trace, device.type == "cuda", [region])
        probed[row.variant].ran = row.ran
        probed[row.variant].kernels = [kernel.name for kernel in region.kernels]
    return list(probed.values())


def _tried(call: Call, probed: Probed, device: torch.device) -> bool:
    """Whether the call can be made at all."""
    if device.type == "cpu" and call.variant in NEEDS_CUDA:
        probed.error = "torch has this backend on CUDA only"
        return False
    try:
        with pinned(call):
            call.make()
            synchronize(device)
    except CannotRunError as error:
        probed.error = str(error)
    return probed.error is None


def _traced(calls: Sequence[Call], device: torch.device) -> Trace:
    on_gpu = device.type == "cuda"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "probe.json"
        with profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu,
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            record_shapes=True,
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        ) as profiler:
            for _ in range(2):
                for call in calls:
                    with pinned(call), record_function(f"{_RANGE}{call.variant}"):
                        call.make()
                        synchronize(device)
                profiler.step()
        return Trace.load(path)
