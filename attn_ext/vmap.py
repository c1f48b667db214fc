"""vmap rules: the mapped axis becomes part of the batch, so that one kernel does all of it.

Dropout depends on a pair's place in its batch, so with dropout the samples run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_ext._ops import NAMESPACE, ops

InDims = Sequence[int | None]
Rule = Callable[..., tuple[Any, Any]]


def _sample(args: Sequence[Any], in_dims: InDims, index: int) -> list[Any]:
    return [
        arg if dim is None else arg.select(dim, index)
        for arg, dim in zip(args, in_dims, strict=True)
    ]


def _one_by_one(op: Any) -> Rule:
    def rule(info: Any, in_dims: InDims, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        results = [op(*_sample(args, in_dims, i), **kwargs) for i in range(info.batch_size)]
        if results[0] is None:
            return None, None
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    return rule


def _in_front(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The mapped axis first; an expanded one where the tensor is not mapped."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _elementwise(op: Any) -> Rule:
    """Of an op that treats every row alike: any further axis is one more row."""

    def rule(info: Any, in_dims: InDims, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        tensors = [
            _in_front(arg, dim, info.batch_size) if isinstance(arg, Tensor) else arg
            for arg, dim in zip(args, in_dims, strict=True)
        ]
        shape = tensors[0].shape
        rows = [
            t.reshape(-1, shape[-1] if len(shape) > 1 else 1) if isinstance(t, Tensor) else t
            for t in tensors
        ]
        return op(*rows, **kwargs).reshape(shape), 0

    return rule


def _fold(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """[size * B, ...] from a tensor [B, ...] with or without the mapped axis."""
    return _in_front(tensor, dim, size).flatten(0, 1)


def _fold_mask(mask: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """A mask broadcastable to [B, H, Sq, Sk] as one broadcastable to [size * B, H, Sq, Sk]."""
    mask = _in_front(mask, dim, size)
    mask = mask.reshape(size, *(1,) * (5 - mask.dim()), *mask.shape[1:])
    if dim is None and mask.shape[1] == 1:
        return mask[0]
    return mask.expand(size, batch, *mask.shape[2:]).flatten(0, 1)


def _attention(op: Any, mask_at: int, dropout_at: int) -> Rule:
    """Of an attention op, forward or backward: tensors before `mask_at` have a batch axis."""
    one_by_one = _one_by_one(op)
    declared = [arg for arg in op.default._schema.arguments if not arg.kwarg_only]

    def rule(info: Any, in_dims: InDims, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        # Trailing arguments that are their defaults do not come.
        args = (*args, *(arg.default_value for arg in declared[len(args) :]))
        in_dims = (*in_dims, *(None,) * (len(args) - len(in_dims)))
        wants_mask_gradient = any(isinstance(arg, (list, tuple)) and arg[3] for arg in args)
        if args[dropout_at] > 0.0 or wants_mask_gradient:
            return one_by_one(info, in_dims, *args, **kwargs)
        size, folded = info.batch_size, list(args)
        batch = args[0].shape[0] if in_dims[0] != 0 else args[0].shape[1]
        for at in range(mask_at):
            folded[at] = _fold(args[at], in_dims[at], size)
        if args[mask_at] is not None:
            folded[mask_at] = _fold_mask(args[mask_at], in_dims[mask_at], size, batch)
        results = op(*folded, **kwargs)
        return tuple(
            r.unflatten(0, (size, batch)) if r.dim() > 1 else r.expand(size, *r.shape)
            for r in results
        ), (0,) * len(results)

    return rule


_RULES: dict[str, Rule] = {
    "scale": _elementwise(ops.scale),
    "softmax": _elementwise(ops.softmax),
    "softmax_backward": _elementwise(ops.softmax_backward),
    "dropout": _one_by_one(ops.dropout),
    "masked_fill": _one_by_one(ops.masked_fill),
    "masked_fill_": _one_by_one(ops.masked_fill_),
    "naive_attention": _attention(ops.naive_attention, mask_at=3, dropout_at=4),
    "inplace_attention": _attention(ops.inplace_attention, mask_at=3, dropout_at=4),
    "flash_attention_forward": _attention(ops.flash_attention_forward, mask_at=3, dropout_at=4),
    "flash_attention_backward": _attention(ops.flash_attention_backward, mask_at=6, dropout_at=7),
}


def register(library: Any) -> None:
    for name, rule in _RULES.items():
        torch.library.register_vmap(f"{NAMESPACE}::{name}", rule, lib=library)
