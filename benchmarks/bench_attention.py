"""Attention on this GPU: ours and every backend of torch, interleaved, over the cases below.

python benchmarks/bench_attention.py [--case grid gqa ...] [--quick]

Prints TFLOP/s of kernel time and the ratio to torch's best, writes results/<device>-attention.json.
FLOPs: forward 4 B H Sq Sk D, backward 2.5 times that, halved when causal.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
import torch.nn.functional as F
from measure import Calls, clock_log, header, measure, pinned, write
from torch import Tensor
from torch.autograd import grad

from attn_ext import dropout_state, ops

PEERS = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient")


@dataclass(frozen=True)
class Case:
    case: str
    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    head_dim: int
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16
    mask: bool = False
    dropout_p: float = 0.0
    backward: bool = True

    def flops(self, direction: str) -> float:
        pairs = self.batch * self.heads * self.seq_q * self.seq_k * (0.5 if self.causal else 1)
        return 4 * pairs * self.head_dim * (2.5 if direction == "bwd" else 1)


def cases(quick: bool) -> Iterator[Case]:
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    if quick:
        lengths = (512, 4096)
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            for seq in lengths:
                heads = 2048 // head_dim
                yield Case("grid", 16384 // seq, heads, heads, seq, seq, head_dim, causal)
    yield Case("article", 8, 16, 16, 1024, 1024, 64, True)
    for seq in lengths[1::2]:
        yield Case("gqa", 16384 // seq, 32, 8, seq, seq, 128, True)
    for head_dim in (96, 192):
        yield Case("dim", 4, 2048 // head_dim, 2048 // head_dim, 4096, 4096, head_dim, True)
    for head_dim in (64, 128):
        plain = Case("mask", 4, 16, 16, 2048, 2048, head_dim, mask=True)
        yield plain
        yield replace(plain, case="dropout", mask=False, dropout_p=0.1)
        yield replace(plain, case="fp32", mask=False, dtype=torch.float32)
        yield replace(plain, case="fp32", mask=False, dtype=torch.float32, causal=True)
    for seq_q, batch, seq_k in ((1, 8, 8192), (1, 1, 65536), (16, 4, 16384)):
        yield Case("decode", batch, 32, 8, seq_q, seq_k, 128, backward=False)


def calls_of(case: Case) -> dict[str, Calls]:
    """{"fwd": {variant: call}, "bwd": {variant: call}} of the variants that can do the case."""

    def normal(heads: int, seq: int) -> Tensor:
        size = (case.batch, heads, seq, case.head_dim)
        return torch.randn(size, device="cuda").to(case.dtype).requires_grad_(case.backward)

    q, k = normal(case.heads, case.seq_q), normal(case.kv_heads, case.seq_k)
    v = normal(case.kv_heads, case.seq_k)
    mask = None
    if case.mask:
        mask = torch.randn(case.seq_q, case.seq_k, device="cuda").to(case.dtype)
    state = dropout_state("cuda") if case.dropout_p else None
    grad_out = torch.randn_like(q)

    def ours() -> Tensor:
        return ops.flash_attention_forward(q, k, v, mask, case.dropout_p, case.causal, state)[0]

    def theirs() -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, mask, case.dropout_p, case.causal, enable_gqa=case.heads != case.kv_heads
        )

    forward: Calls = {"flash": ours} | dict.fromkeys(PEERS, theirs)
    backward: Calls = {}
    for name in list(forward):
        try:
            with pinned(name):
                out = forward[name]()
        except RuntimeError:  # torch's backend does not take the case
            del forward[name]
            continue
        if case.backward:
            backward[name] = partial(grad, out, (q, k, v), grad_out, retain_graph=True)
    return {"fwd": forward, "bwd": backward}


def row_of(case: Case, direction: str, calls: Calls) -> dict[str, Any]:
    facts = asdict(case) | {"pass": direction, "flops": case.flops(direction)}
    facts["dtype"] = str(case.dtype)[6:]
    with torch.no_grad() if direction == "fwd" else nullcontext():
        return facts | measure(calls)


def line_of(row: dict[str, Any]) -> str:
    shape = f"{row['batch']}x{row['heads']}:{row['kv_heads']} {row['seq_q']}x{row['seq_k']}"
    what = f"{row['case']:8}{row['pass']} {shape:20} d{row['head_dim']:<4}"
    what += f"{'causal' if row['causal'] else 'full':7}"
    times = row["kernel_us"]
    rates = "".join(
        f"{row['flops'] / times[name] / 1e6:8.0f}" if name in times else f"{'-':>8}"
        for name in ("flash", *PEERS)
    )
    peers = {name: times[name] for name in PEERS if name in times}
    if "flash" not in times or not peers:
        return what + rates
    best = min(peers, key=lambda name: peers[name])
    return f"{what}{rates}   {peers[best] / times['flash']:5.2f}x {best}"


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Geometric means of the speed-up of ours over each peer, and the worst cell."""
    for case in dict.fromkeys(row["case"] for row in rows):
        for direction in ("fwd", "bwd"):
            for peer in PEERS:
                ratios = [
                    row["kernel_us"][peer] / row["kernel_us"]["flash"]
                    for row in rows
                    if (row["case"], row["pass"]) == (case, direction)
                    and {"flash", peer} <= row["kernel_us"].keys()
                ]
                if ratios:
                    mean = geometric_mean(ratios)
                    yield (
                        f"{case:8} {direction} over {peer:15} geometric mean {mean:5.2f}x, "
                        f"least {min(ratios):5.2f}x, {len(ratios)} cells"
                    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="*", help="only these cases")
    parser.add_argument("--quick", action="store_true", help="two lengths, nothing written")
    options = parser.parse_args()
    print(f"{'TFLOP/s of kernel time':49}" + "".join(f"{n[-8:]:>8}" for n in ("flash", *PEERS)))
    rows = []
    with clock_log() as clocks:
        for case in cases(options.quick):
            if options.case and case.case not in options.case:
                continue
            for direction, calls in calls_of(case).items():
                if calls:
                    rows.append(row_of(case, direction, calls))
                    print(line_of(rows[-1]), flush=True)
    print("\n".join(summary(rows)))
    if not options.quick:
        print(write("attention", header("gpu", clocks), rows))


if __name__ == "__main__":
    main()
