"""What the build promises: stable ABI only, a wheel for every Python, readable failures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
LIBRARIES = sorted((ROOT / "attn_ext").glob("*.so"))


def setup_py(*args: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", *args]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300
    )


def undefined_symbols(library: Path) -> list[str]:
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    )
    return [line.split()[-1].split("@")[0] for line in listing.stdout.splitlines()]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_only_stable_symbols(library) -> None:
    """Of torch the C shim alone, of Python the limited API alone."""
    symbols = undefined_symbols(library)
    assert any(name.startswith("aoti_torch_") for name in symbols)
    unstable = [s for s in symbols if re.match(r"_ZN?K?(2at|3c10|5torch|6caffe2)", s)]
    assert not unstable, unstable
    private = [s for s in symbols if re.match(r"_Py(?!_Dealloc|_NoneStruct)", s)]
    assert not private, private


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_needs_few_libraries(library) -> None:
    listing = subprocess.run(
        ["readelf", "-d", library], capture_output=True, text=True, check=True
    ).stdout
    needed = set(re.findall(r"NEEDED.*\[(\S+?)\]", listing))
    allowed = {"libtorch_cpu.so", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6"}
    if "cuda" in library.name:
        allowed |= {"libtorch_cuda.so", "libdl.so.2", "librt.so.1", "libpthread.so.0"}
        allowed |= {"ld-linux-x86-64.so.2"}
        assert "libtorch_cuda.so" in needed
    assert needed <= allowed, needed - allowed


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_exports_its_module_and_nothing_of_ours(library) -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout
    names = [line.split()[-1] for line in listing.splitlines()]
    assert [name for name in names if "attn" in name] == []
    assert any(name.startswith("PyInit__C") for name in names)


def test_both_libraries_where_nvcc_is() -> None:
    names = {path.name for path in LIBRARIES}
    assert "_C.abi3.so" in names
    if import_setup()["find_nvcc"]() and os.environ.get("ATTN_EXT_CUDA") != "0":
        assert "_C_cuda.abi3.so" in names


def test_a_second_build_does_nothing() -> None:
    done = setup_py("build_ext", "--inplace")
    assert done.returncode == 0, done.stderr
    assert "->" not in done.stdout and "linking" not in done.stdout, done.stdout


FAILURES = [
    ({"ATTN_EXT_CUDA": "2"}, "ATTN_EXT_CUDA: expected auto, 0 or 1; got 2"),
    (
        {"ATTN_EXT_CUDA": "1", "NVCC": "no-such-nvcc", "CUDA_HOME": "/nonexistent"},
        "ATTN_EXT_CUDA=1, but nvcc was not found",
    ),
    ({"CC": "no-such-compiler"}, "no-such-compiler not found; the C kernels needs it"),
    ({"CXX": "no-such-compiler"}, "no-such-compiler not found; the binding needs it"),
]


@pytest.mark.parametrize("environment, message", FAILURES, ids=lambda e: str(e)[:40])
def test_failures_are_one_readable_line(environment, message) -> None:
    done = setup_py("build_ext", "--inplace", **environment)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert message in last and last.startswith("attn_ext: ")
    assert "Traceback" not in done.stderr


def test_cpu_only_build_says_so(tmp_path) -> None:
    done = setup_py(
        "build_ext", f"--build-temp={tmp_path}", f"--build-lib={tmp_path}/lib", ATTN_EXT_CUDA="0",
        ATTN_EXT_ARCHS="80",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "building the CPU library only (ATTN_EXT_CUDA=0)" in done.stdout
    assert [path.name for path in tmp_path.rglob("*.so")] == ["_C.abi3.so"]


def import_setup():
    """setup.py's functions, without running its setup()."""
    source = (ROOT / "setup.py").read_text().replace("\nsetup(\n", "\ndict(\n")
    scope: dict = {"__file__": str(ROOT / "setup.py"), "__name__": "attn_ext_setup"}
    module = type(sys)("attn_ext_setup")
    sys.modules["attn_ext_setup"] = module
    exec(compile(source, "setup.py", "exec"), scope)
    return scope


