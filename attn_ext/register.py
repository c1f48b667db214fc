"""What torch must know of the ops beyond their kernels, registered when attn_ext is imported.

Fake kernels (shapes and strides, for torch.compile and export), gradients, autocast, vmap and FLOP
formulas. Shapes: query [B, Hq, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attn_ext import vmap
from attn_ext._ops import NAMESPACE, ops

_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

Grad = Tensor | None
ATTENTION_OPS = ("naive_attention", "inplace_attention", "flash_attention_forward")


def _autograd(name: str, backward: Callable[..., Any], setup: Callable[..., None]) -> None:
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=_library
    )


# Fake kernels. Stages return contiguous tensors; fused ops follow the layout of their inputs.


def _stage_fake(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return scores.new_empty(scores.shape)


def _masked_fill_inplace_fake(*args: Any, **kwargs: Any) -> None:
    return None


def _staged_fake(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    batch, heads, seq_q, _ = query.shape
    out = query.new_empty((batch, heads, seq_q, value.shape[3]))
    return out, query.new_empty((batch, heads, seq_q, key.shape[2]))


def _empty_in_layout(like: Tensor, head_dim: int) -> Tensor:
    """As empty_in_layout of tensors.h: rows of heads where `like` has them, else contiguous."""
    batch, heads, rows, _ = like.shape
    if like.stride(1) < like.stride(2):
        return like.new_empty((batch, rows, heads, head_dim)).transpose(1, 2)
    return like.new_empty((batch, heads, rows, head_dim))


def _flash_forward_fake(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return _empty_in_layout(query, value.shape[3]), query.new_empty(query.shape[:3], dtype=dtype)


def _flash_backward_fake(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor | None,
    output_mask: list[bool],
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    grads = [
        _empty_in_layout(tensor, tensor.shape[3]) if wanted else query.new_empty((0,))
        for tensor, wanted in zip((query, key, value), output_mask[:3], strict=True)
    ]
    if output_mask[3] and attn_mask is not None and attn_mask.dtype != torch.bool:
        grads.append(attn_mask.new_empty(attn_mask.shape))
    else:
        grads.append(query.new_empty((0,)))
    return tuple(grads)


def _varlen_forward_fake(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    total, heads, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_empty((total, heads, value.shape[2]))
    return out, query.new_empty((heads, total), dtype=dtype)


def _varlen_backward_fake(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    output_mask = next(arg for arg in args if isinstance(arg, (list, tuple)))
    return tuple(
        query.new_empty(tensor.shape if wanted else (0,))
        for tensor, wanted in zip((query, key, value), output_mask, strict=True)
    )


_FAKES: dict[str, Callable[..., Any]] = {
    "scale": _stage_fake,
    "masked_fill": _stage_fake,
    "masked_fill_": _masked_fill_inplace_fake,
    "softmax": _stage_fake,
    "softmax_backward": _stage_fake,
    "dropout": _stage_fake,
    "naive_attention": _staged_fake,
    "inplace_attention": _staged_fake,
    "flash_attention_forward": _flash_forward_fake,
    "flash_attention_backward": _flash_backward_fake,
    "flash_attention_varlen_forward": _varlen_forward_fake,
    "flash_attention_varlen_backward": _varlen_backward_fake,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)


# Gradients. Each stage is differentiable, and each gradient is made of differentiable ops, so that
# second derivatives hold for the stages and for the two staged attentions.


def _scale_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.scale = inputs[1]


def _scale_backward(ctx: Any, grad: Tensor) -> tuple[Grad, None]:
    return ops.scale(grad, ctx.scale), None


def _fill_setup(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.is_causal = keyword_only_inputs["is_causal"]


def _fill_backward(ctx: Any, grad: Tensor) -> tuple[Grad, None, None]:
    (mask,) = ctx.saved_tensors
    return ops.masked_fill(grad, mask, 0.0, is_causal=ctx.is_causal), None, None


class _MaskedFillInPlace(torch.autograd.Function):
    """Gives the in-place fill a gradient, which torch.library offers only to functional ops."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, mask: Tensor | None, value: float, is_causal: bool
    ) -> Tensor:
        ops.masked_fill_(scores, mask, value, is_causal=is_causal)
        ctx.mark_dirty(scores)
        ctx.save_for_backward(mask)
        ctx.is_causal = is_causal
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Grad, None, None, None]:
        return *_fill_backward(ctx, grad), None


