"""merge_attention: attention over pieces of the keys is attention over all of them."""

from __future__ import annotations

import pytest
import torch

from attn_ext import merge_attention, ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_two_pieces_are_the_whole(device, dtype) -> None:
    q, k, v = (torch.randn(2, 3, n, 64, device=device).to(dtype) for n in (70, 150, 150))
    whole, whole_lse = ops.flash_attention_forward(q, k, v)
    pieces = [
        ops.flash_attention_forward(q, k[:, :, at], v[:, :, at])
        for at in (slice(0, 40), slice(40, 150))
    ]
    out, lse = merge_attention(*pieces[0], *pieces[1])
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, whole, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=1e-5)


def test_a_side_without_keys_counts_nothing(device) -> None:
    out = torch.randn(1, 1, 4, 8, device=device)
    lse = torch.randn(1, 1, 4, device=device)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    merged, merged_lse = merge_attention(out, lse, *nothing)
    assert torch.equal(merged, out) and torch.equal(merged_lse, lse)
    merged, merged_lse = merge_attention(*nothing, *nothing)
    assert torch.equal(merged, nothing[0]) and torch.equal(merged_lse, nothing[1])


def test_gradients_go_through_both(device) -> None:
    def piece(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = q @ k.transpose(-1, -2)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    q, k, v = (
        torch.randn(1, 2, n, 4, device=device, dtype=torch.float64, requires_grad=True)
        for n in (3, 6, 6)
    )
    merged = merge_attention(*piece(k[:, :, :2], v[:, :, :2]), *piece(k[:, :, 2:], v[:, :, 2:]))[0]
    grad_out = torch.randn_like(merged)
    found = torch.autograd.grad(merged, (q, k, v), grad_out)
    truth = torch.autograd.grad(piece(k, v)[0], (q, k, v), grad_out)
    for mine, right in zip(found, truth, strict=True):
        torch.testing.assert_close(mine, right)


def test_a_gradient_that_would_be_wrong_is_refused(device) -> None:
    q, k, v = (torch.randn(1, 1, 8, 16, device=device, requires_grad=True) for _ in range(3))
    out, lse = ops.flash_attention_forward(q, k, v)
    with pytest.raises(RuntimeError, match="lse1: expected one with a gradient"):
        merge_attention(out, lse, out, lse)
    with torch.no_grad():
        merge_attention(out, lse, out, lse)


def test_shapes_and_dtypes_are_checked() -> None:
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    with pytest.raises(RuntimeError, match=r"lse2: expected .*\[1, 2, 3\], got .*\[1, 2\]"):
        merge_attention(out, lse, out, lse[..., 0])
    with pytest.raises(RuntimeError, match="lse1: expected float32 or float64"):
        merge_attention(out, lse.half(), out, lse)
    with pytest.raises(RuntimeError, match=r"out2: expected torch\.float32"):
        merge_attention(out, lse, out.half(), lse)
