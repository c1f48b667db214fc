"""The rules of the house, as far as a program can read them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = (".c", ".h", ".cu", ".cuh", ".cpp", ".py", ".pyi")


def tracked() -> list[Path]:
    """The files of the project: those git knows of and those it does not ignore."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]


def code() -> list[Path]:
    return [path for path in tracked() if path.suffix in CODE]


def offending(pattern: str, paths: list[Path]) -> list[str]:
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    return found


def test_files_stay_short() -> None:
    long = {
        str(p.relative_to(ROOT)): n for p in code() if (n := len(p.read_text().splitlines())) > 500
    }
    assert not long, f"over 500 lines: find the seam: {long}"


def test_lines_stay_within_100_columns() -> None:
    assert offending(r"^.{101,}$", code()) == []


def test_no_tabs_and_no_trailing_blanks() -> None:
    texts = [p for p in code() if p.name != "Makefile"]
    assert offending(r"\t|[ \t]+$", texts) == []
    assert [p for p in texts if not p.read_text().endswith("\n")] == []


def test_nothing_is_left_for_later() -> None:
    word = "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"))
    assert offending(rf"\b({word})\b", code()) == []


def test_kernels_do_not_see_torch() -> None:
    kernels = [p for p in code() if p.parts[-2] in ("cpu", "cuda", "inst", "cudnn")]
    assert kernels and offending(r"#include\s*[<\"](torch|ATen|c10|Python\.h)", kernels) == []


def test_kernels_do_not_print_exit_or_allocate() -> None:
    kernels = [
        p
        for p in code()
        if p.is_relative_to(ROOT / "csrc/cpu") or p.is_relative_to(ROOT / "csrc/cuda")
    ]
    calls = (
        r"\b(f?printf|puts|exit|abort|malloc|calloc|realloc|cudaMalloc\w*|cudaDeviceSynchronize)\("
    )
    assert offending(calls, [p for p in kernels if not p.name.startswith("ref")]) == []


def test_cplusplus_lives_in_the_binding_alone() -> None:
    assert [p for p in code() if p.suffix == ".cpp" and p.parts[-2] != "binding"] == []


def test_instances_are_at_most_ten_lines() -> None:
    instances = [p for p in code() if p.parts[-2] == "inst"]
    assert [p.name for p in instances if len(p.read_text().splitlines()) > 10] == []


def test_symbols_that_cross_a_file_carry_the_prefix() -> None:
    """What a kernel file defines without static starts with attn_."""
    definition = re.compile(
        r"^(?!static|typedef|struct|enum|union|extern|return|else|if|for|while|[#/*}@]|ATTN_|__)"
        r"[A-Za-z_][\w\s\*]*?\b(\w+)\([^;]*\{\s*$",
        re.MULTILINE,
    )
    bare = []
    for path in code():
        if path.suffix == ".c" and path.is_relative_to(ROOT / "csrc"):
            names = definition.findall(path.read_text())
            bare += [f"{path.name}: {n}" for n in names if not n.startswith(("attn_", "ATTN_"))]
    assert bare == []


def test_the_op_namespace_is_named_in_one_place() -> None:
    package = [p for p in code() if p.is_relative_to(ROOT / "attn_ext") and p.name != "_ops.py"]
    assert offending(r"torch\.ops\.attn_ext|\"attn_ext::\w+\"", package) == []


def test_result_files_are_json_with_a_schema() -> None:
    import json

    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert json.loads(path.read_text())["schema"] == 1, path.name


def test_readme_tables_come_from_the_result_files() -> None:
    command = [sys.executable, "benchmarks/readme_tables.py", "--check"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