@pytest.mark.parametrize(
    "listed, archs, expected",
    [
        ("", "80;90a", ["80", "90a"]),
        ("", "90a", ["90a"]),
        ("", "native", ["80", "90a"]),
        ("9.0", "80;90a", ["90a"]),
        ("9.0a", "80,90a", ["90a"]),
        ("8.0;9.0+PTX", "80 90a", ["80", "90a"]),
        ("8.6", "80;90a", ["80"]),
        ("9.0", "80", ["80"]),
        ("10.0;12.0", "80;90a;100;120", ["100", "120"]),
        ("12.0", "80;90a", ["80"]),
        ("7.5", "80;90a", "leaves none"),
        ("", "75", "expected native or some of 80, 90a, 100, 120; got 75"),
    ],
)
def test_architecture_lists(monkeypatch, listed, archs, expected) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    monkeypatch.setenv("ATTN_EXT_ARCHS", archs)
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    cuda_archs = import_setup()["cuda_archs"]
    if isinstance(expected, list):
        assert cuda_archs() == expected
    else:
        with pytest.raises(SystemExit, match=expected):
            cuda_archs()


@pytest.mark.parametrize(
    "said, expected",
    [
        ("9.0", ["90a"]),
        ("8.6\\n8.9", ["80"]),
        ("12.0\\n9.0", ["90a", "120"]),
        ("7.5", ["80", "90a"]),
    ],
)
def test_native_architectures(monkeypatch, tmp_path, said, expected) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{said}\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert import_setup()["native_archs"]() == expected


def test_flags_of_the_architectures() -> None:
    gencode = import_setup()["gencode"]
    assert gencode("portable", ["80"]) == ["-gencode=arch=compute_80,code=[sm_80,compute_80]"]
    assert gencode("portable", ["90a"]) == ["-gencode=arch=compute_80,code=[sm_90,compute_80]"]
    assert gencode("hopper", ["80", "90a"]) == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert gencode("hopper", ["80"]) == []


def test_old_torch_is_named(monkeypatch, tmp_path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.9.1+cpu'\ncuda = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match=r"expected torch >= 2.10, got 2.9.1\+cpu"):
        import_setup()["require_torch"]()


def test_version_is_read_without_importing_torch() -> None:
    scope = import_setup()
    version, cuda = scope["torch_version"](scope["torch_dir"]())
    assert version == torch.__version__ and cuda == torch.version.cuda


NAMED = "ptxas info    : Function properties for {}\n    {}"
NO_SPILL = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"


@pytest.mark.parametrize(
    "log, complaint",
    [
        (NAMED.format("attn_a", NO_SPILL), None),
        (NAMED.format("attn_a", "0 bytes stack frame, 16 bytes spill stores"), "16 bytes spill"),
        (NAMED.format("attn_a", "40 bytes stack frame, 0 bytes spill stores"), "40 bytes stack"),
        ("(C7510) Potential Performance Loss: wgmma", "C7510"),
        (
            NAMED.format("attn_a", NO_SPILL) + "\n" + NAMED.format("attn_b", "8 bytes stack frame"),
            "8 bytes stack frame in attn_b",
        ),
    ],
)
def test_what_fails_a_tensor_core_kernel(log, complaint) -> None:
    found = import_setup()["ptxas_complaint"](log)
    assert (found is None) if complaint is None else complaint in found


def test_wheel(tmp_path) -> None:
    """pip makes a cp310-abi3 wheel in an isolated build, without a GPU and with what is built."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT],
        env=os.environ | {"ATTN_EXT_CUDA": "0"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "cp310-abi3-linux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("attn_ext/_C.abi3.so", "attn_ext/py.typed", "attn_ext/sdpa.py"):
        assert name in names
    assert not any("csrc" in name or "tests" in name for name in names)
