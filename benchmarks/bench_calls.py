"""What a call costs the CPU, by each way to attention, at a size where the kernels cost nothing.

python benchmarks/bench_calls.py [--device cpu|cuda]

Writes results/<device>-calls.json: cpu_us, the time to issue a call, a median over rounds in which
all ways take turns. "fwd" is without gradients, "fwd_grad" the forward pass of a training step. A
mode, an activation or a pin is entered outside of what is timed, as a program would.

op_*       torch.ops.attn_ext, called by hand
use_*      F.scaled_dot_product_attention inside `with attn_ext.use(...)`
activated  F.scaled_dot_product_attention inside `with attn_ext.activated()`
sdpa       F.scaled_dot_product_attention, as torch chooses; math and sdpa_*: pinned to one backend
others     attn_ext.scaled_dot_product_attention(..., backend=), flash_attn_func
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from measure import Result, pinned
from torch import Tensor

import attn_ext
from attn_ext.sdpa import OWN_BACKENDS, TORCH_BACKENDS

BATCH, HEADS, SEQ, DIM = 1, 1, 16, 64
ROUNDS, RUN = 100, 20  # a run of the longest form stays within the queue of the device

Way = tuple[Callable[[], AbstractContextManager[Any]], Callable[..., Any]]


def ways() -> dict[str, Way]:
    """Name -> (what is entered round a run, the call)."""
    plain = F.scaled_dot_product_attention
    found: dict[str, Way] = {
        "op_flash": (nullcontext, attn_ext.ops.flash_attention_forward),
        "op_naive": (nullcontext, attn_ext.ops.naive_attention),
        "op_inplace": (nullcontext, attn_ext.ops.inplace_attention),
        "flash_attn_func": (nullcontext, attn_ext.flash_attn_func),
        "activated": (attn_ext.activated, plain),
        "sdpa": (nullcontext, plain),
    }
    for name in OWN_BACKENDS:
        call = partial(attn_ext.scaled_dot_product_attention, backend=name)
        found[name] = (nullcontext, call)
        found[f"use_{name}"] = (partial(attn_ext.use, name, strict=True), plain)
    return found | {name: (partial(pinned, name), plain) for name in TORCH_BACKENDS}


def cpu_time(found: dict[str, Way], inputs: list[Tensor]) -> dict[str, float]:
    """Microseconds to issue one call, without the ways that do not exist on this device."""
    synchronize = torch.cuda.synchronize if inputs[0].is_cuda else lambda: None
    rows_first = [tensor.transpose(1, 2) for tensor in inputs]
    times: dict[str, list[float]] = {}
    for index in range(ROUNDS + 1):
        for name, (context, call) in found.items():
            if index and name not in times:
                continue
            operands = rows_first if name == "flash_attn_func" else inputs
            try:
                with context():
                    call(*operands)
                    synchronize()
                    start = time.perf_counter()
                    for _ in range(RUN):
                        call(*operands)
                    taken = (time.perf_counter() - start) / RUN * 1e6
                    synchronize()
            except RuntimeError:
                if index:
                    raise
                continue
            times.setdefault(name, []).append(taken)
    return {name: median(values[1:]) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    device = parser.parse_args().device
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with Result("calls", "gpu" if device == "cuda" else "cpu") as result:
        rows = {}
        for which, grad in (("fwd", False), ("fwd_grad", True)):
            inputs = [
                torch.randn(BATCH, HEADS, SEQ, DIM, device=device, dtype=dtype, requires_grad=grad)
                for _ in range(3)
            ]
            rows[which] = cpu_time(ways(), inputs)
            result.add({
                "case": "calls", "pass": which, "dtype": str(dtype)[6:], "batch": BATCH,
                "heads": HEADS, "kv_heads": HEADS, "seq_q": SEQ, "seq_k": SEQ, "head_dim": DIM,
                "causal": False, "cpu_us": rows[which],
            })  # fmt: skip
        print(f"{'us of CPU a call':16}" + "".join(f"{which:>10}" for which in rows))
        for name in sorted(rows["fwd"], key=rows["fwd"].__getitem__):
            print(f"{name:16}" + "".join(f"{row[name]:10.1f}" for row in rows.values()))


if __name__ == "__main__":
    main()
