"""Attention on this GPU: ours and every backend of torch that can do the case, interleaved.

python benchmarks/bench_attention.py [--case grid gqa ...] [--pass fwd] [--quick]

Prints TFLOP/s of kernel time and the ratio to the best peer, then geometric means, also over the
best of the peers and what FlashAttention-3 measured on the same GPU (results/<device>-fa3.json). A
whole run writes results/<device>-attention.json, row by row. FLOPs: forward 4 B H Sq Sk D, backward
2.5 times that, halved when causal. `flash_sm80` is our portable kernel, forced on a newer GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
import torch.nn.functional as F
from measure import Calls, Result, measure, pinned
from torch import Tensor
from torch.autograd import grad

from attn_ext import dropout_state, flash_attn_varlen_func, ops

PEERS = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient")
OURS = ("flash", "flash_sm80")
TOKENS, WIDTH = 16384, 2048  # of a batch; heads x head size


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
    mask: str | None = None
    dropout_p: float = 0.0
    backward: bool = True

    def flops(self, direction: str) -> float:
        if self.case == "varlen":
            pairs = float(sum(length**2 for length in varlen_lengths(self))) * self.heads
        else:
            pairs = float(self.batch * self.heads * self.seq_q * self.seq_k)
        pairs *= 0.5 if self.causal else 1
        return 4 * pairs * self.head_dim * (2.5 if direction == "bwd" else 1)


def square(case: str, seq: int, head_dim: int, causal: bool = False, **options: Any) -> Case:
    heads = WIDTH // head_dim
    return Case(case, TOKENS // seq, heads, heads, seq, seq, head_dim, causal, **options)


def cases(quick: bool) -> Iterator[Case]:
    lengths = (512, 4096) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            for seq in lengths:
                yield square("grid", seq, head_dim, causal)
    yield Case("article", 8, 16, 16, 1024, 1024, 64, True)
    for seq in lengths[1::2]:
        yield replace(square("gqa", seq, 128, True), heads=32, kv_heads=8)
    for head_dim in (96, 192):
        for seq in (1024, 4096):
            yield square("dim", seq, head_dim, True)
    for head_dim in (64, 128):
        for mask in ("float", "bool"):
            yield square("mask", 2048, head_dim, mask=mask)
        yield square("dropout", 2048, head_dim, dropout_p=0.1)
        yield square("varlen", 4096, head_dim, True)
    for head_dim in (32, 64, 128, 256):
        for causal in (False, True):
            yield square("fp32", 2048, head_dim, causal, dtype=torch.float32)
    for seq_q, batch, seq_k in ((1, 8, 8192), (1, 1, 65536), (16, 4, 16384)):
        yield Case("decode", batch, 32, 8, seq_q, seq_k, 128, backward=False)


def varlen_lengths(case: Case) -> list[int]:
    """As many tokens as the dense batch has, in sequences from 1/8 to all of its length."""
    steps = [case.seq_q * eighths // 8 for eighths in range(1, 9)]
    lengths: list[int] = []
    while sum(lengths) < case.batch * case.seq_q:
        rest = case.batch * case.seq_q - sum(lengths)
        lengths.append(min(steps[len(lengths) * 5 % 8], rest))
    return lengths


def dense_calls(case: Case) -> tuple[list[Tensor], Calls]:
    def normal(heads: int, seq: int) -> Tensor:
        size = (case.batch, heads, seq, case.head_dim)
        return torch.randn(size, device="cuda").to(case.dtype).requires_grad_(case.backward)

    q, k = normal(case.heads, case.seq_q), normal(case.kv_heads, case.seq_k)
    v = normal(case.kv_heads, case.seq_k)
    mask = None
    if case.mask:
        mask = torch.randn(case.seq_q, case.seq_k, device="cuda").to(case.dtype)
        mask = mask > -1 if case.mask == "bool" else mask
    state = dropout_state("cuda") if case.dropout_p else None

    def ours() -> Tensor:
        return ops.flash_attention_forward(q, k, v, mask, case.dropout_p, case.causal, state)[0]

    def theirs() -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, mask, case.dropout_p, case.causal, enable_gqa=case.heads != case.kv_heads
        )

    return [q, k, v], dict.fromkeys(OURS, ours) | dict.fromkeys(PEERS, theirs)


def packed_calls(case: Case) -> tuple[list[Tensor], Calls]:
    lengths = torch.tensor([0, *varlen_lengths(case)])
    offsets = lengths.cumsum(0).to("cuda", torch.int32)
    total, longest = int(offsets[-1]), int(lengths.max())
    q, k, v = (
        torch.randn(total, heads, case.head_dim, device="cuda").to(case.dtype).requires_grad_()
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )

    def ours() -> Tensor:
        return flash_attn_varlen_func(
            q, k, v, offsets, offsets, longest, longest, causal=case.causal
        )

    def theirs() -> Tensor:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, offsets, offsets, longest, longest, 0.0, case.causal, False
        )[0]

    return [q, k, v], dict.fromkeys(OURS, ours) | {"sdpa_flash": theirs}


def calls_of(case: Case) -> dict[str, Calls]:
    """{"fwd": {variant: call}, "bwd": {variant: call}} of the variants that can do the case."""
    inputs, calls = packed_calls(case) if case.case == "varlen" else dense_calls(case)
    forward, backward = {}, {}
    if case.dtype == torch.float32 or torch.cuda.get_device_capability() < (9, 0):
        del calls["flash_sm80"]  # the same kernel as flash
    for name, call in calls.items():
        try:
            with pinned(name):
                out = call()
        except RuntimeError:  # torch's backend does not take the case
            continue
        forward[name] = call
        if case.backward and name != "flash_sm80":  # every backward kernel is the portable one
            backward[name] = gradient_call(out, inputs)
    return {"fwd": forward, "bwd": backward}


def gradient_call(out: Tensor, inputs: list[Tensor]) -> Callable[[], Any]:
    return partial(grad, out, inputs, torch.randn_like(out), retain_graph=True)


def row_of(case: Case, direction: str, calls: Calls) -> dict[str, Any]:
    facts = asdict(case) | {"pass": direction, "flops": case.flops(direction)}
    facts["dtype"] = str(case.dtype)[6:]
    with torch.no_grad() if direction == "fwd" else nullcontext():
        return facts | measure(calls)


def line_of(row: dict[str, Any]) -> str:
    shape = f"{row['batch']}x{row['heads']}:{row['kv_heads']} {row['seq_q']}x{row['seq_k']}"
    what = f"{row['case']:8}{row['pass']} {shape:20} d{row['head_dim']:<4}"
    what += f"{row['mask'] or ('causal' if row['causal'] else 'full'):7}"
    times = row["kernel_us"]
    rates = "".join(
        f"{row['flops'] / times[name] / 1e6:8.0f}" if name in times else f"{'-':>8}"
        for name in (*OURS, *PEERS)
    )
    peers = {name: times[name] for name in PEERS if name in times}
    if "flash" not in times or not peers:
        return what + rates
    best = min(peers, key=lambda name: peers[name])
    return f"{what}{rates}   {peers[best] / times['flash']:5.2f}x {best}"


def add_best(rows: list[dict[str, Any]], fa3_file: Path) -> None:
    """Gives rows of the grid the time of the fastest peer, FlashAttention-3 among them."""
    fa3 = json.loads(fa3_file.read_text())["rows"] if fa3_file.exists() else []
    key = itemgetter("case", "pass", "head_dim", "causal", "seq_q")
    times = {key(row): row["kernel_us"]["fa3"] for row in fa3}
    for row in rows:
        if key(row) in times:
            peers = [row["kernel_us"][name] for name in PEERS if name in row["kernel_us"]]
            row["kernel_us"] |= {"fa3": times[key(row)], "best": min([*peers, times[key(row)]])}


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Geometric means of the speed-up of ours over each peer, and the worst cell."""
    for case, direction, own, peer in product(
        dict.fromkeys(row["case"] for row in rows), ("fwd", "bwd"), OURS, (*PEERS, "fa3", "best")
    ):
        ratios = [
            row["kernel_us"][peer] / row["kernel_us"][own]
            for row in rows
            if (row["case"], row["pass"]) == (case, direction)
            and {own, peer} <= row["kernel_us"].keys()
        ]
        if ratios:
            yield (
                f"{case:8} {direction} {own:10} over {peer:15} geometric mean "
                f"{geometric_mean(ratios):5.2f}x, least {min(ratios):5.2f}x, {len(ratios)} cells"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="*", help="only these cases; nothing is written")
    parser.add_argument("--pass", dest="direction", choices=("fwd", "bwd"), help="only this pass")
    parser.add_argument("--quick", action="store_true", help="two lengths; nothing is written")
    options = parser.parse_args()
    titles = "".join(f"{name[-8:]:>8}" for name in (*OURS, *PEERS))
    print(f"{'TFLOP/s of kernel time':49}{titles}")
    whole = not (options.quick or options.case or options.direction)
    with Result("attention", "gpu", keep=whole) as result:
        for case in cases(options.quick):
            if options.case and case.case not in options.case:
                continue
            for direction, calls in calls_of(case).items():
                if calls and options.direction in (None, direction):
                    result.add(row_of(case, direction, calls))
                    print(line_of(result.rows[-1]), flush=True)
    rows = [row | {"kernel_us": dict(row["kernel_us"])} for row in result.rows]
    add_best(rows, result.path.with_name(result.path.name.replace("attention", "fa3")))
    print("\n".join(summary(rows)))
    if whole:
        print(result.path)


if __name__ == "__main__":
    main()
