"""Problems that tests draw: shapes round tile edges, layouts, masks, all options of the op."""

from __future__ import annotations

import torch
from reference import Problem
from torch import Tensor

# batch, query heads, key heads, query length, key length, head size, head size of value
SHAPES = [
    (1, 1, 1, 1, 1, 8, 8),
    (2, 3, 3, 64, 64, 64, 64),
    (1, 2, 2, 65, 63, 64, 64),
    (2, 4, 2, 17, 129, 32, 32),
    (1, 6, 2, 130, 70, 40, 24),
    (1, 2, 1, 1, 300, 128, 128),
    (1, 1, 1, 200, 200, 96, 96),
    (1, 2, 2, 70, 90, 80, 128),
    (1, 1, 1, 33, 65, 192, 192),
    (1, 2, 2, 100, 140, 256, 256),
    (2, 1, 1, 5, 7, 3, 5),
    (1, 2, 2, 129, 257, 72, 71),
]


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device, layout: str = "bhsd") -> Tensor:
    """Random normal numbers as a view whose memory between and around rows is NaN."""
    batch, heads, rows, dim = shape
    if layout == "bshd":
        store = torch.full((batch, rows + 2, heads, dim + 8), float("nan"), device=device)
        view = store.to(dtype)[:, 1 : rows + 1, :, :dim].transpose(1, 2)
    elif layout == "odd":  # rows that start at odd addresses
        store = torch.full((batch, heads, rows + 1, dim + 3), float("nan"), device=device)
        view = store.to(dtype)[:, :, :rows, 1 : dim + 1]
    elif layout == "transposed":  # last stride not 1
        store = torch.full((batch, heads, dim, rows), float("nan"), device=device)
        view = store.to(dtype).transpose(2, 3)
    else:
        store = torch.full((batch, heads, rows + 4, dim), float("nan"), device=device)
        view = store.to(dtype)[:, :, 2 : rows + 2]
    return view.copy_(torch.randn(shape, device=device))


def problem(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    layout: str = "bhsd",
    mask: str | None = None,
    **options: object,
) -> Problem:
    batch, heads, kv_heads, seq_q, seq_k, dim, dim_v = shape
    build = {"dtype": dtype, "device": device, "layout": layout}
    return Problem(
        poisoned(batch, heads, seq_q, dim, **build),
        poisoned(batch, kv_heads, seq_k, dim, **build),
        poisoned(batch, kv_heads, seq_k, dim_v, **build),
        attn_mask=None if mask is None else make_mask(mask, shape, dtype, device),
        **options,
    )


MASKS = ("bool", "bool_rows_dead", "float_2d", "float_4d", "float_head", "float_keys", "float32",
         "float_strided", "bool_expanded", "float_inf")  # fmt: skip


def make_mask(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    batch, heads, _, seq_q, seq_k, *_ = shape
    full = (batch, heads, seq_q, seq_k)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device).to(dtype)

    if kind == "bool":
        return torch.rand(full, device=device) > 0.3
    if kind == "bool_rows_dead":
        keep = torch.rand(full[2:], device=device) > 0.3
        keep[::3] = False
        return keep
    if kind == "bool_expanded":
        return (torch.rand(batch, 1, 1, seq_k, device=device) > 0.3).expand(full)
    if kind == "float_strided":  # last stride 2
        return normal(batch, 1, seq_q, 2 * seq_k)[..., ::2]
    if kind == "float_inf":
        mask = normal(seq_q, seq_k)
        return mask.masked_fill_(torch.rand(seq_q, seq_k, device=device) > 0.5, -torch.inf)
    if kind == "float32":
        return torch.randn(full[2:], device=device)
    sizes = {"float_2d": full[2:], "float_4d": full, "float_head": (1, heads, 1, seq_k),
             "float_keys": (batch, 1, seq_q, 1)}  # fmt: skip
    return normal(*sizes[kind])


def rng_state(device: torch.device) -> Tensor:
    return torch.randint(-(2**62), 2**62, (2,), dtype=torch.int64, device=device)
