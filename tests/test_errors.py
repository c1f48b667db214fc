"""Bad input gets one clear error that names the argument, what was expected and what came."""

from __future__ import annotations

import pytest
import torch

import attn_ext
from attn_ext import ops

OWN = ("naive", "inplace", "flash")
sdpa = attn_ext.scaled_dot_product_attention


def tensor(*size: int, dtype: torch.dtype = torch.float32, device="cpu") -> torch.Tensor:
    return torch.ones(size, device=device).to(dtype)


Q = (2, 4, 6, 8)
BAD = {
    "query_rank": (lambda t: (t(8), t(6, 8), t(6, 8)), {}, "query: expected at least 2 dimensions"),
    "dtype_mix": (
        lambda t: (t(*Q), t(*Q, dtype=torch.float16), t(*Q)),
        {},
        "expected key of query's dtype Float, got Half",
    ),
    "integer": (
        lambda t: (t(*Q, dtype=torch.int64),) * 3,
        {},
        "expected query of dtype float32, float64, float16 or bfloat16, got Long",
    ),
    "complex": (
        lambda t: (t(*Q, dtype=torch.complex64),) * 3,
        {},
        "expected query of dtype float32, float64, float16 or bfloat16, got ComplexFloat",
    ),
    "head_dim": (
        lambda t: (t(*Q), t(2, 4, 6, 7), t(*Q)),
        {},
        r"expected key of shape \[2, 4, 6, 8\], got \[2, 4, 6, 7\]",
    ),
    "key_length": (
        lambda t: (t(*Q), t(2, 4, 5, 8), t(2, 4, 6, 8)),
        {},
        r"expected value of shape \[2, 4, 5, 8\], got \[2, 4, 6, 8\]",
    ),
    "mask_shape": (
        lambda t: (t(*Q), t(*Q), t(*Q), t(5, 6)),
        {},
        r"expected attn_mask broadcastable to \[2, 4, 6, 6\], got \[5, 6\]",
    ),
    "mask_integer": (
        lambda t: (t(*Q), t(*Q), t(*Q), t(6, 6, dtype=torch.int64)),
        {},
        "expected attn_mask of dtype bool, float32 or query's Float, got Long",
    ),
    "mask_uint8": (
        lambda t: (t(*Q), t(*Q), t(*Q), t(6, 6, dtype=torch.uint8)),
        {},
        "expected attn_mask of dtype bool, float32 or query's Float, got Byte",
    ),
    "mask_other_half": (
        lambda t: (*(t(*Q, dtype=torch.float16),) * 3, t(6, 6, dtype=torch.bfloat16)),
        {},
        "expected attn_mask of dtype bool, float32 or query's Half, got BFloat16",
    ),
    "mask_and_causal": (
        lambda t: (t(*Q), t(*Q), t(*Q), t(6, 6)),
        {"is_causal": True},
        "Explicit attn_mask should not be set when is_causal=True",
    ),
    "negative_dropout": (
        lambda t: (t(*Q),) * 3,
        {"dropout_p": -0.1},
        r"expected a dropout probability in \[0, 1\], got -0.1",
    ),
    "dropout_above_one": (
        lambda t: (t(*Q),) * 3,
        {"dropout_p": 1.1},
        r"expected a dropout probability in \[0, 1\], got 1.1",
    ),
    "dropout_nan": (lambda t: (t(*Q),) * 3, {"dropout_p": float("nan")}, "got nan"),
    "scale_nan": (lambda t: (t(*Q),) * 3, {"scale": float("nan")}, "expected a finite scale"),
    "scale_inf": (lambda t: (t(*Q),) * 3, {"scale": float("inf")}, "expected a finite scale"),
}


@pytest.mark.parametrize("backend", OWN)
@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(device, case, backend) -> None:
    make, options, message = BAD[case]
    args = make(lambda *size, **kw: tensor(*size, device=device, **kw))
    with pytest.raises(RuntimeError, match=message):
        sdpa(*args, **options, backend=backend)


