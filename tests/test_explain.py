"""attn_ext.explain: what would run, why, and why not another."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_ext


def operands(head_dim: int = 16, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 8, head_dim).to(dtype) for _ in range(3)]


def test_auto_says_why_it_leaves_a_call_to_torch() -> None:
    found = attn_ext.explain(*operands())
    assert found.auto == "flash" and found.why is None
    found = attn_ext.explain(*operands(dtype=torch.bfloat16))
    assert found.auto == found.sdpa and "matrix instructions" in str(found.why)
    found = attn_ext.explain(*operands(head_dim=300))
    assert found.auto == found.sdpa and "256" in found.refused["flash"]


def test_a_pin_shows() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        found = attn_ext.explain(*operands(), is_causal=True)
    assert found.sdpa == "math" and found.order == ["math"]


def test_it_prints_as_a_table() -> None:
    text = str(attn_ext.explain(*operands()))
    assert text.splitlines()[1].split() == ["auto", "flash:", "measured", "fastest"]
    with attn_ext.activated():
        assert "sdpa_flash on attn_ext's kernels" in str(attn_ext.explain(*operands()))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    q, k, v = (torch.randn(8, 16, 1024, 64, device="cuda").bfloat16() for _ in range(3))
    found = attn_ext.explain(q, k, v, is_causal=True)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert (found.auto == "flash") == hopper and not found.refused
    assert "backward" in str(attn_ext.explain(q.requires_grad_(), k, v).why) or not hopper
    short = attn_ext.explain(q[:, :, :64], k[:, :, :64], v[:, :, :64])
    assert short.auto == short.sdpa != "flash"
