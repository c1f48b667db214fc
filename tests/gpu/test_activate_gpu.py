"""attn_ext.activate() on CUDA: reached under F.sdpa, one kernel, and torch's where it must be."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import attn_ext

pytestmark = pytest.mark.gpu
aten = torch.ops.aten
sdpa = F.scaled_dot_product_attention


def operands(*shape: int, layout: str = "bhsd", dtype=torch.bfloat16) -> list[torch.Tensor]:
    batch, heads, rows, dim = shape or (2, 4, 256, 64)

    def one() -> torch.Tensor:
        if layout == "bshd":
            return torch.randn(batch, rows, heads, dim, device="cuda").to(dtype).transpose(1, 2)
        return torch.randn(batch, heads, rows, dim, device="cuda").to(dtype)

    return [one().requires_grad_() for _ in range(3)]


def device_events(call) -> list[str]:
    """Names of the kernels, copies and fills of a call."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return [e.name for e in profiler.events() if e.device_type == DeviceType.CUDA]


def test_the_pin_reaches_ours_with_one_launch() -> None:
    inputs = [t.detach() for t in operands()]
    with attn_ext.activated():
        names = device_events(lambda: sdpa(*inputs, is_causal=True))
    assert len(names) == 1 and names[0].startswith("attn_flash_fwd"), names
    names = device_events(lambda: sdpa(*inputs, is_causal=True))
    assert not any(name.startswith("attn_") for name in names), names


def test_the_pin_holds_where_cuda_is_not_initialised_yet(run_python) -> None:
    """torch settles its order of backends at its first choice, which comes after the pin here."""
    done = run_python(
        "import attn_ext, torch; attn_ext.activate()\n"
        "assert not torch.cuda.is_initialized()\n"
        "q = torch.randn(1, 2, 128, 64, device='cuda', dtype=torch.float16)\n"
        "out = torch.nn.functional.scaled_dot_product_attention(q, q, q)\n"
        "own = attn_ext.scaled_dot_product_attention(q, q, q, backend='flash')\n"
        "assert torch.equal(out, own) and torch._C._get_sdp_priority_order()[0] == 1\n"
        "attn_ext.deactivate(); print(torch._C._get_sdp_priority_order())"
    )
    assert done.returncode == 0, done.stderr
    order = run_python(
        "import torch; q = torch.randn(1, 2, 128, 64, device='cuda', dtype=torch.float16)\n"
        "torch.nn.functional.scaled_dot_product_attention(q, q, q)\n"
        "print(torch._C._get_sdp_priority_order())"
    )
    assert done.stdout == order.stdout


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    "shape", [(2, 4, 256, 64), (1, 1, 33, 80), (2, 3, 1, 128), (1, 2, 65, 256)]
)
def test_results_lie_in_memory_as_torchs_do(shape, layout) -> None:
    inputs = [t.detach() for t in operands(*shape, layout=layout)]

    def run() -> list:
        out = list(aten._scaled_dot_product_flash_attention(*inputs, 0.0, True))
        grads = aten._scaled_dot_product_flash_attention_backward(
            torch.ones_like(out[0]), *inputs, *out[:2], *out[2:6], 0.0, True, *out[6:8]
        )
        return [*out, *grads]

    native = run()
    with attn_ext.activated():
        own = run()
    for index, (mine, theirs) in enumerate(zip(own, native, strict=True)):
        if isinstance(theirs, torch.Tensor):
            kind = mine.shape, mine.stride(), mine.dtype, mine.device
            assert kind == (theirs.shape, theirs.stride(), theirs.dtype, theirs.device), index
        else:
            assert mine == theirs, index
    for index in (0, 1, 9, 10, 11):
        torch.testing.assert_close(own[index], native[index], atol=3e-2, rtol=3e-2)


def test_dropout_is_torchs_with_torchs_pattern() -> None:
    inputs = operands()

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = sdpa(*inputs, dropout_p=0.3)
        return [out, *torch.autograd.grad(out.sum(), inputs[2:])]

    native = run()
    with attn_ext.activated():
        own = run()
    assert torch.equal(own[0], native[0])
    torch.testing.assert_close(own[1], native[1])


def test_deterministic_backward() -> None:
    inputs = operands(1, 2, 1024, 64)

    def grads() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(sdpa(*inputs, is_causal=True).sum(), inputs)

    torch.use_deterministic_algorithms(True)
    try:
        with attn_ext.activated():
            first = grads()
            for _ in range(5):
                for a, b in zip(first, grads(), strict=True):
                    assert torch.equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)


def test_cuda_graph() -> None:
    inputs = [t.detach() for t in operands()]
    with attn_ext.activated():
        for _ in range(3):
            sdpa(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sdpa(*inputs)
        inputs[0].normal_()
        graph.replay()
        assert torch.equal(out, sdpa(*inputs))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 3)], ids=str)
def test_varlen_attn(window) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, k, v = (torch.randn(90, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    offsets = torch.tensor([0, 20, 90], dtype=torch.int32, device="cuda")
    options = {"window_size": window}
    if "window_size" not in inspect.signature(varlen.varlen_attn).parameters:  # before torch 2.11
        options = {"is_causal": window == (-1, 0)}
        if window == (7, 3):
            pytest.skip("varlen_attn has no windows yet")

    def run() -> list[torch.Tensor]:
        out = varlen.varlen_attn(*inputs, offsets, offsets, 70, 70, **options)
        return [out, *torch.autograd.grad(out.sum(), inputs)]

    native = run()
    with attn_ext.activated():
        own = run()
        names = device_events(
            lambda: varlen.varlen_attn(*inputs, offsets, offsets, 70, 70, **options)
        )
    assert any(name.startswith("attn_flash_fwd") for name in names), names
    for mine, theirs in zip(own, native, strict=True):
        torch.testing.assert_close(mine, theirs, atol=3e-2, rtol=3e-2)


def test_nested_tensors() -> None:
    """Jagged batches come to the packed op."""
    values = [torch.randn(n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in (30, 50)]
    nested = torch.nested.nested_tensor(values, layout=torch.jagged).transpose(1, 2)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected = sdpa(nested, nested, nested).values()
        with attn_ext.activated():
            out = sdpa(nested, nested, nested).values()
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


CONTEXT_PARALLEL = """
import os, torch, torch.distributed as dist, torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
import attn_ext

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
torch.manual_seed(0)
whole = [torch.randn(2, 4, 512, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
expected = F.scaled_dot_product_attention(*whole, is_causal=True)
expected = [expected, *torch.autograd.grad(expected, whole, torch.ones_like(expected))]
parts = [tensor.detach().clone() for tensor in whole]
with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2, 2, 2]), attn_ext.activated():
    own = [part.requires_grad_() for part in [part.detach().clone() for part in parts]]
    with torch.profiler.profile() as profiler:
        out = F.scaled_dot_product_attention(*own, is_causal=True)
        results = [out, *torch.autograd.grad(out, own, torch.ones_like(out))]
        torch.cuda.synchronize()
    results = context_parallel_unshard(mesh, results, [2] * 4)
for result, truth in zip(results, expected, strict=True):
    torch.testing.assert_close(result, truth, atol=3e-2, rtol=3e-2)
names = {event.key for event in profiler.key_averages()}
assert any(name.startswith("attn_flash_fwd") for name in names), names
assert any(name.startswith("attn_flash_bwd") for name in names), names
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_context_parallel(ranks, tmp_path) -> None:
    """Each rank holds a share of the length; torch merges what our kernel gives for each part."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    script = tmp_path / "context_parallel.py"
    script.write_text(CONTEXT_PARALLEL)
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", *launch], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
