"""The profiler's figures against counts and clocks that know nothing of CUPTI.

Kernels, copies and fills are counted as the nodes of a CUDA graph that the call is captured into;
device time is the time between two events of the stream.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attn_ext.profile import VARIANTS, Case, Summary, run
from attn_ext.profile.calls import Call, pinned, prepare

pytestmark = pytest.mark.gpu
ARTICLE = Case(batch=8, heads=16, kv_heads=16, seq=1024, head_dim=64, dtype="bf16", causal=True)
#: Long enough that the device is never idle between the kernels of a call.
LONG = Case(batch=4, heads=16, kv_heads=16, seq=4096, head_dim=64, dtype="bf16", causal=True)
CUDA = torch.device("cuda")

#: enum cudaGraphNodeType
NODES = {0: "kernels", 1: "memcpy", 2: "memset"}


@pytest.fixture(scope="module")
def article(tmp_path_factory: pytest.TempPathFactory) -> tuple[Summary, float]:
    """A run of everything at the default shape, and the seconds that it took."""
    start = time.perf_counter()
    summary = run(out=tmp_path_factory.mktemp("article"), device="cuda")
    return summary, time.perf_counter() - start


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    return run(case=LONG, out=tmp_path_factory.mktemp("long"), device="cuda")


def cudart() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded."""
    maps = Path("/proc/self/maps").read_text()
    return ctypes.CDLL(sorted(set(re.findall(r"/\S*libcudart\S*", maps)))[0])


def graph_nodes(call: Callable[[], Any]) -> Counter[str]:
    """Device operations of a call by kind."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    runtime, raw = cudart(), ctypes.c_void_p(graph.raw_cuda_graph())
    number = ctypes.c_size_t()
    assert runtime.cudaGraphGetNodes(raw, None, ctypes.byref(number)) == 0
    nodes = (ctypes.c_void_p * number.value)()
    assert runtime.cudaGraphGetNodes(raw, nodes, ctypes.byref(number)) == 0
    kinds: Counter[str] = Counter()
    for node in nodes:
        kind = ctypes.c_int()
        assert runtime.cudaGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds[NODES.get(kind.value, "other")] += 1
    return kinds


def prepared(variant: str, case: Case) -> Call:
    (call,) = prepare([variant], case, CUDA)
    with pinned(call):
        for _ in range(3):
            call.make()
    torch.cuda.synchronize()
    return call


@pytest.mark.parametrize("variant", VARIANTS)
def test_operations_are_those_of_a_captured_graph(
    variant: str, article: tuple[Summary, float]
) -> None:
    row = next(row for row in article[0].rows if row.variant == variant)
    assert row.error is None and row.kernels is not None, (row.error, row.notes)
    call = prepared(variant, ARTICLE)
    with pinned(call):
        nodes = graph_nodes(call.make)
    assert nodes["other"] == 0
    assert (row.kernels, row.memcpy, row.memset) == (
        nodes["kernels"], nodes["memcpy"], nodes["memset"],
    )  # fmt: skip


@pytest.mark.parametrize("variant", ["naive", "inplace", "flash", "math", "sdpa_flash"])
def test_device_time_is_that_between_two_events(variant: str, long: Summary) -> None:
    row = next(row for row in long.rows if row.variant == variant)
    assert row.error is None and row.gpu_us is not None
    call = prepared(variant, LONG)
    rounds = []
    with pinned(call):
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(5):
                call.make()
            end.record()
            end.synchronize()
            rounds.append(start.elapsed_time(end) * 1e3 / 5)
    assert row.gpu_us == pytest.approx(sorted(rounds)[2], rel=0.05)
    assert row.bound == "GPU" and row.busy == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("variant", ["naive", "flash", "sdpa_flash"])
def test_peak_memory_is_what_torchs_allocator_gave(
    variant: str, article: tuple[Summary, float]
) -> None:
    """Counted again from the allocator's own history, which has sizes before they are rounded."""
    row = next(row for row in article[0].rows if row.variant == variant)
    call = prepared(variant, ARTICLE)
    memory: Any = torch.cuda.memory
    memory._record_memory_history(max_entries=100_000)
    try:
        with pinned(call):
            call.make()
        torch.cuda.synchronize()
        (trace,) = (t for t in memory._snapshot()["device_traces"] if t)
    finally:
        memory._record_memory_history(enabled=None)
    held = peak = 0
    for entry in trace:
        held += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * entry["size"]
        peak = max(peak, held)
    assert row.peak_bytes == pytest.approx(peak, rel=1e-3)


def test_a_run_of_everything_takes_less_than_a_minute(article: tuple[Summary, float]) -> None:
    assert article[1] < 60
    assert all(row.error is None for row in article[0].rows)


def test_the_cold_call_is_told_apart(tmp_path: Path) -> None:
    """cuDNN plans for every new shape: this one is nobody else's."""
    (row,) = run(["sdpa_cudnn"], Case(batch=3, seq=904), out=tmp_path, device="cuda").rows
    assert row.error is None and row.cold_us is not None and row.call_us is not None
    assert row.cold_us > 10 * row.call_us


def test_twenty_sessions_count_the_same_or_say_what_they_lost(tmp_path: Path) -> None:
    """CUPTI of CUDA 12.6u2 to 13.0 drops kernels, more with each session of a process."""
    case = Case(batch=1, heads=4, kv_heads=4, seq=512)
    for _ in range(20):
        (row,) = run(["flash"], case, out=tmp_path, device="cuda", steps=2, warmup=2).rows
        assert row.error is None and row.launches == 2
        assert row.kernels == 1 or (row.lost and "lost" in row.notes[0])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("variant", ["flash", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn"])
def test_flops_are_those_that_torch_counts(variant: str, backward: bool, tmp_path: Path) -> None:
    case = Case(batch=2, heads=4, kv_heads=4, seq=256, backward=backward)
    (row,) = run([variant], case, out=tmp_path, device="cuda", steps=1).rows
    assert row.error is None and row.ran == [variant]
    call = prepared(variant, case)
    with FlopCounterMode(display=False) as counted, pinned(call):
        call.make()
    assert row.flops == counted.get_total_flops() > 0
