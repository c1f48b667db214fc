"""`attn-ext ncu`: Nsight Compute on one call of a variant."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from attn_ext.profile import options as shared
from attn_ext.profile.case import CaseError, check_variants
from attn_ext.profile.trace import STEP

_TEXT = """\
Prints the ncu command that collects Nsight Compute's counters of one warm call of a variant and of
nothing else: the call lies in an NVTX range. --kernel leaves all but one of its kernels out. ncu
replays each kernel many times, so its times are not those of `attn-ext run`. With --exec the
command is run, and its exit status is this one's; it writes DIR/<shape>_<variant>_<mode>.ncu-rep.
"""
#: Where NVIDIA's drivers say who may read the counters.
_PARAMETERS = Path("/proc/driver/nvidia/params")


def add(subparsers: shared.Subparsers) -> None:
    command = shared.add_command(
        subparsers,
        "ncu",
        handle,
        help="the ncu command for one call of a variant",
        text=_TEXT,
        examples=[
            "ncu flash",
            "ncu naive --seq 4096 --kernel attn_softmax",
            "ncu sdpa_cudnn --set roofline --backward",
        ],
    )
    command.add_argument("variant", metavar="VARIANT", help="as in attn-ext run")
    shared.add_shape(command)
    how = command.add_argument_group("the command")
    how.add_argument(
        "--set", default="full", metavar="NAME", help="ncu's set of sections; default: full"
    )
    how.add_argument("--kernel", metavar="REGEX", help="only kernels whose name matches")
    how.add_argument("--exec", action="store_true", help="run it")
    shared.add_device(how)
    shared.add_out(how)


def handle(options: argparse.Namespace) -> int:
    check_variants([options.variant])
    device = options.device or "cuda"
    case = shared.case_of(options, device.partition(":")[0])
    report = Path(options.out) / f"{case.tag(options.variant)}.ncu-rep"
    words = ["ncu", "--set", options.set, "--nvtx", "--nvtx-include", f"{STEP}/"]
    if options.kernel:
        words += ["--kernel-name-base", "demangled", "--kernel-name", f"regex:{options.kernel}"]
    words += ["--force-overwrite", "--export", str(report), sys.executable, "-m"]
    words += ["attn_ext.profile.once", options.variant, *shared.shape_words(case)]
    words += ["--device", device]
    if not options.exec:
        print(shlex.join(words))
        return 0
    if shutil.which("ncu") is None:
        raise CaseError("exec", "ncu (Nsight Compute) on PATH", "none")
    if _counters_are_for_root() and os.geteuid() != 0:
        raise CaseError(
            "exec",
            "a user who may read the GPU's counters (root, or the driver's module loaded with "
            "NVreg_RestrictProfilingToAdminUsers=0)",
            f"uid {os.geteuid()}",
        )
    report.parent.mkdir(parents=True, exist_ok=True)
    return subprocess.run(words).returncode


def _counters_are_for_root() -> bool:
    return _PARAMETERS.exists() and "RmProfilingAdminOnly: 1" in _PARAMETERS.read_text()
