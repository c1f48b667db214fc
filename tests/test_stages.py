"""The stages of unfused attention and the two attentions made of them."""

from __future__ import annotations

import math

import pytest
import torch
from problems import MASKS, SHAPES, problem, rng_state
from reference import Problem, assert_accurate, baseline, dropout_keep, reference
from torch import Tensor

import attn_ext
from attn_ext import ops

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPE_IDS = {"argvalues": DTYPES, "ids": lambda d: str(d)[6:]}
SIZES = [
    (2, 3, 5, 7),
    (1, 1, 1, 1),
    (3, 2, 65, 1024),
    (2, 1, 3, 1000),
    (4, 129),
    (9,),
    (2, 2, 3, 9001),
]
STAGED = (ops.naive_attention, ops.inplace_attention)


def scores_of(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return (3 * torch.randn(size, device=device)).to(dtype)


@pytest.mark.parametrize("dtype", **DTYPE_IDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_scale(device, size, dtype) -> None:
    scores = scores_of(size, dtype, device)
    ours = ops.scale(scores, 0.3)
    assert_accurate(ours, scores * 0.3, scores.double() * 0.3, "scale")
    assert torch.equal(ops.scale(scores, 2.0), scores * 2)


@pytest.mark.parametrize("dtype", **DTYPE_IDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_softmax_and_its_backward(device, size, dtype) -> None:
    scores = scores_of(size, dtype, device)
    if scores.dim() > 1:
        scores[0] = torch.where(torch.rand_like(scores[0]) > 0.5, scores[0], -math.inf)
    truth = torch.softmax(scores.double(), -1).nan_to_num(0.0)
    ours = ops.softmax(scores)
    assert_accurate(ours, torch.softmax(scores, -1).nan_to_num(0.0), truth, "softmax")
    grad = torch.randn(size, device=device).to(dtype)
    probs = ours.double()
    exact = probs * (grad.double() - (probs * grad.double()).sum(-1, keepdim=True))
    plain = ours * (grad - (ours * grad).sum(-1, keepdim=True))
    assert_accurate(ops.softmax_backward(grad, ours), plain, exact, "softmax_backward")


@pytest.mark.parametrize("dtype", **DTYPE_IDS)
def test_softmax_special_rows(device, dtype) -> None:
    """All -inf gives 0, a NaN gives NaN in its row alone, huge values do not overflow."""
    scores = torch.zeros(4, 100, device=device, dtype=dtype)
    scores[0] = -math.inf
    scores[1, 50] = math.nan
    scores[2] = torch.finfo(dtype).min
    scores[3, 0] = torch.finfo(dtype).max
    out = ops.softmax(scores)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert out[1].isnan().all()
    torch.testing.assert_close(out[2], torch.full_like(out[2], 0.01))
    assert out[3, 0] == 1 and torch.equal(out[3, 1:], torch.zeros_like(out[3, 1:]))


FILLS = {
    "same": lambda b, h, r, c: (b, h, r, c),
    "rows_cols": lambda b, h, r, c: (r, c),
    "batch_keys": lambda b, h, r, c: (b, 1, 1, c),
    "rows": lambda b, h, r, c: (1, h, r, 1),
    "one": lambda b, h, r, c: (1,),
}


@pytest.mark.parametrize("dtype", **DTYPE_IDS)
@pytest.mark.parametrize("kind", FILLS)
@pytest.mark.parametrize("cols", [1, 64, 77, 1024])
def test_masked_fill(device, cols, kind, dtype) -> None:
    scores = scores_of((2, 3, 50, cols), dtype, device)
    mask = torch.rand(FILLS[kind](*scores.shape), device=device) > 0.5
    strided = torch.zeros(*mask.shape, 2, dtype=torch.bool, device=device)
    strided[..., 0] = mask
    for view in (mask, strided[..., 0], mask.expand_as(scores)):
        expected = scores.masked_fill(view, -math.inf)
        assert torch.equal(ops.masked_fill(scores, view, -math.inf), expected)
        target = scores.clone()
        ops.masked_fill_(target, view, -math.inf)
        assert torch.equal(target, expected)


@pytest.mark.parametrize("dtype", **DTYPE_IDS)
@pytest.mark.parametrize("size", [(2, 2, 40, 40), (1, 3, 70, 33), (2, 1, 9, 130)], ids=str)
def test_causal_fill(device, size, dtype) -> None:
    scores = scores_of(size, dtype, device)
    future = torch.ones(size[2:], dtype=torch.bool, device=device).triu(1)
    assert torch.equal(
        ops.masked_fill(scores, None, -1.5, is_causal=True), scores.masked_fill(future, -1.5)
    )
    keys = torch.rand(size[0], 1, 1, size[3], device=device) > 0.5
    ours = ops.masked_fill(scores, keys, 0.0, is_causal=True)
    assert torch.equal(ours, scores.masked_fill(future | keys, 0.0))


def test_fill_in_place_writes_through_every_layout(device) -> None:
    """The last stride is not 1, rows start at odd addresses; nothing around the view changes."""
    for make in (lambda s: s.transpose(-1, -2), lambda s: s[..., 1:40], lambda s: s[:, ::2, 3:]):
        store = torch.randn(2, 4, 50, 50, device=device)
        untouched, view = store.clone(), make(store)
        mask = torch.rand(view.shape, device=device) > 0.5
        ops.masked_fill_(view, mask, 7.0)
        make(untouched).masked_fill_(mask, 7.0)
        assert torch.equal(store, untouched)


@pytest.mark.parametrize("dtype", **DTYPE_IDS)
def test_dropout(device, dtype) -> None:
    probs = torch.rand(2, 3, 17, 133, device=device).to(dtype)
    state = rng_state(device)
    keep = dropout_keep(state, 0.3, probs.shape).to(device)
    ours = ops.dropout(probs, 0.3, state)
    assert_accurate(ours, probs * keep / 0.7, probs.double() * keep / 0.7, "dropout")
    assert torch.equal(ours != 0, keep & (probs != 0))
    assert torch.equal(ops.dropout(probs, 1.0, state), torch.zeros_like(probs))
    assert torch.equal(ops.dropout(probs, 0.0, state), probs)


def check(case: Problem) -> None:
    inputs = [t.requires_grad_() for t in case.inputs()]
    for op in STAGED:
        out, weights = op(
            case.query, case.key, case.value, case.attn_mask, case.dropout_p, case.is_causal,
            scale=case.scale, rng_state=case.rng_state,
        )  # fmt: skip
        grad_out = torch.randn_like(out)
        truth, plain = reference(case, grad_out), baseline(case, grad_out)
        assert weights.shape == (*out.shape[:3], case.key.shape[2])
        assert_accurate(out, plain[0], truth[0], f"{op} out")
        grads = torch.autograd.grad(out, inputs, grad_out)
        for index, ours in enumerate(grads):
            what = f"{op} gradient of input {index}"
            assert_accurate(ours, plain[2 + index], truth[2 + index], what, ulps=4)


@pytest.mark.parametrize("dtype", **DTYPE_IDS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_staged_shapes(device, shape, is_causal, dtype) -> None:
    check(problem(shape, dtype, device, is_causal=is_causal))


@pytest.mark.parametrize("mask", MASKS)
def test_staged_masks(device, mask) -> None:
    check(problem((2, 4, 2, 75, 133, 64, 64), torch.float32, device, mask=mask))
    check(problem((2, 4, 4, 75, 133, 64, 64), torch.bfloat16, device, mask=mask))


@pytest.mark.parametrize("layout", ["bshd", "odd", "transposed"])
def test_staged_layouts(device, layout) -> None:
    check(problem((2, 4, 2, 67, 70, 64, 64), torch.float32, device, layout, is_causal=True))


def test_staged_dropout_and_scale(device) -> None:
    state = rng_state(device)
    shape = (2, 4, 2, 40, 70, 32, 32)
    check(problem(shape, torch.float32, device, dropout_p=0.3, rng_state=state, scale=-0.7))
    check(problem(shape, torch.float32, device, dropout_p=1.0, rng_state=state))


def test_head_size_above_256(device) -> None:
    """What the fused kernels leave out, the stages take."""
    check(problem((1, 2, 2, 20, 30, 300, 270), torch.float32, device, is_causal=True))


def test_gradients_of_stages(device) -> None:
    """First and second derivatives by finite differences, in fp64."""
    scores = torch.randn(2, 2, 4, 5, dtype=torch.float64, device=device, requires_grad=True)
    mask = torch.rand(4, 5, device=device) > 0.6
    state = rng_state(device)
    stages = [
        lambda s: ops.scale(s, 0.7),
        lambda s: ops.masked_fill(s, mask, 0.5, is_causal=True),
        ops.softmax,
        lambda s: ops.dropout(s, 0.4, state),
    ]
    for stage in stages:
        assert torch.autograd.gradcheck(stage, scores)
        assert torch.autograd.gradgradcheck(stage, scores)


def test_second_derivatives_of_staged_attention(device) -> None:
    size = {"dtype": torch.float64, "device": device, "requires_grad": True}
    q, k, v = torch.randn(1, 4, 3, 5, **size), torch.randn(1, 2, 4, 5, **size), None
    v = torch.randn(1, 2, 4, 6, **size)
    mask = torch.randn(3, 4, **size)
    for op in STAGED:
        assert torch.autograd.gradcheck(lambda *a, op=op: op(*a)[0], (q, k, v, mask))
        assert torch.autograd.gradgradcheck(lambda *a, op=op: op(*a)[0], (q, k, v, mask))
        assert torch.autograd.gradcheck(lambda *a, op=op: op(*a)[1], (q, k, v))


def test_gradient_of_the_fill_in_place(device) -> None:
    """In training the in-place fill passes no gradient where it wrote, and a leaf is refused."""
    leaf = torch.randn(2, 2, 6, 6, device=device, requires_grad=True)
    scores = leaf * 2
    ops.masked_fill_(scores, None, 1.0, is_causal=True)
    (grad,) = torch.autograd.grad(scores.sum(), leaf)
    assert torch.equal(grad, torch.full_like(grad, 2).tril())
    with pytest.raises(RuntimeError, match="leaf"):
        ops.masked_fill_(leaf, None, 1.0, is_causal=True)
    with torch.no_grad():
        ops.masked_fill_(leaf, None, 1.0, is_causal=True)
    assert (leaf[0, 0, 0, 1:] == 1).all()


def test_trace_nests_the_stages(device) -> None:
    """The out-of-place form shows the clone; the in-place form does not have it."""
    q = torch.randn(1, 2, 16, 8, device=device)
    for backend, clones in (("naive", 1), ("inplace", 0)):
        with torch.profiler.profile() as profiler:
            attn_ext.scaled_dot_product_attention(q, q, q, is_causal=True, backend=backend)
        (root,) = [e for e in profiler.events() if e.name == f"attn_ext::{backend}_attention"]
        children = [child.name for child in root.cpu_children]
        fill = "attn_ext::masked_fill" if clones else "attn_ext::masked_fill_"
        assert children.count("aten::matmul") == 2
        for stage in ("attn_ext::scale", fill, "attn_ext::softmax"):
            assert children.count(stage) == 1
        below = [e.name for e in profiler.events()]
        assert below.count("aten::clone") == clones
