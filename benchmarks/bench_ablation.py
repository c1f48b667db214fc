"""What each part of the Hopper forward kernel is worth: the same kernel without it, part by part.

python benchmarks/bench_ablation.py

Compiles the bf16 kernels once for each part that is left out, links them with what `make` has built
(nvcc), and times the grid with each library in a process of its own, beside torch's cuDNN backend,
which shows how fast the card was just then. Writes results/<device>-ablation.json. --build only
does the first half, where there is no GPU, and --run the second, where there is no nvcc.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
UNITS = [f"flash_fwd_sm90_d{head_dim}_bf16" for head_dim in (64, 128, 256)]
#: name -> what the compiler is told. The kernel's head of file says what each part is.
WITHOUT = {
    "nothing": [],
    "reference": ["-DKEEP_REFERENCE=0"],
    "drawing": ["-DDRAW=0"],
    "chain": ["-DCHAIN=0"],
    "turns": ["-DTURNS=0"],
    "slack": ["-DKEEP_REFERENCE=0", "-DSLACK=0.0f"],
    "overlap": ["-DOVERLAP=0"],
}
LENGTHS = (512, 2048, 16384)


def build(libraries: Path) -> None:
    """libraries/<name>/_C_cuda.abi3.so for each part left out."""
    link = next(ROOT.glob("build/temp*/_C_cuda.link")).read_text()
    for name, defines in WITHOUT.items():
        folder = libraries / name
        folder.mkdir(parents=True, exist_ok=True)
        command = shlex.split(link)
        for unit in UNITS:
            log = next(ROOT.glob(f"build/temp*/_C_cuda/cuda/inst/{unit}.log"))
            compile_ = shlex.split(log.read_text().partition("\n")[0])
            old = compile_[compile_.index("-o") + 1]
            new = str(folder / f"{unit}.o")
            compile_ = [new if word == old else word for word in compile_]
            compile_[compile_.index("-MF") + 1] = os.devnull
            subprocess.run([*compile_, *defines], check=True, capture_output=True)
            command = [new if word == old else word for word in command]
        command[command.index("-o") + 1] = str(folder / "_C_cuda.abi3.so")
        subprocess.run(command, check=True)
        for unit in UNITS:
            (folder / f"{unit}.o").unlink()
        print(f"built without {name}", flush=True)


def time_grid() -> list[dict[str, Any]]:
    """The rows of the library that this child process has in its attn_ext."""
    import torch
    import torch.nn.functional as F
    from measure import measure

    from attn_ext import ops

    rows = []
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            for seq in LENGTHS:
                shape = (16384 // seq, 2048 // head_dim, seq, head_dim)
                q, k, v = (torch.randn(shape, device="cuda").bfloat16() for _ in range(3))
                calls = {
                    "flash": lambda q=q, k=k, v=v, causal=causal: ops.flash_attention_forward(
                        q, k, v, None, 0.0, causal
                    ),
                    "sdpa_cudnn": lambda q=q, k=k, v=v, causal=causal: (
                        F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                    ),
                }
                rows.append({
                    "case": "ablation", "pass": "fwd", "dtype": "bfloat16", "batch": shape[0],
                    "heads": shape[1], "kv_heads": shape[1], "seq_q": seq, "seq_k": seq,
                    "head_dim": head_dim, "causal": causal,
                    "flops": 4 * shape[0] * shape[1] * seq * seq * head_dim // (1 + causal),
                    "kernel_us": measure(calls)["kernel_us"],
                })  # fmt: skip
    return rows


def run(libraries: Path) -> None:
    from measure import Result

    print("flash as a part of cuDNN's speed in the same run, geometric mean over D 64, 128, 256")
    print(f"{'without':12}" + "".join(f"{s:>8}" for s in LENGTHS) + "   causal" +
          "".join(f"{s:>8}" for s in LENGTHS))  # fmt: skip
    with Result("ablation", "gpu") as result:
        for name in WITHOUT:
            package = libraries / name / "attn_ext"
            shutil.copytree(ROOT / "attn_ext", package, dirs_exist_ok=True)
            shutil.copy(libraries / name / "_C_cuda.abi3.so", package)
            child = subprocess.run(
                [sys.executable, __file__, "--time"], check=True, stdout=subprocess.PIPE, text=True,
                env=os.environ | {"PYTHONPATH": str(libraries / name)},
            )  # fmt: skip
            rows = json.loads(child.stdout.splitlines()[-1])
            for row in rows:
                result.add({"without": name, **row})
            print(f"{name:12}{_means(rows, False)}         {_means(rows, True)}", flush=True)
    print(result.path)


def _means(rows: list[dict[str, Any]], causal: bool) -> str:
    text = ""
    for seq in LENGTHS:
        ratios = [
            row["kernel_us"]["sdpa_cudnn"] / row["kernel_us"]["flash"]
            for row in rows
            if row["causal"] == causal and row["seq_q"] == seq
        ]
        text += f"{math.prod(ratios) ** (1 / len(ratios)):8.3f}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--libraries", type=Path, default=ROOT / "build/ablation", metavar="DIR")
    parser.add_argument("--build", action="store_true", help="compile only")
    parser.add_argument("--run", action="store_true", help="time only")
    parser.add_argument("--time", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.time:
        print(json.dumps(time_grid()))
        return
    if options.build or not options.run:
        build(options.libraries)
    if options.run or not options.build:
        run(options.libraries)


if __name__ == "__main__":
    main()
