"""How DTensor may shard the attention ops: by batch and by heads, forward and backward.

Tensor-parallel models whose query, key and value are DTensors run the ops on their local shards
without communication. FSDP2 needs none of this: there attention sees plain tensors.

attn_ext registers the rules when it first sees a DTensor; call `register()` before calling the ops
in torch.ops by hand. Limits: no sharding of lengths (that is context parallelism, which torch
offers for its own ops: see activate), and with dropout all is replicated, since the pattern is
drawn over all heads of the batch; rng_state has to be a DTensor then too.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from attn_ext._ops import ops


def register_for(tensor: Any) -> None:
    """Registers the rules if this is a DTensor; its module is imported only by those who use it."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(tensor, module.DTensor):
        register()


@functools.cache
def register() -> bool:
    """Tells DTensor how to shard the ops; whether this torch has the interface for it, which is
    experimental."""
    try:
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:
        return False
    for op in (ops.naive_attention, ops.inplace_attention, ops.flash_attention_forward):
        register_sharding(op.default)(_forward)
    register_sharding(ops.flash_attention_backward.default)(_backward)
    register_sharding([ops.softmax.default, ops.scale.default])(_rows)
    register_sharding(ops.softmax_backward.default)(_rows_backward)
    return True


# A rule gives, for one axis of the device mesh, pairs of (placements of the results, placements of
# the arguments); None stands for an argument that is no tensor. Specs are DTensor's view of the
# tensors: shape, placements, mesh.


def _forward(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    rng_state: Any = None,
    **options: Any,
) -> list[tuple[list[Any], list[Any]]]:
    rules = []
    for axis in _axes((query, key, value), dropout_p):
        whole, part = _place(None), _place(axis)
        arguments = [part, part, part, _mask(attn_mask, axis), None, None, rng_state and whole]
        rules.append(([part, part], arguments))
    return rules


def _backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    rng_state: Any,
    output_mask: list[bool],
    **options: Any,
) -> list[tuple[list[Any], list[Any]]]:
    from torch.distributed.tensor import Partial

    rules = []
    for axis in _axes((query, key, value, grad_out, out), dropout_p):
        whole, part, mask = _place(None), _place(axis), _mask(attn_mask, axis)
        # What is not asked for comes back empty. A mask that broadcasts along the axis gets its
        # gradient from all shards.
        grads = [part if wanted else whole for wanted in output_mask[:3]]
        grads.append(Partial() if output_mask[3] and axis is not None and mask == whole else mask)
        grads[3] = grads[3] if output_mask[3] else whole
        tensors = [part] * 6
        rules.append((grads, [*tensors, mask, None, None, rng_state and whole, None]))
    return rules


def _rows(scores: Any, *numbers: float) -> list[tuple[list[Any], list[Any]]]:
    places = [_place(axis) for axis in (None, *range(scores.ndim - 1))]
    return [([place], [place, *[None] * len(numbers)]) for place in places]


def _rows_backward(grad_output: Any, output: Any) -> list[tuple[list[Any], list[Any]]]:
    places = [_place(axis) for axis in (None, *range(output.ndim - 1))]
    return [([place], [place, place]) for place in places]


def _place(axis: int | None) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    return Replicate() if axis is None else Shard(axis)


def _axes(specs: tuple[Any, ...], dropout_p: float) -> list[int | None]:
    """What may be sharded: nothing, the batch (0), the heads (1)."""
    if dropout_p > 0.0:
        return [None]
    query, key = specs[:2]
    heads, kv_heads = query.shape[1], key.shape[1]
    shards = 1  # of the heads, over all axes of the mesh along which some operand has them sharded
    for dim, size in enumerate(query.mesh.shape):
        if any(spec.placements[dim].is_shard(1) for spec in specs):
            shards *= size
    # Grouped heads must be cut between groups.
    whole_groups = heads == kv_heads or kv_heads % shards == 0
    return [None, 0, 1] if shards > 1 and whole_groups else [None, 0]


def _mask(attn_mask: Any, axis: int | None) -> Any:
    """The mask's placement where query is sharded along `axis`; None without a mask."""
    if attn_mask is None:
        return None
    own = None if axis is None else axis + attn_mask.ndim - 4
    broadcasts = own is None or own < 0 or attn_mask.shape[own] == 1
    return _place(None if broadcasts else own)
