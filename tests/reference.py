"""The truth that tests compare with: attention by its formula, in fp64, in plain torch.

Rule of every comparison: the error of ours against fp64 is at most twice the error that the same
formula makes in the tensors' own dtype, plus a rounding floor. NaN never passes. The floor is some
units in the last place of the result's largest number or, where a sum cancels, of its terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

EPS = {
    torch.float64: 2.0**-52,
    torch.float32: 2.0**-23,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
}


@dataclass
class Problem:
    """One attention problem: operands and options as the fused op takes them."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    window_size_left: int | None = None
    window_size_right: int | None = None
    bottom_right: bool = False
    softcap: float = 0.0
    dropout_p: float = 0.0
    rng_state: Tensor | None = None

    def inputs(self) -> list[Tensor]:
        tensors = [self.query, self.key, self.value]
        if self.attn_mask is not None and self.attn_mask.is_floating_point():
            tensors.append(self.attn_mask)
        return tensors

    def options(self) -> dict:
        """Keyword arguments of the fused op."""
        names = ("scale", "window_size_left", "window_size_right", "bottom_right", "softcap")
        return {name: getattr(self, name) for name in names} | {"rng_state": self.rng_state}

    def visible(self) -> Tensor:
        """[Sq, Sk] bool: the pairs inside the band."""
        seq_q, seq_k = self.query.shape[2], self.key.shape[2]
        device = self.query.device
        rows = torch.arange(seq_q, device=device)[:, None]
        offset = torch.arange(seq_k, device=device)[None, :] - rows
        if self.bottom_right:
            offset = offset - (seq_k - seq_q)
        left, right = self.window_size_left, self.window_size_right
        seen = torch.ones(seq_q, seq_k, dtype=torch.bool, device=device)
        if left is not None and left >= 0:
            seen &= offset >= -left
        if self.is_causal:
            right = 0
        if right is not None and right >= 0:
            seen &= offset <= right
        return seen


class Exact(NamedTuple):
    """A result in fp64, and the size of the terms that it is a sum of."""

    value: Tensor
    terms: float = 0.0