def _masked_fill_inplace_autograd(
    scores: Tensor, mask: Tensor | None, value: float, *, is_causal: bool = False
) -> None:
    with torch._C._AutoDispatchBelowAutograd():
        needs_graph = torch.is_grad_enabled() and scores.requires_grad
        if not needs_graph:
            ops.masked_fill_(scores, mask, value, is_causal=is_causal)
            return
    _MaskedFillInPlace.apply(scores, mask, value, is_causal)  # type: ignore[no-untyped-call]


def _softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _softmax_backward(ctx: Any, grad: Tensor) -> Grad:
    (output,) = ctx.saved_tensors
    grad_scores: Tensor = ops.softmax_backward(grad, output)
    return grad_scores


def _softmax_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _softmax_double_backward(ctx: Any, grad: Tensor) -> tuple[Grad, Grad]:
    """Of y = p * (g - sum(p * g)), with respect to g and p."""
    grad_output, output = ctx.saved_tensors
    to_grad = ops.softmax_backward(grad, output) if ctx.needs_input_grad[0] else None
    to_output = None
    if ctx.needs_input_grad[1]:
        inner = (output * grad_output).sum(-1, keepdim=True)
        to_output = grad * (grad_output - inner)
        to_output = to_output - grad_output * (output * grad).sum(-1, keepdim=True)
    return to_grad, to_output


def _dropout_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.p = inputs[1]
    ctx.save_for_backward(inputs[2])


def _dropout_backward(ctx: Any, grad: Tensor) -> tuple[Grad, None, None]:
    (rng_state,) = ctx.saved_tensors
    return ops.dropout(grad, ctx.p, rng_state), None, None


def _default_scale(query: Tensor, scale: float | None) -> float:
    if scale is not None:
        return scale
    return query.shape[3] ** -0.5 if query.shape[3] else 1.0


def _needs(ctx: Any) -> list[bool]:
    """Which of query, key, value, attn_mask need a gradient; defaults left out need none."""
    needs = list(ctx.needs_input_grad[:4])
    return needs + [False] * (4 - len(needs))


def _staged_setup(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor],
) -> None:
    query, key, value, attn_mask, ctx.dropout_p, _, rng_state = inputs
    ctx.scale = _default_scale(query, keyword_only_inputs["scale"])
    mask = attn_mask if _needs(ctx)[3] else None
    ctx.save_for_backward(query, key, value, mask, output[1], rng_state)
    ctx.set_materialize_grads(False)


def _staged_backward(
    ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None
) -> tuple[Grad, Grad, Grad, Grad, None, None, None]:
    """With P the softmax's output: dV = P'dO, dP = dO V', dS = P (dP - sum(P dP)), dQ = scale dS K,
    dK = scale dS'Q. The scores themselves are not needed, so the in-place form may overwrite them.
    """
    query, key, value, attn_mask, weights, rng_state = ctx.saved_tensors
    needs_query, needs_key, needs_value, needs_mask = _needs(ctx)
    kv_heads = key.shape[1]

    def grouped(tensor: Tensor) -> Tensor:  # query heads of one key head become rows
        batch, heads, rows, size = tensor.shape
        if heads == kv_heads:
            return tensor
        return tensor.reshape(batch, kv_heads, heads // max(kv_heads, 1) * rows, size)

    grad_query = grad_key = grad_value = grad_mask = grad_probs = None
    if grad_out is not None:
        if needs_value:
            kept = ops.dropout(weights, ctx.dropout_p, rng_state) if ctx.dropout_p else weights
            grad_value = grouped(kept).transpose(2, 3) @ grouped(grad_out)
        if needs_query or needs_key or needs_mask:
            grad_probs = (grouped(grad_out) @ value.transpose(2, 3)).reshape(weights.shape)
            if ctx.dropout_p:
                grad_probs = ops.dropout(grad_probs, ctx.dropout_p, rng_state)
    if grad_weights is not None:
        grad_probs = grad_weights if grad_probs is None else grad_probs + grad_weights
    if grad_probs is not None:
        grad_scores = ops.softmax_backward(grad_probs, weights)
        if needs_query:
            grad_query = (grouped(grad_scores) @ key).reshape(query.shape) * ctx.scale
        if needs_key:
            grad_key = grouped(grad_scores).transpose(2, 3) @ grouped(query) * ctx.scale
        if needs_mask:
            grad_mask = grad_scores.sum_to_size(attn_mask.shape).to(attn_mask.dtype)
    return grad_query, grad_key, grad_value, grad_mask, None, None, None


def _flash_setup(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor],
) -> None:
    query, key, value, attn_mask, ctx.dropout_p, ctx.is_causal, rng_state = inputs
    out, logsumexp = output
    ctx.options = keyword_only_inputs
    ctx.save_for_backward(query, key, value, out, logsumexp, attn_mask, rng_state)
    ctx.mark_non_differentiable(logsumexp)
    ctx.set_materialize_grads(False)


