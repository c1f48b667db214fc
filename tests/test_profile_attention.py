"""Attention found in traces: which ops are it, forward and backward apart, its shape and work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from traces import kernel, launch, op, span, trace

import attn_ext
from attn_ext.profile import Region, Trace
from attn_ext.profile.attention import BACKWARD, FORWARD
from attn_ext.profile.shape import Shape

DATA = Path(__file__).parent / "data" / "h200"
SHAPE = (2, 4, 64, 32)


def inputs(kv_heads: int = 4) -> list[torch.Tensor]:
    sizes = (SHAPE, (2, kv_heads, 64, 32), (2, kv_heads, 64, 32))
    return [torch.randn(size, requires_grad=True) for size in sizes]


def unfused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    scores = q @ k.transpose(-2, -1) * q.shape[3] ** -0.5
    return torch.softmax(scores.masked_fill(future, -torch.inf), -1) @ v


def math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def ours(backend: str) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: attn_ext.scaled_dot_product_attention(
        q, k, v, is_causal=True, backend=backend
    )


def record(path: Path, call: Callable[[], Any], shapes: bool = True) -> Trace:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=shapes) as profiler:
        call()
    profiler.export_chrome_trace(str(path / "t.json"))
    return Trace.load(path / "t.json")


@pytest.mark.parametrize("table", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_positions_are_those_of_the_schemas(table: dict[str, Any]) -> None:
    """As far as this torch has the ops: a new release that moves an argument shows up here."""
    known = 0
    for name, signature in table.items():
        for namespace in (torch.ops.aten, torch.ops.attn_ext):
            if not hasattr(namespace, name):
                continue
            packet = getattr(namespace, name)
            arguments = [a.name for a in getattr(packet, packet.overloads()[0])._schema.arguments]
            assert arguments[signature.query : signature.query + 3] == ["query", "key", "value"]
            if signature.causal is not None:
                assert arguments[signature.causal] == "is_causal", name
            if signature.mask is not None:
                assert arguments[signature.mask] in ("attn_mask", "attn_bias", "bias"), name
            known += 1
    assert known >= 6


@pytest.mark.parametrize("heads,kv_heads,seq_q,seq_k", [(12, 12, 64, 64), (32, 8, 16, 48)])
def test_flops_are_those_of_torchs_counter(
    heads: int, kv_heads: int, seq_q: int, seq_k: int
) -> None:
    q = torch.randn(1, heads, seq_q, 64, requires_grad=True)
    k, v = (torch.randn(1, kv_heads, seq_k, 64, requires_grad=True) for _ in range(2))
    shape = Shape(1, heads, kv_heads, seq_q, seq_k, 64, 64, "fp32", 4, True)
    with FlopCounterMode(display=False) as forward:
        out = attn_ext.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True, backend="flash"
        )
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == shape.flops()
    assert backward.get_total_flops() == shape.flops(backward=True)


def test_flops_of_the_reported_case() -> None:
    shape = Shape(1, 12, 12, 64, 64, 64, 64)
    assert (shape.flops(), shape.flops(backward=True)) == (12582912, 31457280)


@pytest.mark.parametrize("seq_q,seq_k", [(5, 5), (3, 7), (7, 3), (1, 4), (4, 1)])
def test_pairs_that_a_causal_mask_shows(seq_q: int, seq_k: int) -> None:
    seen = int(torch.ones(seq_q, seq_k).tril().sum())
    shape = Shape(2, 3, 3, seq_q, seq_k, 8, 16, "fp16", 2, True)
    assert shape.seen_pairs == 6 * seen
    assert shape.flops(seen=True) == 2 * 6 * seen * (8 + 16)
    assert shape.flops(True, seen=True) == 2 * 6 * seen * (3 * 8 + 2 * 16)


def test_bytes_by_hand() -> None:
    shape = Shape(2, 8, 2, 10, 20, 16, 32, "bf16", 2, None, mask_bytes=200)
    query, out, key, value = 2 * 8 * 10 * 16, 2 * 8 * 10 * 32, 2 * 2 * 20 * 16, 2 * 2 * 20 * 32
    assert shape.bytes() == 2 * (query + key + value + out) + 200
    logsumexp = 4 * 2 * 8 * 10
    assert shape.bytes(backward=True) == 4 * (query + key + value + out) + logsumexp + 200
    assert Shape(1, 1, 1, 1, 1, 1, 1).bytes() is None


@pytest.mark.parametrize(
    ("attention", "backend"),
    [(unfused, "unfused"), (math, "math"), (sdpa, "sdpa_flash"), (ours("naive"), "naive"),
     (ours("inplace"), "inplace"), (ours("flash"), "flash")],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_real_calls_are_found(tmp_path: Path, attention: Any, backend: str) -> None:
    """Two layers, forward and backward: each call once, with the shape, and nothing in two."""
    q, k, v = inputs()

    def step() -> None:
        attention(attention(q, k, v).relu(), k, v).sum().backward()

    step()
    found = record(tmp_path, step)
    regions = found.attention()
    assert [region.calls[0].backward for region in regions] == [False, False, True, True]
    assert {region.calls[0].backend for region in regions} == {backend}
    assert regions[2].calls[0].forward is regions[1].calls[0]
    assert regions[3].calls[0].forward is regions[0].calls[0]
    for region in regions:
        shape = region.calls[0].shape
        assert shape is not None and shape.dtype == "fp32"
        assert (shape.batch * shape.heads, shape.seq_q, shape.seq_k) == (8, 64, 64)
        assert shape.causal is (None if backend == "unfused" else True)
        assert region.ops and region.cpu_us > 0
    owned = [id(op) for region in regions for op in region.ops]
    assert len(owned) == len(set(owned))
    names = {op.name for region in regions for op in region.ops}
    assert not names & {"aten::relu", "aten::sum", "ReluBackward0"}


def test_grouped_heads_and_a_mask(tmp_path: Path) -> None:
    q, k, v = inputs(kv_heads=2)
    mask = torch.zeros(2, 1, 64, 64)
    (region,) = record(
        tmp_path, lambda: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    ).attention()
    shape = region.calls[0].shape
    assert shape is not None and (shape.heads, shape.kv_heads) == (4, 2)
    assert shape.mask_bytes == mask.numel() * 4 and shape.causal is False


def test_without_shapes_the_work_is_unknown(tmp_path: Path) -> None:
    q, k, v = inputs()
    regions = record(tmp_path, lambda: unfused(q, k, v).sum().backward(), shapes=False).attention()
    assert [region.calls[0].backward for region in regions] == [False, True]
    for region in regions:
        assert (region.flops, region.bytes, region.tflops) == (None, None, None)


def test_recomputed_and_repeated_backwards(tmp_path: Path) -> None:
    q, k, v = inputs()
    regions = record(
        tmp_path, lambda: checkpoint(sdpa, q, k, v, use_reentrant=False).sum().backward()
    ).attention()
    # The forward that is computed again runs inside the node of the backward, which waits for it.
    assert [region.calls[0].backward for region in regions] == [False, True, False]
    assert {op.name for op in regions[2].ops} >= {op.name for op in regions[0].ops}

    def twice() -> None:
        out = unfused(q, k, v).sum()
        out.backward(retain_graph=True)
        out.backward()

    regions = record(tmp_path, twice).attention()
    assert [region.calls[0].backward for region in regions] == [False, True, True]
    assert len(regions[1].ops) == len(regions[2].ops)


def test_what_is_no_attention(tmp_path: Path) -> None:
    a, b = torch.randn(2, 8, 8), torch.randn(2, 8, 8)
    layer = torch.nn.Linear(8, 8)

    def others() -> None:
        layer(torch.softmax(layer(a), -1))
        torch.bmm(a, b)
        torch.bmm(a, b).softmax(-1).sum()
        torch.bmm(torch.randn(2, 3, 8), b)
        torch.bmm(a, b).bmm(a)

    found = record(tmp_path, others)
    assert found.attention() == [] and found.calls == []


def h200(run: str, variant: str) -> Trace:
    (path,) = (DATA / run).glob(f"*_64_{variant}_*.json.gz")
    return Trace.load(path)


@pytest.mark.parametrize(
    ("variant", "kernels", "copies", "tensor_cores"),
    [("naive", 5, 1, True), ("inplace", 5, 0, True), ("math", 20, 0, False),
     ("flash", 1, 0, True), ("sdpa_efficient", 1, 0, True), ("sdpa_flash", 1, 0, True),
     ("sdpa_cudnn", 1, 0, True)],
)  # fmt: skip
def test_forms_of_attention_on_an_h200(
    variant: str, kernels: int, copies: int, tensor_cores: bool
) -> None:
    found = h200("forward", variant)
    regions = found.attention()
    assert len(regions) == len(found.steps) == 3
    for region, step in zip(regions, found.steps, strict=True):
        assert (len(region.kernels), len(region.memcpy)) == (kernels, copies)
        assert region.tensor_cores is tensor_cores
        assert region.calls[0].backend == variant and step.calls == region.calls
        assert region.flops == 4 * 8 * 16 * 1024**2 * 64 and region.gpu_us == step.gpu_us
        assert region.bytes == 4 * 8 * 16 * 1024 * 64 * 2
        tflops = (8 * 16 * 1024 * 1025 // 2) * 4 * 64 / region.gpu_us / 1e6
        assert region.tflops == pytest.approx(tflops)
        assert region.roofline is not None and region.roofline.limit == "compute"
        assert region.roofline.percent == pytest.approx(100 * tflops / 989.4)


@pytest.mark.parametrize(
    ("variant", "kernels"),
    [("naive", (5, 7)), ("math", (20, 12)), ("flash", (1, 3)), ("sdpa_cudnn", (1, 3))],
)
def test_both_directions_on_an_h200(variant: str, kernels: tuple[int, int]) -> None:
    """The gradient is computed on autograd's own thread."""
    found = h200("backward", variant)
    forward, backward = found.attention(backward=False), found.attention(backward=True)
    assert len(forward) == len(backward) == 3
    for one, other in zip(forward, backward, strict=True):
        assert (len(one.kernels), len(other.kernels)) == kernels
        assert other.calls[0].forward is one.calls[0]
        assert other.flops == 10 * 8 * 16 * 1024**2 * 64
        assert one.span.tid != other.span.tid


