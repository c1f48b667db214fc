"""Packed batches and the flash-attn call style: each sequence as if it were alone."""

from __future__ import annotations

import pytest
import torch
from problems import rng_state
from reference import Problem, assert_accurate, baseline, dropout_keep, reference
from test_registration import opcheck

import attn_ext
from attn_ext import ops

LENGTHS = [
    ([5, 0, 130, 64, 1], [7, 3, 130, 200, 1]),
    ([33], [65]),
    ([1, 1, 1], [100, 0, 257]),
    ([0, 0], [4, 0]),
]


def packed(lengths: list[int], heads: int, dim: int, dtype, device) -> tuple[torch.Tensor, ...]:
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    return torch.randn(sum(lengths), heads, dim, device=device).to(dtype), offsets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (20, 5)}, {"causal": True, "softcap": 5.0}],
    ids=str,
)
def test_each_sequence_alone(device, options, lengths, dtype) -> None:
    q, cu_q = packed(lengths[0], 4, 64, dtype, device)
    k, cu_k = packed(lengths[1], 2, 64, dtype, device)
    v, _ = packed(lengths[1], 2, 48, dtype, device)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    longest = max(lengths[0]), max(lengths[1])
    out, logsumexp, _ = attn_ext.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, *longest, return_attn_probs=True, **options
    )
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, grad_out)
    assert out.shape == (sum(lengths[0]), 4, 48) and logsumexp.shape == (4, sum(lengths[0]))
    for b in range(len(lengths[0])):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])

        def alone(tensor: torch.Tensor, where: slice) -> torch.Tensor:
            return tensor.detach()[where].transpose(0, 1)[None]

        left, right = options.get("window_size", (-1, -1))
        case = Problem(
            alone(q, rows), alone(k, keys), alone(v, keys), is_causal="causal" in options,
            window_size_left=left, window_size_right=right, bottom_right=True,
            softcap=options.get("softcap", 0.0),
        )  # fmt: skip
        part = alone(grad_out, rows)
        truth, plain = reference(case, part), baseline(case, part)
        ours = [out[rows], *(g[w] for g, w in zip(grads, (rows, keys, keys), strict=True))]
        for index, name in ((0, "out"), (2, "grad_query"), (3, "grad_key"), (4, "grad_value")):
            result = alone(ours[max(index - 1, 0)], slice(None))
            assert_accurate(result, plain[index], truth[index], f"{name} of {b}", ulps=4)
        torch.testing.assert_close(
            logsumexp[:, rows].double(), truth[1].value[0], rtol=1e-4, atol=1e-4, equal_nan=False
        )


def test_dropout_counts_heads_of_all_sequences(device) -> None:
    lengths = [40, 70]
    q, cu = packed(lengths, 2, 32, torch.float32, device)
    state = rng_state(device)
    out = ops.flash_attention_varlen_forward(q, q, q, cu, cu, 70, 70, 0.3, False, state)[0]
    keep = dropout_keep(state, 0.3, (2, 2, 70, 70)).to(device)
    for b, rows in enumerate((slice(0, 40), slice(40, 110))):
        x = q[rows].transpose(0, 1).double()
        weights = torch.softmax(x @ x.transpose(1, 2) / 32**0.5, -1)
        truth = (weights * keep[b, :, : lengths[b], : lengths[b]] / 0.7) @ x
        torch.testing.assert_close(out[rows].transpose(0, 1).double(), truth, rtol=1e-5, atol=1e-5)


def test_dense_call_style_is_bottom_right(device) -> None:
    for seq_q, seq_k in ((3, 7), (7, 3), (5, 5)):
        q = torch.zeros(1, seq_q, 2, 8, device=device)
        k = torch.zeros(1, seq_k, 2, 8, device=device)
        v = torch.arange(1.0, seq_k + 1, device=device)[None, :, None, None].expand(1, seq_k, 2, 8)
        out, logsumexp, _ = attn_ext.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        seen = [max(0, i + 1 + seq_k - seq_q) for i in range(seq_q)]
        expected = torch.tensor([(n + 1) / 2 if n else 0.0 for n in seen])
        torch.testing.assert_close(out[0, :, 0, 0].cpu(), expected)
        torch.testing.assert_close(logsumexp[0, 0].cpu(), torch.tensor(seen).float().log())


def test_opcheck_varlen(device) -> None:
    q, cu = packed([3, 9], 2, 16, torch.float32, device)
    k, cu_k = packed([5, 6], 1, 16, torch.float32, device)
    for grad in (False, True):
        args = (q.requires_grad_(grad), k, k, cu, cu_k, 9, 6, 0.0, True)
        opcheck(ops.flash_attention_varlen_forward, args)
    out, lse = ops.flash_attention_varlen_forward(q.detach(), k, k, cu, cu_k, 9, 6)
    tail = (cu, cu_k, 9, 6, 0.0, False, None, [True, False, True])
    opcheck(ops.flash_attention_varlen_backward, (out, q.detach(), k, k, out, lse, *tail))


def test_bad_offsets_are_refused() -> None:
    q, cu = packed([3, 9], 2, 16, torch.float32, torch.device("cpu"))
    call = attn_ext.flash_attn_varlen_func
    for offsets, message in [
        (cu.long(), r"expected cum_seq_q as a contiguous int32 tensor of shape \[batch \+ 1\]"),
        (cu.flip(0), "expected cum_seq_q to rise from 0 to 12"),
        (cu + 1, "expected cum_seq_q to rise from 0 to 12"),
        (cu * 2, "expected cum_seq_q to rise from 0 to 12"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call(q, q, q, offsets, cu, 9, 9)
    with pytest.raises(RuntimeError, match="in steps of at most 8"):
        call(q, q, q, cu, cu, 8, 9)
    with pytest.raises(RuntimeError, match="expected query with 3 dimensions"):
        call(q[None], q, q, cu, cu, 9, 9)
