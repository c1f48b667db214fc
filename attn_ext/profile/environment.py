"""What decides how attention runs here, for `attn-ext env`: versions, devices, libraries, CUPTI.

Nothing here raises where a part is missing or broken: that is what the user wants to report.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

#: What attn_ext works with, by the name of the distribution.
_PACKAGES = ("torch", "triton", "numpy", "rich", "jinja2", "matplotlib", "transformers",
             "flash-attn", "xformers", "transformer-engine", "nvidia-cudnn-cu12",
             "nvidia-cudnn-cu13", "nvidia-cuda-cupti-cu12", "nvidia-cuda-cupti")  # fmt: skip
#: Variables whose names begin so change what runs or what is recorded.
_VARIABLES = ("ATTN_EXT_", "CUDA_", "CUDNN_", "KINETO_", "NVTE_", "PYTORCH_", "TORCH", "OMP_",
              "MKL_")  # fmt: skip


def environment() -> dict[str, Facts]:
    """Sections of facts; what is not known is absent, what fails is there as an error's text."""
    sections: dict[str, Callable[[], Facts]] = {
        "attn_ext": _package, "system": _system, "packages": _packages, "torch": _torch,
        "gpus": _gpus, "profiler": _profiler, "variables": _variables,
    }  # fmt: skip
    found = {}
    for name, section in sections.items():
        try:
            facts = section()
        except Exception as error:  # whatever is broken, the rest is told
            facts = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        found[name] = {key: value for key, value in facts.items() if value is not None}
    return found


def _package() -> Facts:
    from attn_ext import __version__

    facts: Facts = {"version": __version__, "folder": str(Path(__file__).parents[1])}
    for name in ("_C", "_C_cuda"):
        spec = find_spec(f"attn_ext.{name}")
        library = Path(spec.origin) if spec is not None and spec.origin else None
        facts[name] = "not built" if library is None else f"{library.stat().st_size:,} bytes"
        if library is not None:
            facts[f"{name} code for"] = _architectures(library)
    import attn_ext

    facts |= {"CPU kernels": attn_ext.cpu_isa, "CUDA kernels": attn_ext.cuda_missing or "loaded"}
    return facts


def _architectures(library: Path) -> str | None:
    """The GPUs that the library has machine code (sm_) and PTX (compute_) for."""
    machine_code = re.findall(
        r"\.(sm_\w+)\.cubin", _output("cuobjdump", "--list-elf", str(library))
    )
    ptx = re.findall(r"\.sm_(\w+)\.ptx", _output("cuobjdump", "--list-ptx", str(library)))
    names = sorted(set(machine_code)) + [f"compute_{name}" for name in sorted(set(ptx))]
    return ", ".join(names) or None


def _output(*command: str) -> str:
    """What a program prints; nothing where there is no such program or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout if done.returncode == 0 else ""


def _system() -> Facts:
    from attn_ext.profile.machine import cpu_name

    return {
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "driver": _found(r"Driver Version: *(\S+)", _output("nvidia-smi")),
        "nvcc": _found(r"release (\S+),", _output("nvcc", "--version")),
        "ncu": _found(r"Version (\S+)", _output("ncu", "--version")),
    }


def _found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def _packages() -> Facts:
    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in _PACKAGES}


def _torch() -> Facts:
    import torch

    from attn_ext.profile.machine import cudnn_version

    cuda: Any = torch.backends.cuda
    enabled = {
        "math": cuda.math_sdp_enabled(), "efficient": cuda.mem_efficient_sdp_enabled(),
        "flash": cuda.flash_sdp_enabled(), "cudnn": cuda.cudnn_sdp_enabled(),
    }  # fmt: skip
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn_version(),
        "hip": torch.version.hip,
        "threads": torch.get_num_threads(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "SDPA backends allowed": ", ".join(name for name, yes in enabled.items() if yes),
        "flash implementation": _flash_implementation(),
        "float32 matmul": torch.get_float32_matmul_precision(),
    }


def _flash_implementation() -> str:
    """Whose kernels are under torch's flash backend."""
    import attn_ext

    return "attn_ext, by activate()" if attn_ext.is_active() else "torch's"


def _gpus() -> Facts:
    import torch

    if not torch.cuda.is_available():
        return {"none": "torch sees no CUDA device"}
    facts = {}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        facts[f"cuda:{index}"] = (
            f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} SMs, "
            f"{gpu.total_memory / 2**30:.1f} GiB"
        )
    return facts


def _profiler() -> Facts:
    import torch

    profiler: Any = torch.profiler
    records = sorted(activity.name for activity in profiler.supported_activities())
    library, version = _cupti()
    facts: Facts = {"records": ", ".join(records), "CUPTI": library, "CUPTI version": version}
    if version is not None and 24 <= version < 130100:  # numbered from 1 before CUDA 13
        facts["CUPTI loses kernels"] = "some at the start of a session (CUDA 12.6u2 to 13.0)"
    parameters = Path("/proc/driver/nvidia/params")
    if parameters.exists():
        restricted = "RmProfilingAdminOnly: 1" in parameters.read_text()
        facts["GPU counters (ncu)"] = "for root alone" if restricted else "for every user"
    return facts


def _cupti() -> tuple[str | None, int | None]:
    """The CUPTI library in this process, and the version of its interface."""
    maps = Path("/proc/self/maps").read_text()
    paths = sorted(set(re.findall(r"/\S*libcupti\S*", maps)))
    if not paths:
        return None, None
    version = ctypes.c_uint32()
    status = ctypes.CDLL(paths[0]).cuptiGetVersion(ctypes.byref(version))
    return paths[0], version.value if status == 0 else None


def _variables() -> Facts:
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_VARIABLES)}
