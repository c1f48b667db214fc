"""The call style of flash-attn: every keyword against the plain reference, every packed form."""

from __future__ import annotations

import inspect

import pytest
import torch
from reference import Problem, assert_accurate, baseline, reference
from torch.utils._python_dispatch import TorchDispatchMode

import attn_ext
from attn_ext import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

COMMON = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
    "softcap": 0.0, "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip
KEYWORDS = [
    {},
    {"softmax_scale": 0.3},
    {"causal": True},
    {"window_size": (7, -1)},
    {"window_size": (-1, 4)},
    {"window_size": (9, 3)},
    {"causal": True, "window_size": (5, 20)},
    {"softcap": 1.5},
    {"dropout_p": 0.4},
    {"dropout_p": 0.2, "causal": True, "softmax_scale": 0.2, "softcap": 3.0, "window_size": (30, 0),
     "deterministic": True},
]  # fmt: skip


def drawn(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("lengths", [(40, 70), (70, 40)], ids=str)
@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
def test_keywords(device, keywords, lengths, dtype) -> None:
    seq_q, seq_k = lengths
    q = drawn(2, seq_q, 4, 32, dtype=dtype, device=device)
    k = drawn(2, seq_k, 2, 32, dtype=dtype, device=device)
    v = drawn(2, seq_k, 2, 24, dtype=dtype, device=device)
    torch.manual_seed(5)
    out, logsumexp, probs = flash_attn_func(q, k, v, **keywords, return_attn_probs=True)
    torch.manual_seed(5)
    assert torch.equal(out, flash_attn_func(q, k, v, **keywords)) and probs is None
    assert not logsumexp.requires_grad
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), grad_out)

    torch.manual_seed(5)
    left, right = keywords.get("window_size", (-1, -1))
    heads_first = [tensor.detach().transpose(1, 2) for tensor in (q, k, v)]
    case = Problem(
        *heads_first, is_causal=keywords.get("causal", False), bottom_right=True,
        scale=keywords.get("softmax_scale"), window_size_left=left, window_size_right=right,
        softcap=keywords.get("softcap", 0.0), dropout_p=keywords.get("dropout_p", 0.0),
        rng_state=attn_ext.dropout_state(device),
    )  # fmt: skip
    truth = reference(case, grad_out.transpose(1, 2))
    plain = baseline(case, grad_out.transpose(1, 2))
    ours = [out.transpose(1, 2), logsumexp, *(grad.transpose(1, 2) for grad in grads)]
    names = ("out", "logsumexp", "grad_q", "grad_k", "grad_v")
    for name, mine, theirs, exact in zip(names, ours, plain, truth, strict=True):
        assert_accurate(mine, theirs, exact, name, ulps=4)


def both(call, inputs: tuple[torch.Tensor, ...], *rest, **keywords) -> list[torch.Tensor]:
    """Output, logsumexp and the gradients of one random loss, with one dropout pattern."""
    torch.manual_seed(5)
    out, logsumexp, _ = call(*inputs, *rest, **keywords, return_attn_probs=True)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(6)).to(out)
    return [out, logsumexp, *torch.autograd.grad(out, inputs, grad_out)]


PACKED = {"causal": True, "softcap": 4.0, "window_size": (11, 3), "dropout_p": 0.3,
          "softmax_scale": 0.4, "deterministic": True}  # fmt: skip


