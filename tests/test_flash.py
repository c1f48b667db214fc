"""The fused ops against fp64, forward and backward, over shapes, layouts, dtypes and options."""

from __future__ import annotations

import sys

import pytest
import torch
from problems import MASKS, SHAPES, make_mask, problem, rng_state
from reference import Problem, assert_accurate, baseline, reference

import attn_ext
from attn_ext import ops

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NAMES = ("grad_query", "grad_key", "grad_value", "grad_attn_mask")


def check(case: Problem, backward: bool = True) -> None:
    """Runs the fused op on the problem and compares every result with fp64."""
    inputs = [t.requires_grad_(backward) for t in case.inputs()]
    dtype, device = case.query.dtype, case.query.device
    if dtype == torch.float64 and device.type == "cuda":
        pytest.skip("fused attention on CUDA is float16, bfloat16 and float32; fp64 goes to math")
    out, logsumexp = ops.flash_attention_forward(
        case.query, case.key, case.value, case.attn_mask, case.dropout_p, case.is_causal,
        **case.options(),
    )  # fmt: skip
    grad_out = torch.randn_like(out) if backward else None
    truth, plain = reference(case, grad_out), baseline(case, grad_out)
    assert out.dtype == dtype
    assert_accurate(out, plain[0], truth[0], "out")
    # logsumexp is fp32 also for half inputs, whose scores are exact in fp32: an fp32 error is due.
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    assert logsumexp.dtype == exact
    fine = Problem(**{**case.__dict__, **{n: getattr(case, n).to(exact) for n in NAMES_QKV}})
    assert_accurate(logsumexp, baseline(fine)[1], truth[1], "logsumexp", ulps=8)
    if backward:
        grads = torch.autograd.grad(out, inputs, grad_out)
        for name, ours, simple, exact_grad, owner in zip(
            NAMES, grads, plain[2:], truth[2:], inputs, strict=False
        ):
            assert ours.dtype == owner.dtype
            assert_accurate(ours, simple, exact_grad, name, ulps=4)


NAMES_QKV = ("query", "key", "value")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device, shape, is_causal, dtype) -> None:
    check(problem(shape, dtype, device, is_causal=is_causal))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("layout", ["bshd", "odd", "transposed"])
