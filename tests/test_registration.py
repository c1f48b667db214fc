"""The ops as torch sees them: opcheck, compile, autocast, vmap, FLOPs, streams, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from problems import problem, rng_state
from torch.utils.flop_counter import FlopCounterMode

import attn_ext
from attn_ext import ops

sdpa = attn_ext.scaled_dot_product_attention
OWN = ("naive", "inplace", "flash")
ATTENTION = (ops.naive_attention, ops.inplace_attention, ops.flash_attention_forward)


def opcheck(op, args: tuple, kwargs: dict | None = None) -> None:
    results = torch.library.opcheck(op.default, args, kwargs or {})
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_opcheck_stages(device, grad) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        scores = torch.randn(2, 2, 9, 16, device=device).to(dtype).requires_grad_(grad)
        mask = torch.rand(9, 16, device=device) > 0.5
        for view in (scores, scores.transpose(1, 2)):
            opcheck(ops.scale, (view, 0.5))
            opcheck(ops.softmax, (view,))
            opcheck(ops.softmax_backward, (view, view.detach()))
            opcheck(ops.dropout, (view, 0.5, rng_state(device)))
        opcheck(ops.masked_fill, (scores, mask, 0.0), {"is_causal": True})
        if not grad:
            opcheck(ops.masked_fill_, (scores, mask, 0.0))


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("op", ATTENTION, ids=lambda op: op.__name__)
def test_opcheck_attention(device, op, layout, grad) -> None:
    shape = (2, 4, 2, 17, 19, 16, 24)
    for mask in (None, "bool", "float_head"):
        case = problem(shape, torch.float32, device, layout, mask=mask)
        inputs = [t.requires_grad_(grad) for t in case.inputs()]
        args = (case.query, case.key, case.value, case.attn_mask, 0.0, mask is None)
        opcheck(op, args)
        assert inputs
    state = rng_state(device)
    opcheck(op, (case.query, case.key, case.value, None, 0.3, False), {"rng_state": state})


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_opcheck_flash_backward(device, layout) -> None:
    case = problem((2, 4, 2, 17, 19, 16, 24), torch.float32, device, layout, mask="float_head")
    out, logsumexp = ops.flash_attention_forward(case.query, case.key, case.value, case.attn_mask)
    args = (torch.randn_like(out), case.query, case.key, case.value, out, logsumexp)
    for wanted in ([True] * 4, [True, False, True, False]):
        opcheck(ops.flash_attention_backward, (*args, case.attn_mask, 0.0, False, None, wanted))


def test_fake_strides_equal_real_ones(device) -> None:
    """opcheck skips strides on CPU in some releases, so they are compared here by hand."""
    for layout in ("bhsd", "bshd", "odd", "transposed"):
        case = problem((2, 4, 2, 17, 19, 16, 24), torch.float32, device, layout)
        args = (case.query, case.key, case.value)
        for op in ATTENTION:
            real = op(*args)
            with torch._subclasses.FakeTensorMode() as mode:
                fake = op(*(mode.from_tensor(t) for t in args))
            for a, b in zip(real, fake, strict=True):
                assert a.stride() == b.stride() and a.shape == b.shape and a.dtype == b.dtype
        out, lse = ops.flash_attention_forward(*args)
        backward = (torch.randn_like(out), *args, out, lse, None, 0.0, False, None, [True] * 4)
        real = ops.flash_attention_backward(*backward)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = ops.flash_attention_backward(
                *(mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in backward)
            )
        for a, b in zip(real, fake, strict=True):
            assert a.stride() == b.stride() and a.shape == b.shape and a.dtype == b.dtype


@pytest.mark.parametrize("backend", (*OWN, "auto"))
def test_compile_without_graph_break(device, backend) -> None:
    def step(q, k, v):
        out = sdpa(q, k, v, is_causal=True, enable_gqa=True, backend=backend)
        return torch.nn.functional.gelu(out)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for layout in ("bhsd", "bshd"):
        case = problem((2, 4, 2, 24, 24, 16, 16), torch.float32, device, layout)
        inputs = [t.requires_grad_() for t in case.inputs()]
        expected, got = step(*inputs), compiled(*inputs)
        torch.testing.assert_close(got, expected)
        grad = torch.randn_like(expected)
        for a, b in zip(
            torch.autograd.grad(got, inputs, grad),
            torch.autograd.grad(expected, inputs, grad),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", OWN)
def test_compile_with_inductor(device, backend) -> None:
    def step(q, k, v):
        return sdpa(q * 2, k, v, is_causal=True, backend=backend).transpose(1, 2).relu()

    q = torch.randn(1, 2, 32, 16, device=device)
    torch.testing.assert_close(torch.compile(step, fullgraph=True)(q, q, q), step(q, q, q))


@pytest.mark.parametrize("backend", OWN)
def test_dynamic_lengths_do_not_recompile(device, backend) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(q, k, v):
        return sdpa(q, k, v, is_causal=True, backend=backend)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    first = 0
    for length in range(5, 25):  # never the head size: equal sizes share a symbol
        q = torch.randn(2, 3, length, 64, device=device)
        torch.testing.assert_close(compiled(q, q, q), step(q, q, q))
        first = first or counter.frame_count  # a compilation may restart, but happens once
    assert first and counter.frame_count == first


@pytest.mark.parametrize("backend", OWN)
def test_autocast(device, backend) -> None:
    """Runs in the autocast dtype, a float32 mask included; without autocast a mix is an error."""
    q = torch.randn(1, 2, 16, 16, device=device, requires_grad=True)
    mask = torch.randn(16, 16, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        out = sdpa(q, q, q, mask, backend=backend)
    assert out.dtype == torch.bfloat16
    half = q.detach().bfloat16()
    torch.testing.assert_close(out, sdpa(half, half, half, mask.bfloat16(), backend=backend))
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32


def test_flops_by_torchs_convention(device) -> None:
    q = torch.randn(1, 12, 64, 64, device=device, requires_grad=True)
    for backend in OWN:
        with FlopCounterMode(display=False) as counter:
            out = sdpa(q, q, q, is_causal=True, backend=backend)
        assert counter.get_total_flops() == 12582912
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        # Fused backward computes the scores again: five products, not four.
        assert counter.get_total_flops() == (31457280 if backend == "flash" else 25165824)
    kv = torch.randn(1, 3, 64, 64, device=device)
    with FlopCounterMode(display=False) as counter:
        sdpa(q, kv, kv, enable_gqa=True, backend="flash")
    assert counter.get_total_flops() == 12582912


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("backend", OWN)
def test_vmap_equals_a_loop(device, backend, is_causal) -> None:
    q, k, v = (torch.randn(5, 2, 3, 12, 8, device=device) for _ in range(3))

    def attend(q, k, v):
        return sdpa(q, k, v, is_causal=is_causal, backend=backend)

    for in_dims in ((0, None, None), (0, 0, None), (0, 1, None), (0, 0, 0)):
        key = k[0] if in_dims[1] is None else k.transpose(0, 1) if in_dims[1] else k
        value = v[0] if in_dims[2] is None else v
        ours = torch.vmap(attend, in_dims)(q, key, value)
        loop = [
            attend(q[i], k[0] if in_dims[1] is None else k[i], v[0] if in_dims[2] is None else v[i])
            for i in range(5)
        ]
        torch.testing.assert_close(ours, torch.stack(loop))


def test_vmap_randomness_is_obeyed(device) -> None:
    q = torch.randn(3, 2, 2, 16, 8, device=device)

    def attend(q):
        return sdpa(q, q, q, dropout_p=0.5, backend="flash")

    with pytest.raises(RuntimeError, match="random"):
        torch.vmap(attend)(q)
    same = torch.vmap(attend, randomness="same")(q[:1].expand_as(q))
    assert torch.equal(same[0], same[1])
    different = torch.vmap(attend, randomness="different")(q[:1].expand_as(q))
    assert not torch.equal(different[0], different[1])


def test_second_derivative_of_flash_is_refused(device) -> None:
    q = torch.randn(1, 2, 8, 8, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(sdpa(q, q, q, backend="flash").sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives of fused attention"):
        grad.square().sum().backward()


def test_logsumexp_has_no_gradient(device) -> None:
    q = torch.randn(1, 2, 8, 8, device=device, requires_grad=True)
    assert not ops.flash_attention_forward(q, q, q)[1].requires_grad


def test_activation_checkpointing_with_dropout(device) -> None:
    q = torch.randn(1, 2, 64, 16, device=device, requires_grad=True)

    def attend(q):
        return sdpa(q, q, q, dropout_p=0.5, backend="flash")

    torch.manual_seed(3)
    plain = torch.autograd.grad(attend(q).square().sum(), q)[0]
    torch.manual_seed(3)
    out = torch.utils.checkpoint.checkpoint(attend, q, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(out.square().sum(), q)[0], plain)


def test_export_and_reload(device, tmp_path) -> None:
    class Attend(torch.nn.Module):
        def forward(self, q):
            return sdpa(q, q, q, is_causal=True, backend="flash")

    q = torch.randn(1, 2, 16, 8, device=device)
    program = torch.export.export(Attend(), (q,))
    torch.export.save(program, tmp_path / "attend.pt2")
    loaded = torch.export.load(tmp_path / "attend.pt2").module()
    assert torch.equal(loaded(q), Attend()(q))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", OWN)
def test_side_stream(backend) -> None:
    """Forward and backward run on the current stream, after what is queued there."""
    shape, device = (2, 4, 128, 64), "cuda"
    data = torch.randn(shape, device=device)
    q = torch.zeros(shape, device=device, requires_grad=True)
    expected = sdpa(data, data, data, is_causal=True, backend=backend)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        with torch.no_grad():
            q.copy_(data)
        out = sdpa(q, q, q, is_causal=True, backend=backend)
        (grad,) = torch.autograd.grad(out.square().sum(), q)
        host = out.cpu(), grad.cpu()
    torch.testing.assert_close(host[0], expected.cpu())
    q2 = data.clone().requires_grad_()
    again = torch.autograd.grad(
        sdpa(q2, q2, q2, is_causal=True, backend=backend).square().sum(), q2
    )
    torch.testing.assert_close(host[1], again[0].cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", OWN)
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_cuda_graph(backend, dropout_p) -> None:
    """Captured forward and backward replay on new data, and dropout is new in each replay."""
    q = torch.randn(2, 4, 96, 64, device="cuda", requires_grad=True)

    def step():
        out = sdpa(q, q, q, dropout_p=dropout_p, is_causal=True, backend=backend)
        return out, torch.autograd.grad(out.square().sum(), q)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grad = step()
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
    graph.replay()
    first = out.clone()
    if dropout_p:
        graph.replay()
        assert not torch.equal(out, first)
    else:
        expected = step()
        torch.testing.assert_close(out, expected[0])
        torch.testing.assert_close(grad, expected[1])
