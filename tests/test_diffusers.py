"""diffusers needs no adapter: its native backends call F.sdpa, which activate() and use() reach."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from frameworks import framework

import attn_ext

diffusers = framework("diffusers")

pytestmark = pytest.mark.usefixtures("one_thread")

ATTENTIONS = {
    "activated, native flash": (lambda: attn_ext.activated(pin=False), "_native_flash"),
    "activated and pinned": (attn_ext.activated, "native"),
    **{
        f"use {name}": (lambda name=name: attn_ext.use(name, strict=True), "native")
        for name in ("naive", "inplace", "flash")
    },
}


def flux() -> tuple[torch.nn.Module, dict]:
    """A transformer whose text and image tokens attend to each other."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 64, 4), "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 32), "timestep": torch.tensor([0.3, 0.8]),
        "img_ids": torch.randint(8, (64, 3)).float(), "txt_ids": torch.zeros(7, 3),
    }  # fmt: skip


def unet() -> tuple[torch.nn.Module, dict]:
    """Convolutions with self-attention and cross-attention between them."""
    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, norm_num_groups=8,
        block_out_channels=(16, 32), attention_head_dim=8, cross_attention_dim=24,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return model, {
        "sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 700]),
        "encoder_hidden_states": torch.randn(2, 7, 24),
    }  # fmt: skip


def evaluate(model, inputs, backend: str, context) -> tuple[torch.Tensor, dict, list[str]]:
    """Output, gradients of the weights, and the ops of attention that ran."""
    model.set_attention_backend(backend)
    model.zero_grad()
    with context, torch.profiler.profile() as profiler:
        out = model(**inputs).sample
        out.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    names = [event.name for event in profiler.events()]
    return out.detach(), grads, [name for name in names if "attention" in name]


@pytest.mark.parametrize("how", ATTENTIONS)
@pytest.mark.parametrize("build", [flux, unet])
def test_output_and_gradients(device, build, how) -> None:
    if device.type == "cuda" and "activated" in how:
        dtype, tolerance = torch.bfloat16, 5e-2  # torch's flash backend takes no float32 there
    else:
        dtype, tolerance = torch.float32, 1e-4
    model, inputs = build()
    model = model.to(device, dtype)
    inputs = {
        name: tensor.to(device, dtype if tensor.is_floating_point() else None)
        for name, tensor in inputs.items()
    }
    context, backend = ATTENTIONS[how]
    out, grads, ops = evaluate(model, inputs, backend, context())
    truth, true_grads, _ = evaluate(model, inputs, "_native_math", nullcontext())
    torch.testing.assert_close(out, truth, rtol=tolerance, atol=tolerance)
    assert grads.keys() == true_grads.keys()
    for name, grad in true_grads.items():
        atol = tolerance * grad.abs().max().item() + 1e-6
        torch.testing.assert_close(grads[name], grad, rtol=tolerance, atol=atol, msg=name)
    if "activated" in how:
        assert any("_scaled_dot_product_flash_attention" in name for name in ops)
        assert not any("native_" in name for name in ops)  # what falls back to torch's kernel
    else:
        assert any(name.startswith("attn_ext::") for name in ops)
        assert not any("scaled_dot_product" in name for name in ops)
