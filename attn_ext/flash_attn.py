"""The fused op in the call style of flash-attn: [batch, length, heads, head_dim], packed batches.

Unlike scaled_dot_product_attention, causal and windows align at the bottom right: the last query
sees the last key, whatever the two lengths.
"""

from __future__ import annotations

from torch import Tensor

from attn_ext._ops import ops
from attn_ext.sdpa import dropout_state


def _result(
    out: Tensor, logsumexp: Tensor, return_attn_probs: bool
) -> Tensor | tuple[Tensor, Tensor, None]:
    return (out, logsumexp, None) if return_attn_probs else out


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    *,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Fused attention of a dense batch.

    Args:
        q: [B, Sq, Hq, D].
        k: [B, Sk, Hkv, D], Hq a multiple of Hkv.
        v: [B, Sk, Hkv, Dv].
        dropout_p: the probability of dropping a weight.
        softmax_scale: factor on the scores; None is 1 / sqrt(D).
        causal: query i sees keys j <= i + Sk - Sq.
        window_size: (left, right), with p = i + Sk - Sq: query i sees keys p - left to p + right;
            -1 is no bound.
        softcap: scores become softcap * tanh(score / softcap); 0 is none.
        return_attn_probs: also return the logsumexp, fp32 [B, Hq, Sq], and None in the place of
            flash-attn's debug tensor.

    Returns:
        [B, Sq, Hq, Dv], or (out, logsumexp, None).

    Raises:
        RuntimeError: arguments that do not fit; the text names them.

    Source: Dao, "FlashAttention-2", 2023.
    """
    rng_state = dropout_state(q.device) if dropout_p > 0.0 else None
    out, logsumexp = ops.flash_attention_forward(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, dropout_p, causal, rng_state,
        scale=softmax_scale, window_size_left=window_size[0], window_size_right=window_size[1],
        bottom_right=True, softcap=softcap,
    )  # fmt: skip
    return _result(out.transpose(1, 2), logsumexp, return_attn_probs)


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
    *,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
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
        dropout_p, softmax_scale, causal, window_size, softcap, return_attn_probs: as in
            flash_attn_func, per sequence; the logsumexp is fp32 [Hq, total_q].

    Returns:
        [total_q, Hq, Dv], or (out, logsumexp, None).

    Raises:
        RuntimeError: arguments that do not fit; the text names them.
    """
    rng_state = dropout_state(q.device) if dropout_p > 0.0 else None
    out, logsumexp = ops.flash_attention_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal,
        rng_state, scale=softmax_scale, window_size_left=window_size[0],
        window_size_right=window_size[1], softcap=softcap,
    )  # fmt: skip
    return _result(out, logsumexp, return_attn_probs)