def test_message_names_the_op_once_and_no_path() -> None:
    q = tensor(*Q)
    with pytest.raises(RuntimeError) as raised:
        ops.flash_attention_forward(q, q, q.half())
    text = str(raised.value)
    assert "attn_ext::flash_attention_forward: expected value of query's dtype" in text
    assert text.count("attn_ext::") == 1 and "/csrc/" not in text and "/home" not in text


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match=r"backend: expected one of naive.*; got 'fast'"):
        sdpa(*(tensor(*Q),) * 3, backend="fast")


def test_flash_alone_limits_head_size() -> None:
    big = tensor(1, 1, 4, 257)
    with pytest.raises(RuntimeError, match=r'up to 256, got 257.*backend="naive" takes any'):
        sdpa(big, big, big, backend="flash")
    assert sdpa(big, big, big, backend="naive").shape == big.shape


FLASH_OPTIONS = [
    ({"window_size_left": -2}, "window sizes of at least 0"),
    ({"softcap": -1.0}, "expected softcap finite and at least 0"),
    ({"softcap": float("nan")}, "expected softcap finite"),
    ({"rng_state": torch.zeros(2)}, "expected rng_state as a contiguous int64"),
    ({"rng_state": None}, "needs rng_state"),
]


@pytest.mark.parametrize("options, message", FLASH_OPTIONS, ids=lambda o: str(o)[:30])
def test_bad_options_of_the_fused_op(options, message) -> None:
    q = tensor(*Q)
    p = 0.5 if "rng_state" in options else 0.0
    with pytest.raises(RuntimeError, match=message):
        ops.flash_attention_forward(q, q, q, None, p, **options)


def test_bad_arguments_of_backward() -> None:
    q = torch.randn(Q)
    out, lse = ops.flash_attention_forward(q, q, q)
    good = [out, q, q, q, out, lse, None, 0.0, False, None, [True] * 4]
    for index, bad, message in [
        (0, out[:, :, :3], "expected grad_out of shape"),
        (0, out.half(), "expected grad_out of query's dtype"),
        (4, out[..., :4], "expected out of shape"),
        (5, lse[:1], "expected logsumexp of shape"),
        (5, lse.double(), "expected logsumexp as forward returned it"),
        (5, lse.transpose(1, 2).contiguous().transpose(1, 2), "expected logsumexp as forward"),
    ]:
        args = [*good[:index], bad, *good[index + 1 :]]
        with pytest.raises(RuntimeError, match=message):
            ops.flash_attention_backward(*args)


def test_bad_arguments_of_stages() -> None:
    scores = torch.randn(2, 3, 4, 5)
    for call, message in [
        (lambda: ops.scale(scores.long(), 1.0), "expected scores of dtype float32"),
        (lambda: ops.scale(scores, float("nan")), "expected a finite scale"),
        (lambda: ops.softmax(torch.randn(1, 1, 1, 1, 2)), "at most 4 dimensions"),
        (lambda: ops.softmax_backward(scores, scores[:1]), "expected output of shape"),
        (lambda: ops.softmax_backward(scores, scores.half()), "grad_output's dtype Float"),
        (lambda: ops.masked_fill(scores, torch.ones(5), 0.0), "expected mask of dtype bool"),
        (
            lambda: ops.masked_fill(scores, torch.ones(4, 4, dtype=torch.bool), 0.0),
            "expected mask broadcastable to",
        ),
        (
            lambda: ops.masked_fill_(torch.zeros(1).expand(5), torch.ones(5).bool(), 0.0),
            "scores is expanded",
        ),
        (lambda: ops.dropout(scores, 2.0, torch.zeros(2).long()), "expected a dropout probability"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()


@pytest.mark.gpu
def test_devices_mixed() -> None:
    q, cuda = tensor(*Q), tensor(*Q, device="cuda")
    for op in (ops.naive_attention, ops.inplace_attention, ops.flash_attention_forward):
        with pytest.raises(
            RuntimeError, match="expected key on the device of query, cuda:0, got cpu"
        ):
            op(cuda, q, cuda)
        with pytest.raises(RuntimeError, match="expected attn_mask on the device of query"):
            op(cuda, cuda, cuda, torch.ones(6, 6))
