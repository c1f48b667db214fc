"""The fused op in the call style of flash-attn: [batch, length, heads, head_dim], packed batches.

Unlike scaled_dot_product_attention, causal and windows align at the bottom right: the last query
sees the last key, whatever the two lengths.

Names and order of the arguments are flash-attn 2's, so that an import is all that changes. What is
not here is refused where it is given.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_ext._ops import call, ops
from attn_ext.sdpa import dropout_state

#: The output, or with return_attn_probs (output, logsumexp, None).
Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Fused attention of a dense batch.

    Args:
        q: [B, Sq, Hq, D].
        k: [B, Sk, Hkv, D], Hq a multiple of Hkv.
        v: [B, Sk, Hkv, Dv].
        dropout_p: the probability of dropping a weight.
        softmax_scale: factor on the scores; None is 1 / sqrt(D).
        causal: query i sees keys j <= i + Sk - Sq.
        window_size: (left, right), with p = i + Sk - Sq: query i sees keys p - left to p + right;
            -1 is no bound. causal makes right 0.
        softcap: scores become softcap * tanh(score / softcap); 0 is none.
        alibi_slopes: None; scaled_dot_product_attention takes such a bias as attn_mask.
        deterministic: gradients that are bit-equal from run to run, as also
            torch.use_deterministic_algorithms asks for.
        return_attn_probs: also return the logsumexp, fp32 [B, Hq, Sq], which has no gradient, and
            None in the place of flash-attn's debug tensor.

    Returns:
        [B, Sq, Hq, Dv], or (out, logsumexp, None). A query that sees no key gives 0, and -inf as
        its logsumexp.

    Raises:
        ValueError: alibi_slopes.
        RuntimeError: arguments that do not fit; the text names them.

    Source: Dao, "FlashAttention-2", 2023.
    """
    _refuse(alibi_slopes=alibi_slopes)
    rng_state = dropout_state(q.device) if dropout_p > 0.0 else None
    out, logsumexp = call(
        ops.flash_attention_forward.default,
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, dropout_p, causal, rng_state,
        scale=softmax_scale, window_size_left=window_size[0], window_size_right=window_size[1],
        bottom_right=True, softcap=softcap, deterministic=deterministic,
    )  # fmt: skip
    return _result(out.transpose(1, 2), logsumexp, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_func of q [B, Sq, Hq, D] and kv [B, Sk, 2, Hkv, D], read where they lie."""
    k, v = _parts("kv", kv, 5, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_func of qkv [B, S, 3, H, D], read where they lie."""
    q, k, v = _parts("qkv", qkv, 5, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
) -> Result:
    """Fused attention of sequences packed one after another, without padding.

    Args:
        q: [total_q, Hq, D]; sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        k: [total_k, Hkv, D].
        v: [total_k, Hkv, Dv].
        cu_seqlens_q: int32 [B + 1], rising from 0 to total_q. On CUDA its values are not checked,
            since that would wait for the device.
        cu_seqlens_k: int32 [B + 1], rising from 0 to total_k.
        max_seqlen_q: the longest query sequence.
        max_seqlen_k: the longest key sequence.
        block_table: None; keys in pages are not supported.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs: as in flash_attn_func, per sequence; the logsumexp is fp32
            [Hq, total_q].

    Returns:
        [total_q, Hq, Dv], or (out, logsumexp, None).

    Raises:
        ValueError: alibi_slopes or block_table.
        RuntimeError: arguments that do not fit; the text names them.
    """
    _refuse(alibi_slopes=alibi_slopes, block_table=block_table)
    rng_state = dropout_state(q.device) if dropout_p > 0.0 else None
    out, logsumexp = call(
        ops.flash_attention_varlen_forward.default,
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal,
        rng_state, scale=softmax_scale, window_size_left=window_size[0],
        window_size_right=window_size[1], softcap=softcap, deterministic=deterministic,
    )  # fmt: skip
    return _result(out, logsumexp, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_varlen_func of q [total_q, Hq, D] and kv [total_k, 2, Hkv, D]."""
    k, v = _parts("kv", kv, 4, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_varlen_func of qkv [total, 3, H, D]."""
    q, k, v = _parts("qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _refuse(**arguments: Any) -> None:
    for name, given in arguments.items():
        if given is not None:
            raise ValueError(
                f"{name}: expected None, since attn_ext has no such kernel; got a value"
            )


def _parts(name: str, packed: Tensor, dims: int, count: int) -> tuple[Tensor, ...]:
    """The tensors along the third axis from the end."""
    if packed.dim() != dims or packed.shape[-3] != count:
        before = ("batch, length" if dims == 5 else "total length") + f", {count}"
        raise ValueError(f"{name}: expected [{before}, heads, head_dim], got {list(packed.shape)}")
    return packed.unbind(-3)


def _result(out: Tensor, logsumexp: Tensor, return_attn_probs: bool) -> Result:
    return (out, logsumexp, None) if return_attn_probs else out
