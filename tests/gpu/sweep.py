"""One small call of every kernel instance, forward and backward, for compute-sanitizer to watch.

make sanitize-gpu runs it under each of the sanitizer's tools. Shapes end within a tile, so that
every bound is at work; the results are other tests' business.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from attn_ext import dropout_state, flash_attn_varlen_func, ops

HALVES = (torch.float16, torch.bfloat16)
DIMS = (32, 64, 96, 128, 192, 256)
SEQ_Q, SEQ_K = 150, 210


def operands(dtype: torch.dtype, dim: int, seq_q: int = SEQ_Q) -> list[torch.Tensor]:
    sizes = ((1, 2, seq_q, dim), (1, 1, SEQ_K, dim), (1, 1, SEQ_K, dim))
    return [torch.randn(size, device="cuda").to(dtype).requires_grad_() for size in sizes]


def both_passes(out: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    torch.autograd.grad(out, inputs, torch.randn_like(out))


def plain(dtype: torch.dtype, dim: int) -> None:
    inputs = operands(dtype, dim)
    both_passes(ops.flash_attention_forward(*inputs, None, 0.0, True)[0], inputs)


def general(dtype: torch.dtype, dim: int) -> None:
    """Mask with a gradient, soft cap, dropout, a band, unaligned rows: all that is not plain."""
    inputs = operands(dtype, dim)
    mask = torch.randn(1, 2, SEQ_Q, SEQ_K, device="cuda").to(dtype).requires_grad_()
    shifted = [torch.nn.functional.pad(t, (1, 0))[..., 1:] for t in inputs]
    out = ops.flash_attention_forward(
        *shifted, mask, 0.1, False, dropout_state("cuda"), softcap=5.0, window_size_left=100,
        window_size_right=60, bottom_right=True,
    )[0]  # fmt: skip
    both_passes(out, [*inputs, mask])


def deterministic(dtype: torch.dtype, dim: int) -> None:
    torch.use_deterministic_algorithms(True)
    plain(dtype, dim)
    torch.use_deterministic_algorithms(False)


def split(dtype: torch.dtype, dim: int) -> None:
    """Few queries, for which the keys are split."""
    with torch.no_grad():
        ops.flash_attention_forward(*operands(dtype, dim, seq_q=3))


def packed(dtype: torch.dtype, dim: int) -> None:
    offsets = torch.tensor([0, 70, 70, SEQ_Q], dtype=torch.int32, device="cuda")
    inputs = [
        torch.randn(SEQ_Q, heads, dim, device="cuda").to(dtype).requires_grad_()
        for heads in (2, 1, 1)
    ]
    out = flash_attn_varlen_func(*inputs, offsets, offsets, 80, 80, causal=True)
    both_passes(out, inputs)


def stages(dtype: torch.dtype) -> None:
    scores = torch.randn(2, 3, 33, 1025, device="cuda").to(dtype)
    mask = torch.rand(33, 1025, device="cuda") > 0.5
    state = dropout_state("cuda")
    for size in (1025, 1024, 9001):
        rows = torch.randn(17, size, device="cuda").to(dtype)
        ops.softmax_backward(rows, ops.softmax(rows))
    ops.scale(scores, 0.5)
    ops.dropout(scores, 0.1, state)
    for is_causal in (False, True):
        ops.masked_fill_(scores, None if is_causal else mask, 0.0, is_causal=is_causal)


def main() -> None:
    calls: list[tuple[Callable[..., None], tuple]] = []
    for dtype in (*HALVES, torch.float32):
        calls.append((stages, (dtype,)))
        for dim in DIMS if dtype in HALVES else (32, 64, 128, 256):
            calls += [(call, (dtype, dim)) for call in (plain, general, deterministic, packed)]
        calls.append((split, (dtype, 128)))
    for newest in ("", "80"):  # the GPU's own kernels, then the portable ones
        os.environ["ATTN_EXT_SM"] = newest
        for call, args in calls:
            call(*args)
            torch.cuda.synchronize()
        print(f"{len(calls)} calls with ATTN_EXT_SM={newest or 'unset'}", flush=True)


if __name__ == "__main__":
    main()
