"""Arguments drawn at random, legal and not, give what F.scaled_dot_product_attention gives.

torch's math backend in fp64 is the truth, in the call's own dtype the error that is allowed twice
(reference.py), and where it refuses, ours must raise an exception of the same class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from reference import Exact, assert_accurate
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_ext

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
BACKENDS = ("naive", "inplace", "flash", "auto")
NAMES = ("query", "key", "value", "attn_mask")


@dataclass
class Call:
    """The arguments of one call: sizes first, tensors made from them on a device."""

    shapes: list[tuple[int, ...]]
    layouts: list[str]
    dtype: torch.dtype
    mask: tuple[str, tuple[int, ...]] | None
    needs: list[bool]  # a gradient: query, key, value, attn_mask
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self, device: torch.device) -> list[Tensor]:
        made = [
            laid_out(shape, layout, self.dtype, device)
            for shape, layout in zip(self.shapes, self.layouts, strict=True)
        ]
        if self.mask is not None:
            kind, shape = self.mask
            mask = torch.randn(shape, device=device)
            made.append(mask > -0.5 if kind == "bool" else mask.to(self.dtype))
        return [
            tensor.requires_grad_(need and tensor.is_floating_point())
            for tensor, need in zip(made, self.needs, strict=False)
        ]


def laid_out(
    shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Random normal numbers with strides of that kind."""
    if layout == "transposed":
        made = torch.randn(*shape[:-2], shape[-1], shape[-2], device=device).transpose(-1, -2)
    elif layout == "sliced":
        made = torch.randn(*shape[:-1], shape[-1] + 3, device=device)[..., 1 : shape[-1] + 1]
    elif layout == "expanded":
        made = torch.randn(1, *shape[1:], device=device).expand(shape)
    else:
        made = torch.randn(shape, device=device)
    return made.to(dtype).detach() if layout != "expanded" else made.to(dtype)[:1].expand(shape)


LENGTHS = st.one_of(st.integers(0, 5), st.integers(6, 40), st.sampled_from([63, 64, 65, 130]))
SIZES = st.one_of(st.integers(1, 24), st.sampled_from([0, 32, 40, 64, 80]))


@st.composite
def calls(draw: st.DrawFn) -> Call:
    rank = draw(st.sampled_from([2, 3, 4, 4, 4, 5]))
    seq_q, seq_k, dim = draw(LENGTHS), draw(LENGTHS), draw(SIZES)
    dim_v = draw(st.one_of(st.just(dim), SIZES))
    leading = tuple(draw(st.sampled_from([1, 2, 3, 4, 0])) for _ in range(rank - 2))
    kv_leading, options = leading, {}
    if rank == 4 and draw(st.booleans()):
        group = draw(st.integers(1, 3))
        kv_leading = (leading[0], max(leading[1], 1))
        leading = (leading[0], kv_leading[1] * group + draw(st.sampled_from([0, 0, 0, 1])))
        options["enable_gqa"] = draw(st.sampled_from([True, True, True, False]))
    elif draw(st.integers(0, 3)) == 0:  # axes that broadcast
        kv_leading = tuple(1 if draw(st.booleans()) else size for size in leading)
    shapes = [
        (*leading, seq_q, dim),
        (*kv_leading, seq_k, draw(st.sampled_from([dim] * 15 + [dim + 1]))),
        (*kv_leading, seq_k, dim_v),
    ]
    mask = None
    if draw(st.booleans()):
        full = (*leading, seq_q, seq_k)
        full = full[draw(st.integers(0, rank - 2)) :]
        shape = tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in full)
        mask = (draw(st.sampled_from(["bool", "float"])), shape)
    if draw(st.booleans()) and (mask is None or draw(st.integers(0, 9)) == 0):
        options["is_causal"] = True
    options["scale"] = draw(st.sampled_from([None, None, 0.3, 0.0, -0.7, 2.0]))
    options["dropout_p"] = draw(st.sampled_from([0.0] * 30 + [1.1]))
    return Call(
        shapes=shapes,
        layouts=[draw(st.sampled_from(["plain", "plain", "transposed", "sliced", "expanded"]))
                 for _ in range(3)],
        dtype=draw(st.sampled_from(DTYPES)),
        mask=mask,
        needs=[draw(st.booleans()) for _ in range(4)],
        options=options,
    )  # fmt: skip


