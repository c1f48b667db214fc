"""Peak memory of forward and backward over the sequence length: quadratic or linear.

python benchmarks/bench_memory.py

Batch 1, 16 heads of 64, bf16, causal, S from 1,024 to 65,536; a variant ends where its next peak
would not fit on the GPU. Writes results/<device>-memory.json and, with matplotlib, the figure
results/<device>-memory.png.
"""

from __future__ import annotations

from itertools import pairwise
from math import log2, nan
from pathlib import Path
from typing import Any

import torch
from measure import Result, pinned

from attn_ext import scaled_dot_product_attention

VARIANTS = ("naive", "inplace", "math", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn", "flash")
LENGTHS = tuple(2**power for power in range(10, 17))
HEADS, HEAD_DIM = 16, 64


def peak(variant: str, seq: int) -> int:
    """Bytes allocated at most during forward and backward, on top of the inputs."""
    inputs = [
        torch.randn(1, HEADS, seq, HEAD_DIM, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]
    grad_out = torch.randn_like(inputs[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with pinned(variant):
        out = scaled_dot_product_attention(*inputs, is_causal=True, backend=variant)
        torch.autograd.grad(out, inputs, grad_out)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for variant in VARIANTS:
        peaks = {row["seq_q"]: row["peak_bytes"].get(variant, nan) for row in rows}
        axes.plot(peaks.keys(), peaks.values(), marker="o", markersize=3, label=variant)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("sequence length")
    axes.set_ylabel("peak of forward + backward, bytes")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def main() -> None:
    total = torch.cuda.get_device_properties().total_memory
    running = dict.fromkeys(VARIANTS, 0)
    with Result("memory", "gpu") as result:
        for seq in LENGTHS:
            # From one length to the next a peak grows fourfold at most.
            fitting = [name for name, last in running.items() if 4 * last < 0.9 * total]
            running = {name: peak(name, seq) for name in fitting}
            torch.cuda.empty_cache()
            result.add({
                "case": "memory", "pass": "fwd+bwd", "dtype": "bfloat16", "batch": 1,
                "heads": HEADS, "kv_heads": HEADS, "seq_q": seq, "seq_k": seq,
                "head_dim": HEAD_DIM, "causal": True, "peak_bytes": dict(running),
            })  # fmt: skip
            cells = "".join(f"{name:>16} {size / 2**20:9.1f}" for name, size in running.items())
            print(f"{seq:6} MiB{cells}", flush=True)
    for name in VARIANTS:
        peaks = [row["peak_bytes"][name] for row in result.rows if name in row["peak_bytes"]]
        growth = [f"{log2(after / before):.2f}" for before, after in pairwise(peaks)]
        print(f"{name:15} grows with S to the power of {', '.join(growth)}")
    try:
        plot(result.rows, result.path.with_suffix(".png"))
    except ImportError:
        print("no figure: pip install matplotlib")


if __name__ == "__main__":
    main()
