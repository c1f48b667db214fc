"""What a run says of the machine that it ran on."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import attn_ext


def facts(device: torch.device) -> dict[str, Any]:
    """Device and versions, as summary.json has them; what is not known here is absent."""
    on_gpu = device.type == "cuda"
    known = {
        "kind": "gpu" if on_gpu else "cpu",
        "device": device_name(device),
        "attn_ext": attn_ext.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": cudnn_version() if on_gpu else None,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    return {key: value for key, value in known.items() if value is not None}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def cudnn_version() -> int | None:
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return version


def available_bytes() -> int | None:
    """Host memory that can be had without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return next(sizes, None)
