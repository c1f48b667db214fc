"""Attention of Hugging Face transformers models, by name.

    from attn_ext.integrations.transformers import register

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=register())

Source: AttentionInterface and AttentionMaskInterface of transformers, 5.0 or later.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from attn_ext._ops import call, ops
from attn_ext.sdpa import BACKENDS, dropout_state, scaled_dot_product_attention

#: transformers reads these in a name: it then prepares masks and caches for an implementation of
#: its own, or looks for a kernel to download.
_TAKEN = ("flash", "flex", "sdpa", "eager", "paged", "|", "/")


def register(backend: str = "auto", name: str = "attn_ext") -> str:
    """Makes `attn_implementation=name` run attn_ext in any model, and returns the name.

    Both the attention and its mask are registered: with a name that has no mask, transformers
    drops causality and padding without a word.

    Args:
        backend: one of attn_ext.BACKENDS.
        name: a second name lets two models of one process use two backends.

    Raises:
        ValueError: an unknown backend, or a name in which transformers reads a meaning.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}; got {backend!r}")
    if any(word in name for word in _TAKEN):
        raise ValueError(
            f"name: expected none of {', '.join(_TAKEN)} in it, which transformers would read as "
            f"an implementation of its own; got {name!r}"
        )
    AttentionInterface.register(name, partial(attention, backend=backend))
    AttentionMaskInterface.register(name, mask)
    return name


def mask(*, allow_is_causal_skip: bool = True, **kwargs: Any) -> Tensor | None:
    """transformers' mask for SDPA: bool [B, 1, Sq, Sk], or None where is_causal says the same.

    Left out for a square problem and a single query alone. Between these lengths a causal problem
    without a mask could be aligned at either end, see `attention`.
    """
    # cache_position: the first releases of transformers 5.
    q_length = kwargs["q_length"] if "q_length" in kwargs else len(kwargs["cache_position"])
    skip = allow_is_causal_skip and q_length in (1, kwargs["kv_length"])
    made: Tensor | None = sdpa_mask(allow_is_causal_skip=skip, **kwargs)
    return made


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    *,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a model's attention layer calls.

    Args:
        module: the layer; its `is_causal` counts where the argument is None.
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D], heads not repeated.
        value: [B, Hkv, Sk, Dv].
        attention_mask: broadcastable to [B, Hq, Sq, Sk]; it holds causality too, where given.
        dropout: the probability of dropping a weight.
        scaling: factor on the scores; None is 1 / sqrt(D).
        is_causal: without a mask and for more than one query, query i sees keys j <= i.
        softcap: scores become softcap * tanh(score / softcap), with the flash kernels.
        position_bias: added to the scores.
        backend: one of attn_ext.BACKENDS.
        kwargs: what transformers passes besides.

    Returns:
        ([B, Sq, Hq, Dv] contiguous, None): no backend returns the weights.

    Raises:
        ValueError: attention sinks; softcap with a backend that has none; a causal problem with
            neither a mask nor as many queries as keys.
        RuntimeError: as scaled_dot_product_attention.
    """
    for sinks in ("s_aux", "sinks"):
        if kwargs.get(sinks) is not None:
            raise ValueError(
                f"{sinks}: expected None, got a tensor: attn_ext has no attention sinks"
            )
    seq_q, seq_k = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = seq_q > 1 and attention_mask is None and causal
    if causal and seq_q != seq_k:
        raise ValueError(
            "attention_mask: expected a mask for causal attention of fewer or more queries than "
            f"keys, got None with {seq_q} and {seq_k}"
        )
    if position_bias is not None:
        from transformers.integrations.sdpa_attention import create_position_bias_mask

        attention_mask = create_position_bias_mask(
            position_bias, attention_mask, causal, query, key
        )
        causal = False
    if softcap is None:
        out = scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, causal, scaling, enable_gqa=True,
            backend=backend,
        )  # fmt: skip
    elif backend in ("auto", "flash"):
        rng_state = dropout_state(query.device) if dropout else None
        out, _ = call(
            ops.flash_attention_forward.default,
            query, key, value, attention_mask, dropout, causal, rng_state, scale=scaling,
            softcap=softcap,
        )  # fmt: skip
    else:
        raise ValueError(f"softcap: expected None with backend={backend!r}, got {softcap}")
    # Of heads that lie beside each other in a row, as most models have them, flash leaves the
    # result that way, and this copies nothing.
    return out.transpose(1, 2).contiguous(), None
