"""What torch does to functions and modules, done to attention: transforms, checkpoints, copies."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import attn_ext
from attn_ext import ops

sdpa = attn_ext.scaled_dot_product_attention
BACKENDS = ("naive", "inplace", "flash")


def operands(device: Any = "cpu", **options: Any) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 6, 8, device=device, **options) for _ in range(3)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_mode_is_refused(device, backend) -> None:
    """A tangent is never dropped in silence."""
    q, k, v = operands(device)
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(lambda q: sdpa(q, k, v, backend=backend), (q,), (torch.ones_like(q),))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="forward-mode"):
            sdpa(dual, k, v, backend=backend)
        sdpa(q, k, v, backend=backend)  # no tangent here


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_torch_func_are_refused(device, backend) -> None:
    q, k, v = operands(device)
    with pytest.raises(RuntimeError, match=r"attn_ext: torch\.func\.grad"):
        torch.func.grad(lambda q: sdpa(q, k, v, backend=backend).sum())(q)
    assert torch.func.grad(lambda q: sdpa(q, k, v, backend="math").sum())(q).shape == q.shape


def test_a_gradient_of_a_gradient(device) -> None:
    q, k, v = operands(device, dtype=torch.float64)
    q.requires_grad_()

    def penalty(backend: str) -> torch.Tensor:
        (slope,) = torch.autograd.grad(sdpa(q, k, v, backend=backend).sum(), q, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), q)[0]

    torch.testing.assert_close(penalty("naive"), penalty("math"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_inference_mode_and_no_grad(device, backend) -> None:
    q, k, v = operands(device, requires_grad=True)
    right = sdpa(q, k, v, backend=backend)
    with torch.inference_mode():
        inside = sdpa(q, k, v, backend=backend)
    assert inside.is_inference() and torch.equal(inside, right)
    with torch.no_grad():
        inside = sdpa(q, k, v, backend=backend)
    assert not inside.requires_grad and torch.equal(inside, right)


def test_selective_checkpointing_keeps_attention(device) -> None:
    """With sac_ops() in the list of what is saved, backward does not run attention anew."""
    q, k, v = operands(device, requires_grad=True)
    calls = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    def attend(q: torch.Tensor) -> torch.Tensor:
        return sdpa(q * 2, k, v, backend="flash")

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(list(attn_ext.sac_ops()))

    with Watch():
        out = checkpoint(attend, q, use_reentrant=False, context_fn=contexts)
        (found,) = torch.autograd.grad(out.sum(), q)
    assert calls.count(ops.flash_attention_forward.default) == 1
    assert calls.count(torch.ops.aten.mul.Tensor) >= 2  # what is not in the list is
    (right,) = torch.autograd.grad(attend(q).sum(), q)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_mode_may_bring_gradients(device, backend) -> None:
    """A mode multiplies query by a trained weight; nothing that is passed in wants a gradient."""
    q, k, v = operands(device)
    weight = torch.ones((), device=device, requires_grad=True)

    class Scaled(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "attention" in str(func) and args[0].shape == q.shape:
                args = (args[0] * weight, *args[1:])
            return func(*args, **(kwargs or {}))

    with Scaled():
        out = sdpa(q, k, v, backend=backend)
    (found,) = torch.autograd.grad(out.sum(), weight)
    scaled = q.clone().requires_grad_()
    (right,) = torch.autograd.grad(sdpa(scaled, k, v, backend=backend).sum(), scaled)
    torch.testing.assert_close(found, (right * q).sum())


@pytest.mark.parametrize("needs", [0, 1, 2])
def test_a_frozen_input_costs_nothing(device, needs) -> None:
    """The backward op is asked for the gradients that are wanted, and for no other."""
    inputs = operands(device)
    inputs[needs].requires_grad_()
    asked = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is ops.flash_attention_backward.default:
                asked.append(args[10])
            return func(*args, **(kwargs or {}))

    out = sdpa(*inputs, backend="flash")
    with Watch():
        torch.autograd.grad(out.sum(), inputs[needs])
    assert asked == [[at == needs for at in range(3)] + [False]]


class Block(torch.nn.Module):
    """A module that holds on to the function itself."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 24)
        self.attend = attn_ext.scaled_dot_product_attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(*self.project(x).chunk(3, dim=-1), is_causal=True)


def test_modules_are_copied_and_pickled() -> None:
    block, x = Block(), torch.randn(2, 5, 8)
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(other(x), block(x))


def test_meta_tensors_have_shapes() -> None:
    q, k, v = operands("meta")
    for backend in BACKENDS:
        out = sdpa(q, k, v, backend=backend)
        assert out.device.type == "meta" and out.shape == q.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_nested_tensors_are_refused(backend) -> None:
    nested = torch.nested.nested_tensor(
        [torch.randn(n, 2, 8) for n in (3, 5)], layout=torch.jagged
    ).transpose(1, 2)
    with pytest.raises((RuntimeError, NotImplementedError)):
        sdpa(nested, nested, nested, backend=backend)