def test_layouts(device, layout, dtype) -> None:
    check(problem((2, 4, 2, 67, 70, 64, 64), dtype, device, layout, is_causal=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(device, mask, dtype) -> None:
    check(problem((2, 4, 2, 75, 133, 64, 64), dtype, device, mask=mask))


BANDS = [
    {"window_size_left": 10, "window_size_right": 0},
    {"window_size_left": 0, "window_size_right": 20},
    {"window_size_left": 33, "window_size_right": 5, "bottom_right": True},
    {"is_causal": True, "bottom_right": True},
    {"is_causal": True, "window_size_left": 64},
    {"window_size_left": sys.maxsize, "window_size_right": sys.maxsize, "bottom_right": True},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("lengths", [(150, 150), (40, 200), (200, 40)], ids=str)
def test_bands(device, lengths, band, dtype) -> None:
    check(problem((1, 2, 1, *lengths, 64, 64), dtype, device, **band))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_softcap(device, dtype) -> None:
    check(problem((1, 2, 2, 70, 90, 64, 64), dtype, device, softcap=3.0, is_causal=True, scale=0.5))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_dropout(device, p, dtype) -> None:
    state = rng_state(device)
    check(problem((2, 2, 1, 70, 131, 64, 64), dtype, device, dropout_p=p, rng_state=state))


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.5])
def test_scale(device, scale) -> None:
    check(problem((1, 2, 2, 40, 50, 64, 64), torch.float32, device, scale=scale))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("rise", [12, 60, 3000])
def test_scores_that_rise(device, rise, head_dim, dtype) -> None:
    """Every second row's scores grow from the last key, where the Hopper kernel begins, to the
    first by `rise`: past what its reference allows, past what exp has in fp32, and far past."""
    case = problem((1, 2, 1, 300, 700, head_dim, head_dim), dtype, device)
    with torch.no_grad():
        case.query[..., 0] = head_dim**0.5
        case.query[:, :, ::2, 0] *= -1
        case.key[..., 0] = torch.linspace(-rise, 0, 700, device=device)
    check(case)


def test_everything_at_once(device) -> None:
    check(
        problem(
            (2, 6, 2, 93, 111, 48, 40), torch.bfloat16, device, "odd", mask="float_inf",
            window_size_left=40, window_size_right=30, softcap=5.0, dropout_p=0.2,
            rng_state=rng_state(device),
        )
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_rows_that_see_nothing(device, dtype) -> None:
    """Output and query gradient exactly 0, logsumexp -inf, no NaN anywhere."""
    case = problem((1, 1, 1, 8, 8, 16, 16), dtype, device)
    case.attn_mask = torch.ones(8, 8, dtype=torch.bool, device=device)
    case.attn_mask[4:] = False
    check(case)
    out, logsumexp = ops.flash_attention_forward(case.query, case.key, case.value, case.attn_mask)
    (grad,) = torch.autograd.grad(out.sum(), case.query)
    assert torch.equal(out[0, 0, 4:], torch.zeros_like(out[0, 0, 4:]))
    assert torch.equal(grad[0, 0, 4:], torch.zeros_like(grad[0, 0, 4:]))
    assert torch.all(logsumexp[0, 0, 4:] == -torch.inf)


def test_first_key_block_all_minus_infinity(device) -> None:
    """A float band mask: late rows see nothing in their first key blocks."""
    case = problem((1, 1, 1, 640, 640, 4, 4), torch.float32, device)
    offset = torch.arange(640)[:, None] - torch.arange(640)[None, :]
    band = (offset >= 0) & (offset < 10)
    case.attn_mask = torch.zeros(640, 640).masked_fill(~band, -torch.inf).to(device)
    check(case)


def test_single_key(device) -> None:
    """out = v and dv = grad_out exactly; dq and dk are 0 to rounding."""
    q, k, v = (3 * torch.randn(1, 1, 1, 16, dtype=torch.float16, device=device) for _ in range(3))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = ops.flash_attention_forward(q, k, v)[0]
    grad_out = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad_out)
    assert torch.equal(out, v) and torch.equal(dv, grad_out)
    assert dq.abs().max() < 1e-2 and dk.abs().max() < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_gradient_layouts(device, dtype) -> None:
    """Expanded and strided gradients give what contiguous ones give."""
    case = problem((2, 4, 2, 60, 60, 64, 64), dtype, device)
    inputs = [t.requires_grad_() for t in case.inputs()]
    out = ops.flash_attention_forward(case.query, case.key, case.value)[0]
    wide = torch.randn(2, 8, 60, 64, device=device).to(dtype)
    for grad_out in (torch.ones((), device=device, dtype=dtype).expand_as(out), wide[:, ::2]):
        ours = torch.autograd.grad(out, inputs, grad_out, retain_graph=True)
        same = torch.autograd.grad(out, inputs, grad_out.contiguous(), retain_graph=True)
        if device.type == "cpu":
            assert all(torch.equal(a, b) for a, b in zip(ours, same, strict=True))
        truth, plain = reference(case, grad_out), baseline(case, grad_out)
        for name, a, b, c in zip(NAMES, ours, plain[2:], truth[2:], strict=False):
            assert_accurate(a, b, c, name, ulps=4)


def test_only_what_is_asked_for(device) -> None:
    """Every subset of inputs that need a gradient; the mask's has the mask's own shape."""
    shape = (2, 2, 1, 30, 40, 64, 64)
    for wanted in range(1, 16):
        case = problem(shape, torch.float32, device, mask="float_head")
        inputs = case.inputs()
        chosen = [t for i, t in enumerate(inputs) if wanted >> i & 1]
        for tensor in chosen:
            tensor.requires_grad_()
        out = ops.flash_attention_forward(case.query, case.key, case.value, case.attn_mask)[0]
        grad_out = torch.randn_like(out)
        grads = iter(torch.autograd.grad(out, chosen, grad_out))
        truth, plain = reference(case, grad_out)[2:], baseline(case, grad_out)[2:]
        for i, name in enumerate(NAMES):
            if wanted >> i & 1:
                assert_accurate(next(grads), plain[i], truth[i], f"{name} of {wanted:04b}", ulps=4)


def test_mask_gradient_rows_sum_to_zero(device) -> None:
    q, k, v = (torch.randn(1, 1, 64, 16, device=device) for _ in range(3))
    mask = torch.randn(1, 1, 64, 64, device=device, requires_grad=True)
    out = ops.flash_attention_forward(q, k, v, mask)[0]
    (grad,) = torch.autograd.grad(out, mask, torch.randn_like(out))
    assert grad.sum(-1).abs().max() < 1e-5 and grad.abs().max() > 1e-3


@pytest.mark.parametrize("mask", [None, "float_head"], ids=["plain", "mask"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_same_bits_in_every_run(device, dtype, dim, mask) -> None:
    """Forward always; backward too where deterministic algorithms are asked for."""
    case = problem((2, 4, 2, 200, 300, dim, dim), dtype, device, mask=mask)
    inputs = [t.requires_grad_() for t in case.inputs()]
    grad_out = torch.randn(2, 4, 200, dim, device=device).to(dtype)
    first = None
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(20):
            out = ops.flash_attention_forward(case.query, case.key, case.value, case.attn_mask)[0]
            results = [out, *torch.autograd.grad(out, inputs, grad_out)]
            first = first or results
            assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_nan_stays_in_its_row(device) -> None:
    case = problem((1, 2, 2, 70, 80, 64, 64), torch.float32, device)
    clean = ops.flash_attention_forward(case.query, case.key, case.value)[0]
    case.query[0, 1, 13, 5] = torch.nan
    out = ops.flash_attention_forward(case.query, case.key, case.value)[0]
    assert out[0, 1, 13].isnan().all()
    clean[0, 1, 13] = out[0, 1, 13] = 0
    assert torch.equal(out, clean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_huge_and_tiny_values(device, dtype) -> None:
    """Scores of +-1e4 and rows that differ by orders of magnitude."""
    case = problem((1, 1, 1, 65, 66, 64, 64), dtype, device)
    case.query.mul_(torch.logspace(-6, 3, 65, device=device)[:, None].to(dtype))
    check(case, backward=False)


def test_outputs_follow_the_layout_of_inputs(device) -> None:
    for layout in ("bhsd", "bshd"):
        case = problem((2, 4, 2, 33, 44, 32, 16), torch.float32, device, layout)
        inputs = [t.requires_grad_() for t in case.inputs()]
        out = ops.flash_attention_forward(case.query, case.key, case.value)[0]
        heads_inside_rows = layout == "bshd"
        for tensor in (out, *torch.autograd.grad(out.sum(), inputs)):
            assert (tensor.stride(1) < tensor.stride(2)) == heads_inside_rows
            assert tensor.transpose(1, 2).is_contiguous() == heads_inside_rows
            assert tensor.is_contiguous() != heads_inside_rows


def test_no_square_matrix_in_memory() -> None:
    """At S = 8192 the scores would take 256 MB; the fused op allocates its outputs and no more."""
    q = torch.randn(1, 1, 8192, 16)
    with torch.profiler.profile(profile_memory=True) as profiler:
        ops.flash_attention_forward(q, q, q)
    events = profiler.profiler.kineto_results.events()
    sizes = [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]
    assert sizes and sum(sizes) <= 4 * q.numel() + 4 * 8192 + 4096


@pytest.mark.parametrize("isa", ["base", "avx2", "avx512"])
def test_isa_is_forced_by_environment(isa, run_python) -> None:
    done = run_python("import attn_ext; print(attn_ext.cpu_isa)", ATTN_EXT_ISA=isa)
    if done.returncode == 0:
        assert done.stdout.strip() == isa
    else:
        assert "ATTN_EXT_ISA: expected an instruction set that this CPU runs" in done.stderr
    assert isa != "base" or done.returncode == 0


def test_unknown_isa_is_an_error(run_python) -> None:
    done = run_python("import attn_ext", ATTN_EXT_ISA="sse9")
    assert done.returncode != 0 and "got sse9" in done.stderr


def test_dropout_repeats_under_manual_seed(device) -> None:
    q, k = torch.zeros(1, 2, 8, 16, device=device), torch.zeros(1, 2, 4096, 16, device=device)
    v = torch.ones_like(k)
    results = {}
    for backend in ("flash", "naive", "inplace"):
        torch.manual_seed(7)
        first = attn_ext.scaled_dot_product_attention(q, k, v, dropout_p=0.25, backend=backend)
        second = attn_ext.scaled_dot_product_attention(q, k, v, dropout_p=0.25, backend=backend)
        assert not torch.equal(first, second)
        results[backend] = first
    sigma = (0.25 / 0.75 / 4096) ** 0.5
    assert (results["flash"] - 1).abs().max() < 4.5 * sigma
    for backend in ("naive", "inplace"):
        torch.testing.assert_close(results[backend], results["flash"], rtol=1e-4, atol=1e-4)


def test_mask_shapes_of_make_mask_broadcast() -> None:
    shape = (2, 4, 2, 5, 6, 8, 8)
    for kind in MASKS:
        mask = make_mask(kind, shape, torch.float32, torch.device("cpu"))
        assert torch.broadcast_shapes(mask.shape, (2, 4, 5, 6)) == (2, 4, 5, 6)
