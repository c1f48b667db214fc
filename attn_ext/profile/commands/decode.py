"""`attn-ext decode`: what the name of a kernel says."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from attn_ext.profile import options as shared
from attn_ext.profile.kernel_name import decode

_TEXT = """\
Reads the name of a CUDA kernel as a trace has it: who wrote it, what it does, in which dtype, for
which GPU, in which tiles, and whether on tensor cores. What a name does not say is left out.
"""


def add(subparsers: shared.Subparsers) -> None:
    command = shared.add_command(
        subparsers,
        "decode",
        handle,
        help="what a kernel's name says",
        text=_TEXT,
        examples=[
            "decode nvjet_tst_192x192_64x4_1x1_h_bz_coopB_TNN",
            "decode attn_flash_fwd_sm90_d64_bf16_kernel ampere_sgemm_128x64_tn --json",
        ],
    )
    command.add_argument("kernel", nargs="+", metavar="KERNEL", help="names; put them in quotes")
    command.add_argument("--json", action="store_true", help="as JSON, a field for each fact")


def handle(options: argparse.Namespace) -> int:
    kernels = [decode(name) for name in options.kernel]
    if options.json:
        print(json.dumps([asdict(kernel) | {"reading": kernel.reading} for kernel in kernels]))
        return 0
    for kernel in kernels:
        print(kernel.reading if len(kernels) == 1 else f"{kernel.name}\n  {kernel.reading}")
    return 0
