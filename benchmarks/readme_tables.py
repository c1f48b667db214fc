"""Writes the README's tables from the committed result files, between its <!-- name --> marks.

python benchmarks/readme_tables.py [--check | --keep SUMMARY]

--check  exit 1 where README.md is not up to date
--keep   take a profiler run's summary.json into results/ first
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from attn_ext.profile.case import Case
from attn_ext.profile.figures import Row, Summary
from attn_ext.profile.table import plain, render

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def profile_table() -> str:
    """The table that `make profile` prints, of the run that was kept."""
    facts: dict[str, Any] = json.loads((RESULTS / "nvidia-h200-profile.json").read_text())
    rows = [Row(**row) for row in facts.pop("rows")]
    text = plain(render(Summary(facts, rows), f"attention of {Case(**facts['case'])}"))
    return f"```text\n{text}```"


def speed_table() -> str:
    """TFLOP/s of the grid's long and short ends, ours beside torch's backends."""
    result = json.loads((RESULTS / "nvidia-h200-attention.json").read_text())
    variants = ("flash", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient")
    lines = [
        f"{result['device']}, torch {result['torch']}, bf16, 16,384 tokens, heads x head size = "
        "2048; TFLOP/s of kernel time, geometric mean over lengths 512 to 16,384.",
        "",
        "| head size | mask | pass | " + " | ".join(variants) + " |",
        "| --- " * (3 + len(variants)) + "|",
    ]
    grid = [row for row in result["rows"] if row["case"] == "grid"]
    keys = sorted({(row["head_dim"], row["causal"], row["pass"] == "bwd") for row in grid})
    for head_dim, causal, backward in keys:
        direction = "bwd" if backward else "fwd"
        cells = []
        for variant in variants:
            rates = [
                row["flops"] / row["kernel_us"][variant] / 1e6
                for row in grid
                if (row["head_dim"], row["causal"], row["pass"]) == (head_dim, causal, direction)
                and variant in row["kernel_us"]
            ]
            cells.append(f"{geometric_mean(rates):.0f}" if rates else "")
        mask = "causal" if causal else "full"
        lines.append(f"| {head_dim} | {mask} | {direction} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


TABLES = {"profile": profile_table, "speed": speed_table}


def filled(text: str) -> str:
    for name, make in TABLES.items():
        marks = re.compile(rf"(<!-- {name}\b[^>]*-->\n).*?(<!-- end -->)", re.DOTALL)
        if marks.search(text):
            body = make()
            text = marks.sub(lambda match, body=body: f"{match[1]}{body}\n{match[2]}", text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true")
    choice.add_argument("--keep", type=Path, metavar="SUMMARY")
    options = parser.parse_args()
    if options.keep:
        facts = json.loads(options.keep.read_text())
        device = "-".join(facts["device"].lower().split())
        (RESULTS / f"{device}-profile.json").write_text(json.dumps(facts, indent=1) + "\n")
    readme = ROOT / "README.md"
    before = readme.read_text()
    after = filled(before)
    if options.check:
        sys.exit(0 if before == after else "README.md is not up to date: make tables")
    readme.write_text(after)


if __name__ == "__main__":
    main()