def test_compiled_math_is_an_unfused_attention() -> None:
    (region, *_) = h200("compile", "math").attention()
    assert region.name == "unfused attention" and region.tensor_cores is False
    assert [k.name[:6] for k in region.kernels] == ["sm80_x", "triton", "triton", "sm80_x"]


def test_calls_on_two_threads_do_not_mix() -> None:
    name = "aten::_scaled_dot_product_flash_attention"
    other = op(name, 1.0, 10.0) | {"tid": 99}
    found = trace(
        op(name, 0.0, 10.0), other, launch(1, 2.0), launch(2, 3.0, tid=99), launch(3, 4.0, tid=77),
        kernel(1, 50.0, 1.0), kernel(2, 51.0, 2.0), kernel(3, 60.0, 4.0),
    )  # fmt: skip
    assert [region.gpu_us for region in found.attention()] == [1.0, 2.0]


def test_waiting_is_no_issuing() -> None:
    found = trace(
        span("step", 0.0, 100.0), launch(1, 5.0), kernel(1, 20.0, 60.0),
        launch(2, 10.0, "cudaDeviceSynchronize", duration=75.0),
    )  # fmt: skip
    (region,) = found.regions("step")
    assert region.cpu_us == 25.0 and region.bound is not None
    assert region.bound.verdict == "GPU" and str(region.bound) == "GPU (GPU 60.0 us, CPU 25.0 us)"


