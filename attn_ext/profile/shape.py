"""The shape of an attention call, as a trace records it, and the work that it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from attn_ext.profile.event import ELEMENT_BYTES, Event

_DTYPES = {"c10::Half": "fp16", "c10::BFloat16": "bf16", "float": "fp32", "double": "fp64"}


@dataclass(frozen=True)
class Shape:
    """query [batch, heads, seq_q, head_dim], key [batch, kv_heads, seq_k, head_dim], value
    [batch, kv_heads, seq_k, value_dim].

    `causal` is None where the trace does not say; `mask_bytes` is the size of a given mask.
    """

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    head_dim: int
    value_dim: int
    dtype: str | None = None
    element: int | None = None
    causal: bool | None = None
    mask_bytes: int = 0

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key."""
        return self.batch * self.heads * self.seq_q * self.seq_k

    @property
    def seen_pairs(self) -> int:
        """Those that a causal mask, aligned top-left, lets take part."""
        if not self.causal:
            return self.pairs
        rows = min(self.seq_q, self.seq_k)
        below = rows * (rows + 1) // 2 + (self.seq_q - rows) * self.seq_k
        return self.batch * self.heads * below

    def flops(self, backward: bool = False, seen: bool = False) -> int:
        """Operations of the matrix products: two forward, five backward.

        torch counts every pair, causal or not (torch.utils.flop_counter); `seen` leaves out the
        pairs above the diagonal, which a kernel need not compute.
        """
        of_pair = 3 * self.head_dim + 2 * self.value_dim if backward else (
            self.head_dim + self.value_dim
        )  # fmt: skip
        return 2 * (self.seen_pairs if seen else self.pairs) * of_pair

    def bytes(self, backward: bool = False) -> int | None:
        """The least that a call moves to and from memory: each operand and result once.

        Forward query, key, value, mask and out; backward also grad_out and three gradients, and
        logsumexp in fp32. None where the dtype is not known.
        """
        if self.element is None:
            return None
        query = self.batch * self.heads * self.seq_q * self.head_dim
        out = self.batch * self.heads * self.seq_q * self.value_dim
        keys = self.batch * self.kv_heads * self.seq_k * (self.head_dim + self.value_dim)
        once = (query + keys + out) * self.element
        if not backward:
            return once + self.mask_bytes
        return 2 * once + 4 * self.batch * self.heads * self.seq_q + self.mask_bytes

    def __str__(self) -> str:
        kv = "" if self.kv_heads == self.heads else f" (kv {self.kv_heads})"
        keys = "" if self.seq_k == self.seq_q else f" over {self.seq_k} keys"
        causal = {True: ", causal", False: "", None: ", causal or not is not recorded"}[self.causal]
        dtype = f", {self.dtype}" if self.dtype else ""
        return (
            f"batch {self.batch}, heads {self.heads}{kv}, seq {self.seq_q}{keys}, "
            f"head size {self.head_dim}{dtype}{causal}"
        )


def sizes(op: Event, index: int) -> list[int] | None:
    """The sizes of a tensor argument of an op; None where it is none, or not recorded."""
    dims = _argument(op, "Input Dims", index)
    if isinstance(dims, list) and dims and all(isinstance(size, int) for size in dims):
        return dims
    return None


def type_of(op: Event, index: int) -> str | None:
    """The C++ type of an argument's elements."""
    found = _argument(op, "Input type", index)
    return found if isinstance(found, str) else None


def shape_of(
    op: Event, query: int, causal: int | None, mask: int | None, rows_of_heads: bool
) -> Shape | None:
    """From the inputs of an op, whose query, key and value are arguments in a row.

    Args:
        query: the position of query among the arguments.
        causal, mask: the positions of is_causal and attn_mask, where the op has them.
        rows_of_heads: the layout is [batch, seq, heads, head_dim], as of the flash-attn package.

    Returns:
        None where shapes were not recorded, or are not those of a batch of equal lengths.
    """
    found = [sizes(op, query + at) for at in range(3)]
    shapes = [_four(size, rows_of_heads) for size in found if size is not None]
    if len(shapes) != 3 or None in shapes:
        return None
    q, k, v = (size for size in shapes if size is not None)
    if k[:3] != v[:3] or q[3] != k[3]:
        return None
    concrete = None if causal is None else _argument(op, "Concrete Inputs", causal)
    kind = type_of(op, query) or ""
    mask_sizes = None if mask is None else sizes(op, mask)
    of_mask = ELEMENT_BYTES.get(type_of(op, mask) or "", 0) if mask is not None else 0
    return Shape(
        batch=q[0], heads=q[1], kv_heads=k[1], seq_q=q[2], seq_k=k[2], head_dim=q[3],
        value_dim=v[3], dtype=_DTYPES.get(kind), element=ELEMENT_BYTES.get(kind),
        causal={"True": True, "False": False}.get(str(concrete)),
        mask_bytes=prod(mask_sizes) * of_mask if mask_sizes else 0,
    )  # fmt: skip


def chain_shape(scores: Event, out: Event) -> Shape | None:
    """Of an unfused attention, from the batched products of query with key and of the weights with
    value: the batch of both is batch x heads in one, so the heads count as batch."""
    q, k, w, v = sizes(scores, 0), sizes(scores, 1), sizes(out, 0), sizes(out, 1)
    if not (q and k and w and v) or not len(q) == len(k) == len(w) == len(v) == 3:
        return None
    if w != [q[0], q[1], k[2]] or v[:2] != [q[0], k[2]]:
        return None
    kind = type_of(scores, 0) or ""
    return Shape(
        batch=q[0], heads=1, kv_heads=1, seq_q=q[1], seq_k=k[2], head_dim=q[2], value_dim=v[2],
        dtype=_DTYPES.get(kind), element=ELEMENT_BYTES.get(kind),
    )  # fmt: skip


def _argument(op: Event, what: str, index: int) -> Any:
    found = op.args.get(what)
    return found[index] if isinstance(found, list) and 0 <= index < len(found) else None


def _four(size: Sequence[int], rows_of_heads: bool) -> list[int] | None:
    """As [batch, heads, seq, head_dim]; a call without heads or batch has one of them."""
    if len(size) > 4 or len(size) < 2 or (rows_of_heads and len(size) != 4):
        return None
    whole = [1] * (4 - len(size)) + list(size)
    return [whole[0], whole[2], whole[1], whole[3]] if rows_of_heads else whole