def test_packed_forms_of_a_dense_batch(device) -> None:
    build = {"dtype": torch.float32, "device": device}
    qkv, q = drawn(2, 33, 3, 4, 16, **build), drawn(2, 20, 4, 16, **build)
    parts = tuple(part.detach().requires_grad_() for part in qkv.unbind(2))
    out, logsumexp, grad = both(flash_attn_qkvpacked_func, (qkv,), **PACKED)
    expected = both(flash_attn_func, parts, **PACKED)
    for mine, theirs in zip((out, logsumexp, *grad.unbind(2)), expected, strict=True):
        assert torch.equal(mine, theirs)
    kv = qkv.detach()[:, :, 1:].requires_grad_()
    out, logsumexp, grad_q, grad = both(flash_attn_kvpacked_func, (q, kv), **PACKED)
    expected = both(flash_attn_func, (q, *parts[1:]), **PACKED)
    for mine, theirs in zip((out, logsumexp, grad_q, *grad.unbind(2)), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_packed_forms_of_sequences(device) -> None:
    build = {"dtype": torch.float32, "device": device}
    qkv, q = drawn(33, 3, 4, 16, **build), drawn(20, 4, 16, **build)
    parts = tuple(part.detach().requires_grad_() for part in qkv.unbind(1))
    cu = torch.tensor([0, 12, 33], dtype=torch.int32, device=device)
    cu_q = torch.tensor([0, 20, 20], dtype=torch.int32, device=device)
    out, logsumexp, grad = both(flash_attn_varlen_qkvpacked_func, (qkv,), cu, 21, **PACKED)
    expected = both(flash_attn_varlen_func, parts, cu, cu, 21, 21, **PACKED)
    for mine, theirs in zip((out, logsumexp, *grad.unbind(1)), expected, strict=True):
        assert torch.equal(mine, theirs)
    kv = qkv.detach()[:, 1:].requires_grad_()
    rest = (cu_q, cu, 20, 21)
    out, logsumexp, grad_q, grad = both(flash_attn_varlen_kvpacked_func, (q, kv), *rest, **PACKED)
    expected = both(flash_attn_varlen_func, (q, *parts[1:]), *rest, **PACKED)
    for mine, theirs in zip((out, logsumexp, grad_q, *grad.unbind(1)), expected, strict=True):
        assert torch.equal(mine, theirs)


class _Backward(TorchDispatchMode):
    """Keeps the keyword arguments of fused backward ops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "backward" in func.__name__ and func.namespace == "attn_ext":
            self.seen.append(kwargs)
        return func(*args, **(kwargs or {}))


def test_deterministic_reaches_the_backward(device) -> None:
    q = drawn(8, 2, 16, dtype=torch.float32, device=device)
    cu = torch.tensor([0, 8], dtype=torch.int32, device=device)
    calls = (
        lambda **keywords: flash_attn_func(q[None], q[None], q[None], **keywords),
        lambda **keywords: flash_attn_varlen_func(q, q, q, cu, cu, 8, 8, **keywords),
    )
    for call in calls:
        for keywords, switched in ({}, False), ({"deterministic": True}, False), ({}, True):
            out = call(**keywords)
            torch.use_deterministic_algorithms(switched)
            try:
                with _Backward() as mode:
                    out.sum().backward()
            finally:
                torch.use_deterministic_algorithms(False)
            (given,) = mode.seen
            assert given.get("deterministic", False) == bool(keywords or switched)


@pytest.mark.gpu
def test_deterministic_gradients_are_bit_equal() -> None:
    device = torch.device("cuda")
    q, k, v = (drawn(2, 2000, 8, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
    out = flash_attn_func(q, k, v, causal=True, deterministic=True)
    grad_out = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)
    for _ in range(5):
        again = torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)
        assert all(map(torch.equal, first, again))


def test_arguments_have_the_names_and_the_order_of_flash_attn() -> None:
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    expected = {
        flash_attn_func: ["q", "k", "v"],
        flash_attn_kvpacked_func: ["q", "kv"],
        flash_attn_qkvpacked_func: ["qkv"],
        flash_attn_varlen_func: ["q", "k", "v", *lengths],
        flash_attn_varlen_kvpacked_func: ["q", "kv", *lengths],
        flash_attn_varlen_qkvpacked_func: ["qkv", "cu_seqlens", "max_seqlen"],
    }
    for function, tensors in expected.items():
        parameters = dict(inspect.signature(function).parameters)
        parameters.pop("block_table", None)
        assert list(parameters) == [*tensors, *COMMON]
        assert {name: parameters[name].default for name in COMMON} == COMMON


def test_what_is_not_here_is_refused() -> None:
    x = torch.randn(1, 4, 3, 2, 8)
    q = x[:, :, 0]
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="alibi_slopes: expected None"):
        flash_attn_qkvpacked_func(x, alibi_slopes=torch.ones(2))
    with pytest.raises(ValueError, match="alibi_slopes: expected None"):
        flash_attn_varlen_qkvpacked_func(x[0], cu, 4, alibi_slopes=torch.ones(2))
    with pytest.raises(ValueError, match="block_table: expected None"):
        flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 4, 4, block_table=torch.zeros(1, 1))
    for call, bad, message in [
        (flash_attn_qkvpacked_func, x[:, :, :2], r"qkv: .* length, 3, heads, .* got \[1, 4, 2, 2,"),
        (flash_attn_qkvpacked_func, x[0], r"qkv: expected \[batch, length, 3, .* got \[4, 3, 2, 8"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(bad)
    with pytest.raises(ValueError, match=r"kv: expected \[total length, 2, heads, head_dim\]"):
        flash_attn_varlen_kvpacked_func(q[0], x[0], cu, cu, 4, 4)
