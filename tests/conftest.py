"""Fixtures: every test that takes `device` runs on the CPU, and on CUDA under `-m gpu`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

# Kineto reads its level once in a process, at the first profile; later releases print two lines a
# session below this one, and tests of the profiler look at what is printed.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda":
        assert torch.cuda.is_available(), "tests marked gpu need a CUDA device"
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def fresh_seed(request: pytest.FixtureRequest) -> None:
    """Each test draws its own data, the same in every run of that test."""
    torch.manual_seed(sum(map(ord, request.node.nodeid)))


@pytest.fixture
def one_thread():
    """For models so small that more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run_python():
    """Runs Python code in a process of its own, with these environment variables on top."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run
