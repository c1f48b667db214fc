"""What a trace shows on a GPU at 8 x 16 x 1024 x 64, bf16, causal: device operations of a call."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from attn_ext.profile import Case, Row, Summary, Trace, run
from attn_ext.profile.figures import read_trace
from attn_ext.profile.trace import STEP

pytestmark = pytest.mark.gpu
CASE = Case(batch=8, heads=16, kv_heads=16, seq=1024, head_dim=64, dtype="bf16", causal=True)


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    return run(case=CASE, out=tmp_path_factory.mktemp("profile"), device="cuda")


def row(summary: Summary, variant: str) -> Row:
    found = next(row for row in summary.rows if row.variant == variant)
    assert found.error is None, found.error
    return found


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Row:
    """The five steps of naive attention in eager torch, with a mask built beforehand."""
    shape = (CASE.batch, CASE.heads, CASE.seq, CASE.head_dim)
    query, key, value = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    future = torch.ones(CASE.seq, CASE.seq, dtype=torch.bool, device="cuda").triu(1)

    def call() -> torch.Tensor:
        scores = torch.matmul(query, key.transpose(-2, -1)) * CASE.head_dim**-0.5
        weights = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1)
        return torch.matmul(weights, value)

    path = tmp_path_factory.mktemp("eager") / "eager.json.gz"
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=0, warmup=3, active=5, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(8):
            with record_function(STEP):
                call()
            torch.cuda.synchronize()
            profiler.step()
    found = Row("eager")
    read_trace(found, Trace.load(path), on_gpu=True)
    return found


def test_every_variant_runs_and_no_kernel_is_miscounted(summary: Summary) -> None:
    for found in summary.rows:
        assert found.error is None, f"{found.variant}: {found.error}"
        assert found.launches and found.lost is not None
        if found.lost:  # CUPTI before 13.1 drops kernels: then the row must say so
            assert "lost" in found.notes[0]
        else:
            assert found.kernels_per_step == [found.kernels] * 5, found.notes
        assert found.gpu_us and found.call_us and found.cpu_us and found.peak_bytes


def test_naive_does_what_eager_torch_does(summary: Summary, eager: Row) -> None:
    naive = row(summary, "naive")
    assert (eager.kernels, eager.memcpy) == (5, 1)
    assert (naive.kernels, naive.memcpy, naive.memset) == (eager.kernels, 1, eager.memset)
    scores = CASE.batch * CASE.heads * CASE.seq**2 * 2
    assert naive.memcpy_bytes == eager.memcpy_bytes == scores


def test_in_place_drops_the_copy_alone(summary: Summary) -> None:
    naive, inplace = row(summary, "naive"), row(summary, "inplace")
    assert (inplace.kernels, inplace.memcpy, inplace.memset) == (5, 0, naive.memset)
    assert inplace.gpu_us is not None and naive.gpu_us is not None
    assert inplace.gpu_us < naive.gpu_us


@pytest.mark.parametrize(
    ("variant", "kernels"),
    [("math", 20), ("sdpa_efficient", 1), ("sdpa_flash", 1), ("sdpa_cudnn", 1)],
)
def test_kernels_of_torchs_backends(summary: Summary, variant: str, kernels: int) -> None:
    assert row(summary, variant).kernels == kernels


def test_device_time_is_call_time_where_the_device_is_never_idle(summary: Summary) -> None:
    naive = row(summary, "naive")
    assert naive.gpu_us is not None and naive.call_us is not None
    assert naive.gpu_us == pytest.approx(naive.call_us, rel=0.1)


def test_peak_memory_shows_the_matrix_of_scores(summary: Summary) -> None:
    scores = CASE.batch * CASE.heads * CASE.seq**2 * 2
    out = CASE.batch * CASE.heads * CASE.seq * CASE.head_dim * 2
    naive, flash = row(summary, "naive"), row(summary, "sdpa_flash")
    assert naive.peak_bytes is not None and flash.peak_bytes is not None
    assert naive.peak_bytes >= 2 * scores
    assert out <= flash.peak_bytes < scores
