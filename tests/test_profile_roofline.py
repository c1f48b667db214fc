"""Peaks by device, and the verdict on what limits a call."""

from __future__ import annotations

import pytest

from attn_ext.profile.roofline import bound, peaks, place


@pytest.mark.parametrize(
    ("device", "title", "bf16", "gbps"),
    [
        ("NVIDIA H200", "H200 SXM", 989.4, 4800.0),
        ("NVIDIA H200 NVL", "H200 NVL", 835.5, 4800.0),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989.4, 3350.0),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756.0, 2039.0),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB", 312.0, 2039.0),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80 GB", 312.0, 1935.0),
        ("NVIDIA A100-SXM4-40GB", "A100 40 GB", 312.0, 1555.0),
        ("NVIDIA L40", "L40", 181.0, 864.0),
        ("NVIDIA L40S", "L40S", 362.0, 864.0),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 165.2, 1008.0),
    ],
)
def test_peaks_by_name(device: str, title: str, bf16: float, gbps: float) -> None:
    found = peaks(device)
    assert found is not None
    assert (found.title, found.tflops["bf16"], found.gbps) == (title, bf16, gbps)


@pytest.mark.parametrize(
    "device", ["", "NVIDIA H20", "NVIDIA GeForce RTX 4090 D", "NVIDIA L4000", "Tesla T4", "A100"]
)
def test_an_unknown_device_has_no_peaks(device: str) -> None:
    assert peaks(device) is None
    assert place(device, "bf16", 10**9, 10**6, 10.0) is None


def test_both_sides_of_the_ridge() -> None:
    ridge = 989.4e3 / 4800
    low = place("NVIDIA H200", "bf16", int(ridge * 1e6 * 0.5), 10**6, 1.0)
    assert low is not None and low.limit == "memory" and low.ridge == pytest.approx(ridge)
    assert low.gbps == pytest.approx(1000.0) and low.percent == pytest.approx(100 / 4.8)
    high = place("NVIDIA H200", "fp16", 989_400 * 10**3, 10**6, 2.0)
    assert high is not None and high.limit == "compute" and high.percent == pytest.approx(50.0)
    assert str(high).startswith("50 % of the compute peak of H200 SXM: 494.7 TFLOP/s, ")


@pytest.mark.parametrize(
    ("dtype", "flops", "size", "gpu_us"),
    [("fp64", 1, 1, 1.0), (None, 1, 1, 1.0), ("bf16", None, 1, 1.0), ("bf16", 1, None, 1.0),
     ("bf16", 1, 1, 0.0)],
)  # fmt: skip
def test_unknown_work_has_no_place(dtype: str, flops: int, size: int, gpu_us: float) -> None:
    assert place("NVIDIA H200", dtype, flops, size, gpu_us) is None


@pytest.mark.parametrize(
    ("gpu", "cpu", "verdict"),
    [(100.0, 20.0, "GPU"), (90.0, 100.0, "GPU"), (80.0, 100.0, "mixed"), (70.0, 100.0, "CPU"),
     (1.0, 100.0, "CPU")],
)  # fmt: skip
def test_the_longer_time_binds(gpu: float, cpu: float, verdict: str) -> None:
    found = bound(gpu, cpu)
    assert found == (verdict, gpu, cpu)


@pytest.mark.parametrize(("gpu", "cpu"), [(None, 1.0), (1.0, None), (0.0, 1.0), (1.0, 0.0)])
def test_no_verdict_without_both_times(gpu: float, cpu: float) -> None:
    assert bound(gpu, cpu) is None