def attend(problem: Problem, inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(out, logsumexp, weights before dropout) of these operands by the formula, in their dtype."""
    query, key, value, *bias = inputs
    group = query.shape[1] // key.shape[1] if key.shape[1] else 1
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scale = problem.scale
    if scale is None:
        scale = 1 / math.sqrt(query.shape[3]) if query.shape[3] else 1.0
    scores = query @ key.transpose(2, 3) * scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if bias:
        scores = scores + bias[0].to(scores.dtype)
    seen = problem.visible()
    if problem.attn_mask is not None and problem.attn_mask.dtype == torch.bool:
        seen = seen & problem.attn_mask
    scores = scores.masked_fill(~seen, -math.inf)
    logsumexp = torch.logsumexp(scores, dim=-1)
    alive = torch.isfinite(scores).any(dim=-1, keepdim=True) if scores.shape[-1] else None
    if alive is None:
        nothing = (query.sum() + key.sum() + value.sum()) * 0
        out = nothing + query.new_zeros(*query.shape[:3], value.shape[3])
        return out, logsumexp, scores
    has_nan = scores.isnan().any(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~(alive | has_nan), 0.0), dim=-1)
    weights = weights.masked_fill(~(alive | has_nan), 0.0)
    kept = weights
    if problem.dropout_p:
        keep = dropout_keep(problem.rng_state, problem.dropout_p, weights.shape)
        factor = 1 / (1 - problem.dropout_p) if problem.dropout_p < 1 else 0.0
        kept = weights * keep.to(weights.device) * factor
    return kept @ value, logsumexp, weights


def reference(problem: Problem, grad_out: Tensor | None = None) -> list[Exact]:
    """[out, logsumexp, *gradients of inputs()] in fp64."""
    results, weights, grad_weights = _evaluate(problem, torch.float64, grad_out)
    if grad_out is None:
        return [Exact(value) for value in results]
    scale = problem.scale if problem.scale is not None else problem.query.shape[3] ** -0.5
    grad_score = _size(weights * grad_weights)  # a term of the gradient of a score
    terms = [
        0.0,
        0.0,
        abs(scale) * grad_score * _size(problem.key),
        abs(scale) * grad_score * _size(problem.query),
        _size(weights) * _size(grad_out),
        grad_score,
    ]
    return [Exact(value, size) for value, size in zip(results, terms, strict=False)]


def baseline(problem: Problem, grad_out: Tensor | None = None) -> list[Tensor]:
    """The same by plain torch in the dtype of query: the error that a careful user gets."""
    return _evaluate(problem, problem.query.dtype, grad_out)[0]


def _evaluate(
    problem: Problem, dtype: torch.dtype, grad_out: Tensor | None
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The results, the weights and, with gradients, theirs."""
    inputs = [t.detach().to(dtype).requires_grad_(grad_out is not None) for t in problem.inputs()]
    out, logsumexp, weights = attend(problem, inputs)
    results = [out.detach(), logsumexp.detach()]
    if grad_out is None:
        return results, weights, weights
    found = torch.autograd.grad(out, [*inputs, weights], grad_out.to(dtype), allow_unused=True)
    grads = [
        torch.zeros_like(t) if g is None else g
        for g, t in zip(found, [*inputs, weights], strict=True)
    ]
    return [*results, *grads[:-1]], weights.detach(), grads[-1]


def _size(tensor: Tensor) -> float:
    """The largest finite number."""
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def assert_accurate(
    ours: Tensor, plain: Tensor, truth: Exact | Tensor, what: str, ulps: float = 1
) -> None:
    """The rule above, on the largest error. `ulps` times the dtype's epsilon is the floor."""
    truth, terms = truth if isinstance(truth, Exact) else Exact(truth)
    assert ours.shape == truth.shape, f"{what}: shape {list(ours.shape)}, not {list(truth.shape)}"
    same_inf = (ours.double() == truth) & truth.isinf()
    difference = torch.where(same_inf, 0.0, (ours.double() - truth).abs())
    plain_difference = torch.where(truth.isinf(), 0.0, (plain.double() - truth).abs())
    size = max(_size(truth), terms)
    if ours.dtype == torch.float64:  # the truth is rounded like ours
        ulps *= 64
    if ours.dtype == torch.float32:  # accumulated in the same precision: the order of a sum shows
        ulps *= 8
    floor = ulps * EPS[ours.dtype] * size
    if not difference.numel():
        return
    error, allowed = difference.max().item(), 2 * plain_difference.max().item() + floor
    at = np.unravel_index(int(difference.nan_to_num(math.inf).argmax()), truth.shape)
    assert error <= allowed, f"{what}: error {error:.3e} at {at}, allowed {allowed:.3e}"


def dropout_keep(rng_state: Tensor, p: float, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """[B, H, Sq, Sk] bool: the pairs that csrc/dropout.h keeps; Philox written anew in numpy."""
    batch, heads, rows, cols = shape
    seed, offset = (int(word) & (2**64 - 1) for word in rng_state.tolist())
    col = np.arange(cols, dtype=np.uint64)
    group, index = col // 32 * 4 + col % 8 // 2, col % 32 // 8 * 2 + col % 2
    low = np.uint64(0xFFFFFFFF)
    counter = [
        np.broadcast_to(group, (batch * heads, rows, cols)),
        np.broadcast_to(np.arange(rows, dtype=np.uint64)[:, None], (batch * heads, rows, cols)),
        np.broadcast_to(
            np.arange(batch * heads, dtype=np.uint64)[:, None, None], (batch * heads, rows, cols)
        ),
        np.full((batch * heads, rows, cols), (offset ^ offset >> 32) & 0xFFFFFFFF, np.uint64),
    ]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        left = counter[0] * np.uint64(0xD2511F53)
        right = counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            (right >> np.uint64(32)) ^ counter[1] ^ np.uint64(key[0]),
            right & low,
            (left >> np.uint64(32)) ^ counter[3] ^ np.uint64(key[1]),
            left & low,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    word = np.choose((index // 2).astype(np.int64), counter)
    number = word >> (index % 2 * np.uint64(16)) & np.uint64(0xFFFF)
    keep = number >= np.uint64(int(p * 65536 + 0.5))
    return torch.from_numpy(keep.reshape(batch, heads, rows, cols))
