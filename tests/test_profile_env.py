"""`attn-ext env` and `attn-ext ncu`: what they print, also where something is missing."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

import attn_ext
from attn_ext.profile import cli, environment


def test_env_knows_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--json"]) == 0
    sections = json.loads(capsys.readouterr().out)
    assert sections["torch"]["version"] == torch.__version__
    assert sections["attn_ext"]["CPU kernels"] == attn_ext.cpu_isa
    assert sections["attn_ext"]["CUDA kernels"] == (attn_ext.cuda_missing or "loaded")
    assert "CPU" in sections["profiler"]["records"]
    assert not any("error" in facts for facts in sections.values())


def test_env_tells_what_is_broken_and_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[str, object]:
        raise OSError("libnothing.so: cannot open\nmore")

    monkeypatch.setattr(environment, "_torch", broken)
    monkeypatch.setenv("ATTN_EXT_SM", "80")
    found = environment.environment()
    assert found["torch"] == {"error": "OSError: libnothing.so: cannot open"}
    assert found["variables"]["ATTN_EXT_SM"] == "80"


def test_env_works_where_the_library_does_not_load(run_python) -> None:
    code = (
        "import sys; sys.argv = ['attn-ext']; sys.modules['attn_ext._C'] = None;"
        "from attn_ext.profile.cli import main; sys.exit(main(['env']))"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert "error" in result.stdout and "does not load with torch" in result.stdout


def test_the_machine_code_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    listings = {
        "--list-elf": "ELF file    1: x.1.sm_90a.cubin\nELF file    2: x.2.sm_80.cubin\n",
        "--list-ptx": "PTX file    1: x.1.sm_80.ptx\n",
    }
    monkeypatch.setattr(environment, "_output", lambda program, kind, path: listings[kind])
    assert environment._architectures(Path("x.so")) == "sm_80, sm_90a, compute_80"
    monkeypatch.setattr(environment, "_output", lambda *command: "")
    assert environment._architectures(Path("x.so")) is None


def test_the_ncu_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--seq", "256", "--no-causal", "--backward", "--kernel", "attn_flash|mma"]
    assert cli.main(["ncu", "flash", *options, "--out", str(tmp_path)]) == 0
    words = shlex.split(capsys.readouterr().out)
    split = words.index(sys.executable)
    ncu, program = words[:split], words[split:]
    assert ncu[0] == "ncu" and "attn_ext.step/" in ncu and "regex:attn_flash|mma" in ncu
    assert str(tmp_path / "8_16_256_64_flash_eager_backward.ncu-rep") in ncu
    assert program[1:4] == ["-m", "attn_ext.profile.once", "flash"]
    assert {"256", "--no-causal", "--backward", "cuda"} <= set(program)


def test_the_program_that_ncu_profiles(run_python) -> None:
    command = "flash --device cpu --batch 1 --heads 2 --kv-heads 1 --seq 16 --backward"
    code = "import runpy, sys; sys.argv[1:] = {!r}.split(); runpy.run_module({!r}, None, {!r})"
    result = run_python(code.format(command, "attn_ext.profile.once", "__main__"))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ncu", "flsh"], "ncu: VARIANT: expected some of naive, .*, got flsh"),
        (["ncu", "flash", "--heads", "0"], "ncu: --heads: expected at least 1, got 0"),
        (["ncu", "flash", "--exec"], r"ncu: --exec: expected ncu \(Nsight Compute\) on PATH, .*"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", "")
    assert cli.main(arguments) == 2
    assert re.fullmatch(f"attn-ext {message}\n", capsys.readouterr().err)
