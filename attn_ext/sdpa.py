"""The drop-in for F.scaled_dot_product_attention, and the choice of its backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_ext._ops import call, cuda_missing, ops
from attn_ext.sharding import register_for

#: torch's own backends by the names used here.
TORCH_BACKENDS = {
    "math": SDPBackend.MATH,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}
OWN_BACKENDS = ("naive", "inplace", "flash")
_OPS = {
    "naive": ops.naive_attention.default,
    "inplace": ops.inplace_attention.default,
    "flash": ops.flash_attention_forward.default,
}
#: What `backend=` takes.
BACKENDS = (*OWN_BACKENDS, *TORCH_BACKENDS, "auto")


def dropout_state(device: torch.device | str) -> Tensor:
    """Draws what the ops take as rng_state: int64 [2] on `device`, from torch's generator there.

    Fixed by torch.manual_seed, new in every replay of a CUDA graph. The same state gives the same
    dropout pattern in every backend of this package.
    """
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def sac_ops() -> set[torch._ops.OpOverload]:
    """The ops whose results selective activation checkpointing should save: the fused forwards.

    For create_selective_checkpoint_contexts(list(attn_ext.sac_ops())), or a policy of one's own.
    """
    return {ops.flash_attention_forward.default, ops.flash_attention_varlen_forward.default}


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str = "auto",
) -> Tensor:
    """softmax(scale * query key' + mask) value, as F.scaled_dot_product_attention means it.

    Args:
        query: [..., Hq, Sq, D], float16, bfloat16, float32 or float64.
        key: [..., Hkv, Sk, D] of query's dtype and device; leading axes broadcast.
        value: [..., Hkv, Sk, Dv].
        attn_mask: broadcastable to [..., Hq, Sq, Sk]. bool: True takes part; float32 or query's
            dtype: added to the scores. Not together with is_causal.
        dropout_p: the probability of dropping a weight. Applied as given, in eval mode too.
        is_causal: query i sees keys j <= i (top-left aligned where Sq != Sk).
        scale: factor on the scores; None is 1 / sqrt(D).
        enable_gqa: lets Hq be a multiple of Hkv; each group of query heads shares a key head.
        backend: "naive" and "inplace" (stages, an Sq x Sk matrix in memory), "flash" (fused, D and
            Dv up to 256), torch's own "math", "sdpa_efficient", "sdpa_flash" and "sdpa_cudnn", or
            "auto", the fastest that takes the input.

    Returns:
        [..., Hq, Sq, Dv]. A query that sees no key gives 0.

    Raises:
        ValueError: an unknown backend.
        RuntimeError: arguments that do not fit each other or the backend; the text names the
            argument, what was expected and what came.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2; for "flash" Dao et al.,
    "FlashAttention", 2022.
    """
    if backend == "auto":
        if attn_mask is not None and is_causal:  # torch's fused CPU kernel would take both
            raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
        backend = choose(query, key, value, attn_mask, dropout_p)
        if backend == "sdpa" and scale is not None and scale <= 0:
            backend = "math"  # torch's fused kernels scale what they masked: 0 * -inf
        if backend == "sdpa":
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip
    if backend in TORCH_BACKENDS:
        with sdpa_kernel(TORCH_BACKENDS[backend]):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip
    if backend not in OWN_BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}; got {backend!r}")
    if query.is_cuda and cuda_missing:
        raise RuntimeError(f"backend={backend!r} has no CUDA kernels here: {cuda_missing}")

    if type(query) is not Tensor:
        register_for(query)
    shape = None
    if not query.dim() == key.dim() == value.dim() == 4 or query.shape[0] != key.shape[0] or (
        query.shape[1] != key.shape[1] and not enable_gqa
    ):  # fmt: skip
        query, key, value, attn_mask, shape = _as_four_dims(
            query, key, value, attn_mask, enable_gqa
        )
    rng_state = dropout_state(query.device) if 0.0 < dropout_p <= 1.0 else None
    args = (query, key, value, attn_mask, dropout_p, is_causal, rng_state)
    out: Tensor = call(_OPS[backend], *args, scale=scale)[0]
    return out if shape is None else out.reshape(*shape, *out.shape[-2:])


def choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
) -> str:
    """What "auto" runs: "flash" where it measured fastest, else "sdpa", which torch chooses."""
    slower = why_not_flash(query, key, value, attn_mask, dropout_p)
    return "flash" if slower is None else "sdpa"


def why_not_flash(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float
) -> str | None:
    """Why torch's own choice may be faster than "flash", or None where flash measured faster.

    Measured on a CPU with AVX-512 and on an H200 (benchmarks/results).
    """
    head_dim, head_dim_v = query.shape[-1], value.shape[-1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    if max(head_dim, head_dim_v) > 256:
        return "flash takes head sizes up to 256"
    if query.device.type == "cpu":
        return "torch has matrix instructions for 16 bits on a CPU" if half else None
    if query.device.type != "cuda":
        return f"there are no kernels of ours for {query.device.type}"
    if cuda_missing:
        return cuda_missing
    if torch.cuda.get_device_capability(query.device) != (9, 0):
        return "only measured on compute capability 9.0"
    if attn_mask is not None:
        return "cuDNN takes masks too"
    if dropout_p:
        return "cuDNN drops faster"
    if query.dtype == torch.float32:
        return None if max(head_dim, head_dim_v) <= 64 else "fp32 only up to a head size of 64"
    if not half:
        return "fp64 on CUDA is left to torch's math"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        return "cuDNN's backward is faster"
    if head_dim != head_dim_v or head_dim not in (64, 96, 128, 192, 256):
        return "the Hopper kernel takes head sizes 64, 96, 128, 192 and 256, the same for value"
    if any(stride % 8 for t in (query, key, value) for stride in t.stride()[:-1]):
        return "the Hopper kernel takes rows that start at 16 bytes"
    if min(query.shape[-2], key.shape[-2]) < 512:
        return "cuDNN is faster below a length of 512"
    if query.shape[:-2].numel() * query.shape[-2] < 128 * 132:
        return "too few rows to fill the GPU: no split over keys"
    return None


def _broadcast(*shapes: Sequence[int]) -> torch.Size | None:
    """What the shapes broadcast to, or None."""
    try:
        return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None


def _as_four_dims(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, torch.Size]:
    """[..., S, D] of any rank as [B, H, S, D], broadcast axes expanded, and out's leading axes."""
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            raise RuntimeError(
                f"{name}: expected at least 2 dimensions [..., length, head_dim], got "
                f"{list(tensor.shape)}"
            )
    # Grouped heads do not broadcast; every axis before them does.
    grouped = enable_gqa and min(tensor.dim() for tensor in tensors.values()) >= 3
    own = 3 if grouped else 2
    leading = _broadcast(*(tensor.shape[:-own] for tensor in tensors.values()))
    if leading is None:
        axes = "batch axes" if grouped else "batch and head axes"
        hint = "" if enable_gqa else "; grouped heads need enable_gqa=True"
        raise RuntimeError(
            f"query, key, value: expected {axes} that broadcast, got {list(query.shape)}, "
            f"{list(key.shape)}, {list(value.shape)}{hint}"
        )
    batch = leading if grouped else leading[:-1]

    def folded(tensor: Tensor) -> Tensor:
        heads = tensor.shape[-3] if grouped else leading[-1] if leading else 1
        rows = tensor.shape[-2:]
        return tensor.expand(*batch, heads, *rows).reshape(batch.numel(), heads, *rows)

    out_leading = torch.Size((*batch, query.shape[-3])) if grouped else leading
    if attn_mask is not None:
        attn_mask = _folded_mask(attn_mask, batch, (*out_leading, query.shape[-2], key.shape[-2]))
    return folded(query), folded(key), folded(value), attn_mask, out_leading


def _folded_mask(mask: Tensor, batch: torch.Size, scores: tuple[int, ...]) -> Tensor:
    """A mask that broadcasts to `scores` [*batch, H, Sq, Sk] as one for [B, H, Sq, Sk]."""
    if _broadcast(mask.shape, scores) != scores:
        raise RuntimeError(
            f"attn_mask: expected a shape that broadcasts to {list(scores)}, got {list(mask.shape)}"
        )
    mask = mask[(None,) * (len(batch) + 3 - mask.dim())]
    own = mask.shape[: len(batch)]
    if own.numel() == 1:
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*batch, *mask.shape[-3:]).reshape(batch.numel(), *mask.shape[-3:])