def _backward_options(ctx: Any) -> dict[str, Any]:
    """What the forward was given; torch's own switch also asks for a deterministic gradient."""
    options: dict[str, Any] = dict(ctx.options)
    options["deterministic"] |= torch.are_deterministic_algorithms_enabled()
    return options


def _flash_backward(ctx: Any, grad_out: Tensor | None, _: Any) -> tuple[Grad, ...]:
    if grad_out is None:
        return (None,) * 7
    query, key, value, out, logsumexp, attn_mask, rng_state = ctx.saved_tensors
    wanted = _needs(ctx)
    grads = ops.flash_attention_backward(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        attn_mask,
        ctx.dropout_p,
        ctx.is_causal,
        rng_state,
        wanted,
        **_backward_options(ctx),
    )
    return (
        *(grad if want else None for grad, want in zip(grads, wanted, strict=True)),
        None,
        None,
        None,
    )


def _varlen_setup(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor],
) -> None:
    query, key, value, cum_seq_q, cum_seq_k, *ctx.numbers, rng_state = inputs
    ctx.options = keyword_only_inputs
    ctx.save_for_backward(query, key, value, *output, cum_seq_q, cum_seq_k, rng_state)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _varlen_backward(ctx: Any, grad_out: Tensor | None, _: Any) -> tuple[Grad, ...]:
    if grad_out is None:
        return (None,) * 10
    *tensors, rng_state = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    grads = ops.flash_attention_varlen_backward(
        grad_out,
        *tensors,
        *ctx.numbers,
        rng_state,
        wanted,
        **_backward_options(ctx),
    )
    chosen = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
    return *chosen, *(None,) * 7


def _no_double_backward(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "the backward of fused attention has no derivative of its own: second derivatives of fused "
        'attention are not supported; backend="naive" has them'
    )


def _save_nothing(ctx: Any, **kwargs: Any) -> None:
    pass


_autograd("scale", _scale_backward, _scale_setup)
_autograd("masked_fill", _fill_backward, _fill_setup)
_autograd("softmax", _softmax_backward, _softmax_setup)
_autograd("softmax_backward", _softmax_double_backward, _softmax_backward_setup)
_autograd("dropout", _dropout_backward, _dropout_setup)
_autograd("naive_attention", _staged_backward, _staged_setup)
_autograd("inplace_attention", _staged_backward, _staged_setup)
_autograd("flash_attention_forward", _flash_backward, _flash_setup)
_autograd("flash_attention_backward", _no_double_backward, _save_nothing)
_autograd("flash_attention_varlen_forward", _varlen_backward, _varlen_setup)
_autograd("flash_attention_varlen_backward", _no_double_backward, _save_nothing)
_library.impl("masked_fill_", _masked_fill_inplace_autograd, "Autograd")


# Autocast: floating inputs of an attention op come in the autocast dtype, as with aten's.


def _autocast(name: str, device_type: str, tensors: int) -> None:
    """The first `tensors` arguments of the op are cast, the rest passes."""
    op = getattr(ops, name).default

    def cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(dtype)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        operands = [cast(tensor, dtype) for tensor in args[:tensors]]
        with torch.autocast(device_type, enabled=False):
            return op(*operands, *args[tensors:], **kwargs)

    _library.impl(name, kernel, f"Autocast{device_type.upper()}")


for _name in ATTENTION_OPS:
    for _device_type in ("cpu", "cuda"):
        _autocast(_name, _device_type, tensors=4)
for _device_type in ("cpu", "cuda"):
    _autocast("flash_attention_varlen_forward", _device_type, tensors=3)


# FLOPs, by torch's convention: two for a multiply-add, causal not halved, query heads counted.


def _forward_flops(
    query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, **kwargs: Any
) -> int:
    batch, heads, seq_q, head_dim = query
    return 2 * batch * heads * seq_q * key[2] * (head_dim + value[3])


def _backward_flops(
    grad_out: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *args: Any,
    **kwargs: Any,
) -> int:  # fmt: skip
    """Five products: the scores again, dP and dV (head size of value), dQ and dK (of query)."""
    batch, heads, seq_q, head_dim = query
    return 2 * batch * heads * seq_q * key[2] * (3 * head_dim + 2 * value[3])


for _name in ATTENTION_OPS:
    register_flop_formula(getattr(ops, _name))(_forward_flops)
register_flop_formula(ops.flash_attention_backward)(_backward_flops)

vmap.register(_library)