def test_a_call_whose_kernel_was_lost_has_no_rates() -> None:
    shapes = {"Input Dims": [[1, 1, 8, 8]] * 3, "Input type": ["float"] * 3}
    name = "aten::_scaled_dot_product_flash_attention"
    found = trace(op(name, 0.0, 10.0, **shapes), launch(1, 1.0), kernel(1, 20.0, 1.0),
                  launch(2, 2.0))  # fmt: skip
    (region,) = found.attention()
    assert region.flops == 4 * 64 * 8 and len(region.lost) == 1
    assert (region.tflops, region.gbps, region.bound, region.roofline) == (None,) * 4


@pytest.mark.parametrize(
    "dims",
    [[[1, 1, 8, 8]] * 2, [[1, 1, 8, 8], [1, 1, 8, 4], [1, 1, 8, 4]], [[], [], []], "text", None,
     [[8], [8], [8]], [[1, 1, 8, 8], [1, 1, 8, 8], [1, 1, 9, 8]], [[[1], [2]], [[1]], [[1]]]],
)  # fmt: skip
def test_odd_shapes_are_unknown(dims: Any) -> None:
    (region,) = trace(
        op("aten::_scaled_dot_product_flash_attention", 0.0, 10.0, **{"Input Dims": dims})
    ).attention()
    assert isinstance(region, Region) and region.flops is None


def test_ops_of_other_packages_are_told_by_name() -> None:
    names = ["flash_attn_3::fwd_flash_attn", "xformers_flash::flash_attn_varlen", "my::fmha_bwd"]
    found = trace(*(op(name, 20.0 * at, 10.0) for at, name in enumerate(names)))
    assert [(call.backend, call.backward) for call in found.calls] == [
        ("other", False), ("other", False), ("other", True),
    ]  # fmt: skip
