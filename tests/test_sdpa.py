"""attn_ext.scaled_dot_product_attention has the meaning of F.scaled_dot_product_attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_ext

OWN = ("naive", "inplace", "flash")
TORCH = ("math", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn")
sdpa = attn_ext.scaled_dot_product_attention


def math_sdpa(*args, **kwargs):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


@pytest.mark.parametrize("backend", OWN)
@pytest.mark.parametrize("lengths", [(3, 4), (1, 16), (4, 2)], ids=str)
def test_causal_is_top_left(device, lengths, backend) -> None:
    seq_q, seq_k = lengths
    q, k = torch.zeros(1, 1, seq_q, 4, device=device), torch.zeros(1, 1, seq_k, 4, device=device)
    v = torch.arange(1.0, seq_k + 1, device=device)[None, None, :, None]
    expected = {(3, 4): [1, 1.5, 2], (1, 16): [1], (4, 2): [1, 1.5, 1.5, 1.5]}[lengths]
    out = sdpa(q, k, v, is_causal=True, backend=backend)
    torch.testing.assert_close(out[0, 0, :, 0].cpu(), torch.tensor(expected).float())
    with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set when is_causal"):
        sdpa(q, k, v, torch.ones(seq_q, seq_k, dtype=torch.bool, device=device), is_causal=True,
             backend=backend)  # fmt: skip


@pytest.mark.parametrize("backend", OWN)
@pytest.mark.parametrize(
    "sizes", [(0, 4, 10, 10, 64), (2, 4, 0, 10, 64), (2, 4, 10, 10, 0), (0, 0, 0, 0, 0),
              (2, 4, 5, 0, 64), (2, 4, 0, 0, 8)], ids=str,
)  # fmt: skip
def test_empty_axes(device, sizes, backend) -> None:
    """Zeros of value's head size, and gradients of the inputs' shapes, as torch gives."""
    batch, heads, seq_q, seq_k, dim = sizes
    q = torch.randn(batch, heads, seq_q, dim, device=device, requires_grad=True)
    k = torch.randn(batch, heads, seq_k, dim, device=device, requires_grad=True)
    v = torch.randn(batch, heads, seq_k, 32, device=device, requires_grad=True)
    out = sdpa(q, k, v, backend=backend)
    assert out.shape == (batch, heads, seq_q, 32)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for grad, tensor in zip(grads, (q, k, v), strict=True):
        assert grad.shape == tensor.shape and not grad.isnan().any()
    if dim == 0:
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))
        torch.testing.assert_close(grads[2], torch.ones_like(v) * seq_q / seq_k)
    else:
        assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("backend", OWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_grouped_heads_repeat_interleaved(device, dtype, backend) -> None:
    q = torch.zeros(1, 6, 3, 8, dtype=dtype, device=device)
    k = torch.zeros(1, 2, 5, 8, dtype=dtype, device=device)
    v = torch.arange(2.0, device=device).to(dtype)[None, :, None, None].expand(1, 2, 5, 8)
    v = v.clone().requires_grad_()
    out = sdpa(q, k, v, enable_gqa=True, backend=backend)
    assert out[0, :, 0, 0].tolist() == [0, 0, 0, 1, 1, 1]
    (grad,) = torch.autograd.grad(out.sum(), v)
    assert grad.shape == v.shape
    torch.testing.assert_close(grad, torch.full_like(grad, 3 * 3 / 5))
    for bad in (4, 5):
        other = torch.zeros(1, bad, 5, 8, dtype=dtype, device=device)
        with pytest.raises(RuntimeError, match="heads"):
            sdpa(q, other, other, enable_gqa=True, backend=backend)
    with pytest.raises(RuntimeError, match="grouped heads need enable_gqa=True"):
        sdpa(q, k, v, backend=backend)


@pytest.mark.parametrize("backend", OWN)
def test_innermost_stride_is_free(device, backend) -> None:
    q, k, v = (torch.randn(2, 3, 16, 20, device=device).transpose(-1, -2) for _ in range(3))
    strided = torch.randn(20, 40, device=device)[:, ::2]
    for mask in (strided, torch.randn(20, 1, device=device).expand(20, 20)):
        ours = sdpa(q, k, v, mask, backend=backend)
        same = sdpa(*(t.contiguous() for t in (q, k, v, mask)), backend=backend)
        torch.testing.assert_close(ours, same)
        torch.testing.assert_close(ours, math_sdpa(q, k, v, mask))


@pytest.mark.parametrize("backend", OWN)
def test_many_batches_and_heads(device, backend) -> None:
    """Grids beyond 65,535 blocks on any axis."""
    if backend == "flash":
        sizes = [(65536, 8, 4, 64), (1, 65536, 10, 16), (70000, 1, 1, 8)]
    else:
        sizes = [(70000, 1, 1, 8), (1, 65536, 10, 16)]
    for batch, heads, seq, dim in sizes:
        v = torch.randn(batch, heads, seq, dim, device=device, requires_grad=True)
        zero = torch.zeros_like(v)
        out = sdpa(zero, zero, v, backend=backend)
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(v), rtol=1e-5, atol=1e-5)
        (grad,) = torch.autograd.grad(out.sum(), v)
        torch.testing.assert_close(grad, torch.ones_like(v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", OWN)
def test_ranks_and_broadcast_axes(device, backend) -> None:
    cases = [
        ((5, 8), (7, 8), (7, 6), (5, 7)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 6), (3, 5, 7)),
        ((2, 3, 5, 8), (1, 3, 7, 8), (2, 1, 7, 6), (2, 1, 1, 7)),
        ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 6), (3, 1, 5, 7)),
        ((2, 1, 4, 5, 8), (1, 3, 1, 7, 8), (3, 4, 7, 6), (2, 1, 4, 1, 7)),
    ]
    for *shapes, mask_shape in cases:
        q, k, v, mask = (torch.randn(shape, device=device) for shape in (*shapes, mask_shape))
        for given_mask in (None, mask, mask > 0):
            ours = sdpa(q, k, v, given_mask, backend=backend)
            truth = math_sdpa(q, k, v, given_mask)
            torch.testing.assert_close(ours, truth.nan_to_num(0.0))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_differential(data) -> None:
    """Random legal arguments: values and gradients as torch's math backend in fp64."""
    draw = data.draw
    batch, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    group = draw(st.integers(1, 3))
    seq_q, seq_k = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    dim, dim_v = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    is_causal = draw(st.booleans())
    mask_kind = draw(st.sampled_from(["none", "bool", "float"])) if not is_causal else "none"
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.float64, generator=generator).requires_grad_()

    q, k = normal(batch, kv_heads * group, seq_q, dim), normal(batch, kv_heads, seq_k, dim)
    v = normal(batch, kv_heads, seq_k, dim_v)
    mask = None
    if mask_kind != "none":
        sizes = [draw(st.sampled_from([1, n])) for n in (batch, kv_heads * group, seq_q, seq_k)]
        mask = normal(*sizes[draw(st.integers(0, 2)) :])
        mask = mask > 0 if mask_kind == "bool" else mask
    inputs = [t for t in (q, k, v, mask) if t is not None and t.requires_grad]
    options = {"scale": draw(st.sampled_from([None, 0.3, -0.5])), "enable_gqa": True}
    truth = math_sdpa(q, k, v, mask, 0.0, is_causal, **options)
    grad_out = torch.randn(truth.shape, dtype=torch.float64, generator=generator)
    grad_truth = torch.autograd.grad(truth, inputs, grad_out)
    for backend in OWN:
        out = sdpa(q, k, v, mask, 0.0, is_causal, **options, backend=backend)
        torch.testing.assert_close(out, truth, rtol=1e-9, atol=1e-9)
        grads = torch.autograd.grad(out, inputs, grad_out)
        for ours, theirs in zip(grads, grad_truth, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", TORCH)
def test_torch_backends_by_name(device, backend) -> None:
    """Each runs torch's own kernel, or fails with torch's reason."""
    q = torch.randn(1, 2, 64, 64, device=device, dtype=torch.bfloat16)
    if device.type == "cpu" and backend in ("sdpa_efficient", "sdpa_cudnn"):
        with pytest.raises(RuntimeError, match=r"No (available|viable)"):
            sdpa(q, q, q, backend=backend)
        return
    out = sdpa(q, q, q, is_causal=True, backend=backend)
    torch.testing.assert_close(out, math_sdpa(q, q, q, is_causal=True), rtol=2e-2, atol=2e-2)


def test_auto_takes_everything(device) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for dim in (8, 64, 300):
            q = torch.randn(1, 2, 16, dim, device=device).to(dtype)
            out = sdpa(q, q, q, is_causal=True)
            torch.testing.assert_close(
                out, math_sdpa(q, q, q, is_causal=True), rtol=2e-2, atol=2e-2
            )


def test_dropout_applies_as_given(device) -> None:
    """p = 0 is exact, p = 1 gives zeros, gradients see the same pattern as the output."""
    q, k, v = (torch.randn(1, 2, 40, 16, device=device, requires_grad=True) for _ in range(3))
    for backend in OWN:
        plain = sdpa(q, k, v, backend=backend)
        assert torch.equal(sdpa(q, k, v, dropout_p=0.0, backend=backend), plain)
        zeros = sdpa(q, k, v, dropout_p=1.0, backend=backend)
        assert torch.equal(zeros, torch.zeros_like(zeros))
        out = sdpa(q, k, v, dropout_p=0.4, backend=backend)
        grad_out = torch.randn_like(out)
        (grad_v,) = torch.autograd.grad(out, v, grad_out)
        torch.testing.assert_close((grad_v * v).sum(), (grad_out * out).sum(), rtol=1e-4, atol=1e-4)