def results(
    call: Call,
    inputs: list[Tensor],
    dtype: torch.dtype,
    grad_out: Tensor,
    by: Callable[..., Tensor],
) -> list[Tensor]:
    """[out, *gradients] in a dtype."""
    made = [
        t.detach().to(dtype if t.is_floating_point() else t.dtype).requires_grad_(t.requires_grad)
        for t in inputs
    ]
    out = by(*made, **call.options)
    return [out.detach(), *gradients(out, made, grad_out)]


def math_sdpa(*args: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **options)


def stages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The formula step by step, each rounded to the dtype: torch's math keeps 16 bits in fp32."""
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        group = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(group, -3) for t in (key, value))
    scale = (query.shape[-1] or 1) ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-1, -2) * scale
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0) @ value


def gradients(out: Tensor, inputs: list[Tensor], grad_out: Tensor) -> list[Tensor]:
    """Of the inputs that want one; 0 where out does not depend on it."""
    wanted = [t for t in inputs if t.requires_grad]
    if not out.requires_grad:
        return [torch.zeros_like(t) for t in wanted]
    grads = torch.autograd.grad(out, wanted, grad_out.to(out.dtype), allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, wanted, strict=True)]


def compare(device: torch.device, call: Call, backend: str) -> None:
    if backend == "flash" and device.type == "cuda":
        assume(call.dtype != torch.float64)  # refused: fp64 goes to math
    torch.manual_seed(0)
    inputs = call.tensors(device)

    def ours(*args: Tensor, **options: Any) -> Tensor:
        return attn_ext.scaled_dot_product_attention(*args, **options, backend=backend)

    try:
        expected = math_sdpa(*inputs, **call.options)
    except Exception as refusal:
        note(f"torch: {refusal}")
        with pytest.raises(type(refusal)):
            ours(*inputs, **call.options)
        return
    try:
        out = ours(*inputs, **call.options)
    except RuntimeError:
        # torch does not look at arguments where there is nothing to compute.
        if (
            expected.numel()
            and inputs[1].numel()
            and not (backend == "auto" and refuses(call, inputs))
        ):
            raise
        return
    assert out.shape == expected.shape and out.dtype == expected.dtype
    assert out.requires_grad or not expected.requires_grad
    grad_out = torch.randn_like(out)
    truth = results(call, inputs, torch.float64, grad_out, math_sdpa)
    simple = stages if backend in ("naive", "inplace") else math_sdpa
    plain = results(call, inputs, call.dtype, grad_out, simple)
    found = [out.detach(), *gradients(out, inputs, grad_out)]
    names = [name for name, t in zip(NAMES, inputs, strict=False) if t.requires_grad]
    for what, mine, other, exact in zip(["out", *names], found, plain, truth, strict=True):
        # A gradient is a sum that may cancel: its terms are at most of this size.
        terms = 0.0 if what == "out" else size_of_terms(inputs, grad_out)
        assert_accurate(mine, other, Exact(exact, terms), what, ulps=4)


def refuses(call: Call, inputs: list[Tensor]) -> bool:
    """Whether torch's own choice, to which "auto" leaves a call, ends in an error."""
    try:
        F.scaled_dot_product_attention(*inputs, **call.options)
    except RuntimeError:
        return True
    return False


def size_of_terms(inputs: list[Tensor], grad_out: Tensor) -> float:
    largest = [t.abs().max().item() for t in (*inputs[:3], grad_out) if t.numel()]
    return max(largest, default=0.0) ** 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_call(device, backend) -> None:
    @settings(
        max_examples=1000, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(call=calls())
    def run(call: Call) -> None:
        compare(device, call, backend)

    run()
