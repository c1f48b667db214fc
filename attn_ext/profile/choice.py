"""Which backend a call of attention gets, for `attn-ext explain`: asked of torch, and tried."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import attn_ext
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
from attn_ext.sdpa import TORCH_BACKENDS, choose

_RANGE = "attn_ext.probe "


@dataclass
class Choice:
    """What a call of this case gets.

    Attributes:
        sdpa: the backend that F.scaled_dot_product_attention takes.
        auto: the backend that attn_ext.scaled_dot_product_attention(backend="auto") takes.
        active: whether attn_ext.activate() has put our kernels under torch's flash backend.
        order: torch's backends, the first that takes the call runs; those switched off left out.
        refused: backend -> why it does not take the call, in one line.
    """

    sdpa: str
    auto: str
    active: bool
    order: list[str]
    refused: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Probed:
    """One call, made: the backends in its trace and, on a GPU, its kernels; or why it failed."""

    asked: str
    ran: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, [])}


def choice(case: Case, device: torch.device) -> Choice:
    """Asks torch and attn_ext, without making the call."""
    names = {backend.value: name for name, backend in TORCH_BACKENDS.items()}
    with on_device(device):
        query, key, value = inputs(case, device)
        sdpa: Any = getattr(torch, "_fused_sdp_choice")  # noqa: B009  it is in no stub
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            number = sdpa(
                query, key, value, None, 0.0, case.causal, scale=None,
                enable_gqa=case.kv_heads != case.heads,
            )  # fmt: skip
        taken = names.get(number, SDPBackend(number).name.lower())
        auto = choose(query, key, value, None, 0.0)
        refused = _refused(case, query, key, value)
    internals: Any = torch._C
    order = [names[n] for n in internals._get_sdp_priority_order() if n in names and _allowed(n)]
    active = attn_ext.is_active()
    return Choice(taken, taken if auto == "sdpa" else auto, active, order, refused)


def _allowed(backend: int) -> bool:
    flags: Any = torch.backends.cuda
    enabled = {
        SDPBackend.MATH.value: flags.math_sdp_enabled,
        SDPBackend.FLASH_ATTENTION.value: flags.flash_sdp_enabled,
        SDPBackend.EFFICIENT_ATTENTION.value: flags.mem_efficient_sdp_enabled,
        SDPBackend.CUDNN_ATTENTION.value: flags.cudnn_sdp_enabled,
    }
    return bool(enabled[backend]())


def _refused(case: Case, query: Tensor, key: Tensor, value: Tensor) -> dict[str, str]:
    """torch's fused backends that do not take the call."""
    if query.device.type == "cpu":
        return dict.fromkeys(NEEDS_CUDA, "torch has this backend on CUDA only")
    cuda: Any = torch.backends.cuda
    grouped = case.kv_heads != case.heads
    parameters = cuda.SDPAParams(query, key, value, None, 0.0, case.causal, grouped)
    refused = {}
    for name in ("flash", "efficient", "cudnn"):
        can: Callable[..., bool] = getattr(cuda, f"can_use_{name}_attention")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fits = can(parameters, debug=True)
        if not fits:
            texts = [str(warning.message).split(" (Triggered")[0].strip() for warning in caught]
            causes = [text for text in texts if "not used because" not in text]
            refused[f"sdpa_{name}"] = " ".join(causes) or "torch does not say why"
    return refused


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
