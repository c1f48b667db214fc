"""Occupancy against NVIDIA's own calculator, the header cuda_occupancy.h, compiled on the spot."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from attn_ext.profile import Event
from attn_ext.profile.occupancy import Device, block_limits, devices, occupancy_of

KIB = 1024
PROGRAM = r"""
#include <stdio.h>
#include "cuda_occupancy.h"
int main(void) {
  int major, minor, sm_threads, regs, threads, optin;
  size_t per_block, per_block_optin, per_sm, shared;
  while (scanf("%d %d %d %zu %zu %zu %d %zu %d %d", &major, &minor, &sm_threads, &per_block,
               &per_block_optin, &per_sm, &regs, &shared, &threads, &optin) == 10) {
    cudaOccDeviceProp p = {major, minor, 1024, sm_threads, 65536, 65536, 32, per_block, per_sm,
                           1, per_block_optin, 1024};
    cudaOccFuncAttributes f = {1024, regs, 0, PARTITIONED_GC_OFF,
                               optin ? FUNC_SHMEM_LIMIT_OPTIN : FUNC_SHMEM_LIMIT_DEFAULT,
                               optin ? shared : 0, 0, 0};
    cudaOccDeviceState s = {CACHE_PREFER_NONE, SHAREDMEM_CARVEOUT_DEFAULT};
    cudaOccResult r;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &f, &s, threads, shared)) return 1;
    printf("%d %u\n", r.activeBlocksPerMultiprocessor, r.limitingFactors);
  }
  return 0;
}
"""
BITS = {"warps": 1, "registers": 2, "shared memory": 4, "blocks": 8}


def device(major: int, minor: int, threads: int, optin: int, shared: int, sms: int) -> Device:
    """Sizes of shared memory in KiB."""
    return Device(
        f"sm_{major}{minor}", (major, minor), sms, 1024, threads, 65536, 65536, 48 * KIB,
        optin * KIB, shared * KIB,
    )  # fmt: skip


A100 = device(8, 0, 2048, 163, 164, 108)
H200 = device(9, 0, 2048, 227, 228, 132)
DEVICES = [
    A100,
    device(8, 6, 1536, 99, 100, 84),
    device(8, 9, 1536, 99, 100, 142),
    H200,
    device(10, 0, 2048, 227, 228, 148),
]


def header() -> Path:
    folders = [Path(os.environ["CUDA_HOME"])] if "CUDA_HOME" in os.environ else []
    nvcc = shutil.which("nvcc")
    folders += [Path(nvcc).resolve().parent.parent] if nvcc else []
    folders += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    for folder in folders:
        for path in (folder / "include", *folder.glob("targets/*/include")):
            if (path / "cuda_occupancy.h").is_file():
                return path
    pytest.skip("no cuda_occupancy.h: it comes with the CUDA toolkit, looked for beside nvcc")


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("occupancy")
    (folder / "program.c").write_text(PROGRAM)
    command = ["gcc", "-std=gnu11", "-I", str(header()), "program.c", "-o", "program"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "program"


def test_every_limit_is_nvidias(calculator: Path) -> None:
    """Thousands of random kernels, with sizes of shared memory round the borders among them."""
    draw = random.Random(0)
    sizes = [0, 1, 48 * KIB - 1024, 48 * KIB - 1, 48 * KIB, 48 * KIB + 1]
    kernels, lines = [], []
    for _ in range(8000):
        one = draw.choice(DEVICES)
        most = one.shared_per_block_optin
        shared = draw.choice([*sizes, most, most + 1, draw.randint(0, most + 200)])
        registers = draw.choice([0, 255, 256, 257, draw.randint(1, 255), draw.randint(1, 64)])
        threads = draw.choice([1, 31, 32, 33, 1024, 1025, 32 * draw.randint(1, 32)])
        optin = draw.random() < 0.7
        kernels.append((one, registers, shared, threads, optin))
        numbers = [*one.capability, one.threads_per_sm, one.shared_per_block, most,
                   one.shared_per_sm, registers, shared, threads, int(optin)]  # fmt: skip
        lines.append(" ".join(map(str, numbers)))
    done = subprocess.run(
        [calculator], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    answers = done.stdout.split("\n")[:-1]
    assert len(answers) == len(kernels)
    seen = set()
    for given, answer in zip(kernels, answers, strict=True):
        blocks, factors = map(int, answer.split())
        limits = block_limits(*given)
        assert limits is not None and min(limits.values()) == blocks, (given, limits, blocks)
        bits = sum(BITS[name] for name, limit in limits.items() if limit == blocks)
        assert bits == factors or blocks == 0, (given, limits, factors)
        seen.add(factors)
    assert {1, 2, 4, 8} <= seen, "each limit was the only one somewhere"


def run(
    regs: int, shared: int, block: list[int], grid: list[int], on: Device,
    changes: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    args = {"registers per thread": regs, "shared memory": shared, "block": block, "grid": grid,
            "device": 0}  # fmt: skip
    args |= changes or {}
    return occupancy_of(Event("k", "kernel", 0.0, 10.0, 0, 7, args), {0: on})


@pytest.mark.parametrize(
    ("on", "regs", "threads", "shared", "percent", "limiter"),
    [
        (A100, 255, 128, 49152, 12.5, "registers"),
        (A100, 255, 128, 49153, 12.5, "registers"),
        (A100, 240, 256, 80 * KIB, 12.5, "registers"),
        (H200, 168, 384, 200 * KIB, 18.75, "registers"),
        (H200, 168, 384, 213188, 18.75, "registers"),  # a GEMM of cuBLAS, nvjet
        (H200, 32, 128, 100 * KIB, 12.5, "shared memory"),
        (H200, 32, 1024, 0, 100.0, "warps"),
        (H200, 16, 32, 0, 50.0, "blocks"),
    ],
)
def test_theoretical_occupancy(
    on: Device, regs: int, threads: int, shared: int, percent: float, limiter: str
) -> None:
    found = run(regs, shared, [threads, 1, 1], [10_000, 1, 1], on)
    assert found.theoretical_percent == found.achieved_percent == percent
    assert limiter in found.limiters and found.waves > 1


def test_a_grid_smaller_than_a_wave() -> None:
    """16 blocks of 128 threads on 132 SMs of 2048 threads: 0.76 %, not 0."""
    found = run(168, 40 * KIB, [128, 1, 1], [16, 1, 1], H200)
    assert found.achieved_percent == pytest.approx(100 * 16 * 128 / (132 * 2048))
    assert found.theoretical_percent == 18.75 and found.waves == pytest.approx(16 / (132 * 3))
    assert "0.8 % achieved" in str(found) and "smaller than one wave" in str(found)


def test_kinetos_figure_is_kept_and_explained() -> None:
    key = "est. achieved occupancy %"
    found = run(168, 213188, [384, 1, 1], [132, 8, 1], H200, {key: 0})
    assert (found.kineto_percent, found.achieved_percent) == (0.0, 18.75)
    assert "Kineto allows 48 KiB of shared memory and this kernel has 208.2 KiB" in str(found)
    agrees = run(32, 0, [128, 1, 1], [10_000, 1, 1], H200, {key: 100})
    assert agrees.kineto_why is None
    assert run(32, 0, [128, 1, 1], [999, 1, 1], H200).kineto_percent is None
    tiny = run(168, 0, [32, 1, 1], [132, 1, 1], H200, {key: 2})  # 1.5625 %
    assert tiny.kineto_why is None
    odd = run(32, 0, [128, 1, 1], [10_000, 1, 1], H200, {key: 50})
    assert odd.kineto_why == "the trace says 50 %"


@pytest.mark.parametrize(
    "args",
    [{"grid": None}, {"block": []}, {"block": [0, 1, 1]}, {"registers per thread": None},
     {"shared memory": "much"}, {"device": 5}, {"device": None}, {"block": [2048, 1, 1]}],
)  # fmt: skip
def test_what_a_trace_does_not_say_is_unknown(args: dict[str, Any]) -> None:
    assert run(32, 0, [128, 1, 1], [10, 1, 1], H200, args) is None


def test_an_unknown_capability_is_unknown() -> None:
    newer = device(19, 0, 2048, 227, 228, 132)
    assert run(32, 0, [128, 1, 1], [10, 1, 1], newer) is None


def test_device_properties_of_a_trace() -> None:
    whole = {
        "id": 1, "name": "NVIDIA H200", "computeMajor": 9, "computeMinor": 0, "numSms": 132,
        "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048, "regsPerBlock": 65536,
        "regsPerMultiprocessor": 65536, "sharedMemPerBlock": 49152,
        "sharedMemPerBlockOptin": 232448, "sharedMemPerMultiprocessor": 233472, "warpSize": 32,
    }  # fmt: skip
    partly = {key: value for key, value in whole.items() if key != "numSms"} | {"id": 2}
    found = devices({"deviceProperties": [whole, partly, "text", {"id": 3}]})
    assert list(found) == [1]
    assert found[1] == Device(
        "NVIDIA H200", (9, 0), 132, 1024, 2048, 65536, 65536, 49152, 232448, 233472
    )
    assert devices({}) == devices({"deviceProperties": None}) == {}
