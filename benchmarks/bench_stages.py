"""The stages at the article's shape: bandwidth of each, and the staged forms beside eager torch.

python benchmarks/bench_stages.py

Writes results/<device>-stages.json. Bytes are those a stage must touch; the ceiling is a device
copy of the same scores in the same run, counting bytes read and written. `fill` is torch's fill of
all scores: what a stage that only writes can reach.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from measure import Calls, Result, measure

from attn_ext import ops

BATCH, HEADS, SEQ, DIM = 8, 16, 1024, 64
SCALE = 1 / math.sqrt(DIM)


def stage_rows() -> list[dict[str, Any]]:
    scores = torch.randn(BATCH, HEADS, SEQ, SEQ, device="cuda").bfloat16()
    probs, target = torch.softmax(scores, -1), torch.empty_like(scores)
    grad, state = torch.randn_like(scores), torch.zeros(2, dtype=torch.int64, device="cuda")
    future = torch.ones(SEQ, SEQ, dtype=torch.bool, device="cuda").triu(1)
    whole = scores.numel() * 2
    filled = int(future.sum()) * BATCH * HEADS * 2
    work = {
        "copy": (lambda: target.copy_(scores), 2 * whole),
        "fill": (lambda: target.fill_(-math.inf), whole),
        "scale": (lambda: ops.scale(scores, SCALE), 2 * whole),
        "masked_fill_causal": (
            lambda: ops.masked_fill_(scores, None, -math.inf, is_causal=True),
            filled,
        ),
        "masked_fill_mask": (
            lambda: ops.masked_fill_(scores, future, -math.inf),
            filled + future.numel(),
        ),
        "softmax": (lambda: ops.softmax(scores), 2 * whole),
        "softmax_backward": (lambda: ops.softmax_backward(grad, probs), 3 * whole),
        "dropout": (lambda: ops.dropout(probs, 0.1, state), 2 * whole),
    }
    times = measure({name: call for name, (call, _) in work.items()})
    ceiling = work["copy"][1] / times["kernel_us"]["copy"]
    rows = []
    for name, (_, count) in work.items():
        rate = count / times["kernel_us"][name]
        rows.append({
            "case": "stage", "stage": name, "dtype": "bfloat16", "bytes": count,
            "kernel_us": times["kernel_us"][name], "cpu_us": times["cpu_us"][name],
            "gb_per_s": rate / 1e3, "of_copy": rate / ceiling,
        })  # fmt: skip
        print(f"{name:20}{rows[-1]['kernel_us']:9.1f} us {rate / 1e3:8.0f} GB/s "
              f"{rate / ceiling:6.0%} of the copy")  # fmt: skip
    return rows


def attention_row() -> dict[str, Any]:
    """Ours and eager torch's five steps, forward, causal, with the mask built beforehand."""
    q, k, v = (torch.randn(BATCH, HEADS, SEQ, DIM, device="cuda").bfloat16() for _ in range(3))
    future = torch.ones(SEQ, SEQ, dtype=torch.bool, device="cuda").triu(1)

    def eager_naive() -> torch.Tensor:
        scores = (q @ k.transpose(-2, -1)) * SCALE
        return torch.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ v

    def eager_inplace() -> torch.Tensor:
        scores = (q @ k.transpose(-2, -1)) * SCALE
        return torch.softmax(scores.masked_fill_(future, -math.inf), dim=-1) @ v

    calls: Calls = {
        "naive": lambda: ops.naive_attention(q, k, v, None, 0.0, True),
        "eager_naive": eager_naive,
        "inplace": lambda: ops.inplace_attention(q, k, v, None, 0.0, True),
        "eager_inplace": eager_inplace,
    }
    figures = measure(calls)
    times = figures["kernel_us"]
    for name in ("naive", "inplace"):
        print(f"{name:20}{times[name]:9.1f} us, eager torch {times['eager_' + name]:.1f} us: "
              f"{times['eager_' + name] / times[name]:.2f}x")  # fmt: skip
    return {
        "case": "article", "pass": "fwd", "dtype": "bfloat16", "batch": BATCH, "heads": HEADS,
        "kv_heads": HEADS, "seq_q": SEQ, "seq_k": SEQ, "head_dim": DIM, "causal": True, **figures,
    }  # fmt: skip


def main() -> None:
    with Result("stages", "gpu") as result:
        for row in (*stage_rows(), attention_row()):
            result.add(row)
    print(result.path)


if __name__ == "__main__":
    main()
