"""Guesses on what a GPU does, recorded here: the article's findings, and Kineto's occupancy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_ext
from attn_ext.testing import assert_trace, record

pytestmark = pytest.mark.gpu
SHAPE = (8, 16, 1024, 64)


@pytest.fixture(scope="module")
def qkv() -> list[torch.Tensor]:
    return [torch.randn(SHAPE, dtype=torch.bfloat16, device="cuda") for _ in range(3)]


@pytest.mark.parametrize(
    ("backend", "guess"),
    [
        ("naive", "kernels=5 memcpy=1 memcpy_bytes=256MiB tensor_cores=yes backend=naive"),
        ("inplace", "kernels=5 memcpy=0 backend=inplace"),
        ("flash", "kernels=1 memcpy=0 memset=0 kernel~attn_flash_fwd backend=flash dtype=bf16"),
    ],
)
def test_our_forms(qkv: list[torch.Tensor], backend: str, guess: str) -> None:
    assert_trace(
        lambda: attn_ext.scaled_dot_product_attention(*qkv, is_causal=True, backend=backend), guess
    )


def test_math_multiplies_without_tensor_cores(qkv: list[torch.Tensor]) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert_trace(
            lambda: F.scaled_dot_product_attention(*qkv, is_causal=True),
            "kernels=20 memcpy=0 tensor_cores=no backend=math",
        )


def test_a_guess_that_misses_is_explained(qkv: list[torch.Tensor]) -> None:
    with pytest.raises(AssertionError, match="out-of-place masked_fill copies the scores first"):
        assert_trace(
            lambda: attn_ext.scaled_dot_product_attention(*qkv, is_causal=True, backend="naive"),
            "memcpy=0",
        )


def test_kernels_past_48_kib_read_0_in_the_trace_alone(qkv: list[torch.Tensor]) -> None:
    trace = record(
        lambda: attn_ext.scaled_dot_product_attention(*qkv, is_causal=True, backend="flash")
    )
    step = trace.steps[0]
    found = step.occupancy
    assert found is not None and step.longest is not None
    assert found.theoretical_percent >= 6.25
    if step.longest.args["shared memory"] > 48 * 1024:
        assert found.kineto_percent == 0 and "Kineto allows 48 KiB" in str(found)
    else:
        assert found.kineto_why is None


def test_a_replayed_graph_is_found_by_its_kernel(qkv: list[torch.Tensor]) -> None:
    def call() -> torch.Tensor:
        return attn_ext.scaled_dot_product_attention(*qkv, is_causal=True, backend="flash")

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    trace = record(graph.replay)
    regions = trace.attention()
    assert [len(region.kernels) for region in regions] == [1, 1, 1]
    assert {region.calls[0].backend for region in regions} == {"attn_ext"}
    assert all(region.gpu_us > 0 and region.cpu_us is None for region in regions)
