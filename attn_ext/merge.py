"""Attention over keys that lie in several places, as ring attention computes it: piece by piece."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_attention(
    out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor
) -> tuple[Tensor, Tensor]:
    """What attention over both sets of keys gives, from what it gave over each.

    out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2 with lse = ln(exp(lse1) + exp(lse2)). A row
    that saw no key on a side has lse = -inf there, and that side counts nothing; on both sides, 0.

    Args:
        out1, out2: [..., S, Dv], of one shape and dtype.
        lse1, lse2: [..., S], float32 or float64: the natural logarithm of the sum of exp(score),
            as flash_attn_func(..., return_attn_probs=True) and the ops of attn_ext return it.

    Returns:
        (out, lse), of the shapes and dtypes that came.

    Raises:
        RuntimeError: shapes or dtypes that do not fit; an out with a gradient whose lse has none.
            The fused ops give no gradient to lse, and without it that of a merge would be wrong:
            ring attention calls the backward op itself, with the merged out and lse.

    Source: Liu et al., "Ring Attention with Blockwise Transformers", 2023.
    """
    for name, lse in (("lse1", lse1), ("lse2", lse2)):
        if lse.shape != out1.shape[:-1] or lse.dtype not in (torch.float32, torch.float64):
            raise RuntimeError(
                f"{name}: expected float32 or float64 {list(out1.shape[:-1])}, got {lse.dtype} "
                f"{list(lse.shape)}"
            )
    if out1.shape != out2.shape or out1.dtype != out2.dtype:
        raise RuntimeError(
            f"out2: expected {out1.dtype} {list(out1.shape)} as out1, got {out2.dtype} "
            f"{list(out2.shape)}"
        )
    for name, out, lse in (("lse1", out1, lse1), ("lse2", out2, lse2)):
        if torch.is_grad_enabled() and out.requires_grad and not lse.requires_grad:
            raise RuntimeError(
                f"{name}: expected one with a gradient, as its out has; fused attention gives "
                "logsumexp none. Merge under torch.no_grad() and call the backward op on the result"
            )
    lse = torch.logaddexp(lse1, lse2)
    dead = lse == -torch.inf
    whole = lse.masked_fill(dead, 0.0)
    parts = (
        out.to(lse.dtype) * torch.exp(part - whole).unsqueeze(-1)
        for out, part in ((out1, lse1), (out2, lse2))
    )
    return sum(parts, torch.zeros((), dtype=lse.dtype, device=lse.device)).to(out1.dtype), lse
