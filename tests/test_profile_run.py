"""`attn-ext run` end to end on a CPU: files, exit status, every error in one line."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attn_ext.profile import VARIANTS, Case, CaseError, Trace, cli, default_case, run
from attn_ext.profile.calls import pinned, prepare
from attn_ext.profile.options import case_of
from attn_ext.sdpa import OWN_BACKENDS, TORCH_BACKENDS

TINY = ["--device", "cpu", "--batch", "1", "--heads", "2", "--seq", "16", "--head-dim", "8"]
TINY_CASE = Case(batch=1, heads=2, kv_heads=2, seq=16, head_dim=8, dtype="fp32")
ON_CPU = ("naive", "inplace", "flash", "math", "sdpa_flash")


def command(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and summary.json of a run with the smallest shape."""
    status = cli.main(
        ["run", *TINY, "--steps", "2", "--warmup", "1", "--out", str(tmp_path), *arguments]
    )
    return status, json.loads((tmp_path / "summary.json").read_text())


def test_the_variants_are_the_backends() -> None:
    assert (*OWN_BACKENDS, *TORCH_BACKENDS) == VARIANTS


def test_a_run_of_everything(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, summary = command(tmp_path)
    out, err = capfd.readouterr()
    assert status == 0 and err == "", "no bar, no chatter where stderr is no terminal"
    assert summary["schema"] == 1 and summary["kind"] == "cpu" and summary["steps"] == 2
    assert summary["torch"] == torch.__version__ and "cuda" not in summary
    assert summary["case"] == vars(TINY_CASE)
    rows = {row["variant"]: row for row in summary["rows"]}
    assert tuple(rows) == VARIANTS
    for variant, row in rows.items():
        assert re.search(rf"^{variant}\s", out, re.MULTILINE)
        if variant not in ON_CPU:
            assert set(row) == {"variant", "error"} and "CUDA only" in row["error"]
            continue
        assert row["trace"] == f"1_2_16_8_{variant}_eager.json.gz"
        assert row["ops"] > 0 and row["call_us"] > 0 and row["peak_bytes"] > 0
        assert not {"kernels", "gpu_us", "cpu_us", "memcpy"} & set(row), "not known on a CPU"
        steps = Trace.load(tmp_path / row["trace"]).steps
        assert [len(step.operators) for step in steps] == [row["ops"]] * 2
    scores = 2 * 16 * 16 * 4
    assert (rows["naive"]["copies"], rows["naive"]["copy_bytes"]) == (1, scores)
    assert rows["inplace"]["copies"] == 0
    assert rows["naive"]["factor"] == 1.0
    assert str(tmp_path) in out and max(map(len, out.splitlines()[:-1])) <= 100


def test_the_pinned_backend_is_the_one_that_runs(tmp_path: Path) -> None:
    """In eager mode and compiled, where caches do not know of the pin."""
    for flags in ([], ["--compile"]):
        status, summary = command(tmp_path, "math", "sdpa_flash", *flags)
        assert status == 0
        ran_flash = []
        for row in summary["rows"]:
            ops = Trace.load(tmp_path / row["trace"]).steps[0].ops
            ran_flash.append(any("_flash_attention_for_cpu" in op.name for op in ops))
        assert ran_flash == [False, True], flags


def test_the_trace_says_what_it_is_of(tmp_path: Path) -> None:
    run(["math"], TINY_CASE, out=tmp_path, device="cpu", steps=1, warmup=1)
    about = Trace.load(tmp_path / "1_2_16_8_math_eager.json.gz").metadata["attn_ext"]
    assert about["variant"] == "math" and about["case"] == vars(TINY_CASE)


def test_backward_is_part_of_the_step(tmp_path: Path) -> None:
    _, forward = command(tmp_path, "naive", "math")
    status, both = command(tmp_path, "naive", "math", "--backward")
    assert status == 0 and both["case"]["backward"]
    for one, two in zip(forward["rows"], both["rows"], strict=True):
        assert two["ops"] > one["ops"] and two["trace"] == one["trace"].replace(
            "eager", "eager_backward"
        )


@pytest.mark.parametrize("backward", [False, True])
def test_flops_are_those_that_torch_counts(tmp_path: Path, backward: bool) -> None:
    case = replace(TINY_CASE, heads=4, kv_heads=2, backward=backward)
    variants = ["flash", *["naive", "math"] * (not backward)]
    rows = run(variants, case, out=tmp_path, device="cpu", steps=1, warmup=1).rows
    for row, call in zip(rows, prepare(variants, case, torch.device("cpu")), strict=True):
        with FlopCounterMode(display=False) as counted, pinned(call):
            call.make()
        assert row.flops == counted.get_total_flops() > 0, row.variant
        assert row.tflops is not None and row.call_us is not None and row.useful_flops is not None
        assert row.tflops == pytest.approx(row.useful_flops / row.call_us / 1e6)
        assert row.useful_flops < row.flops


def test_options_reach_the_call(tmp_path: Path) -> None:
    options = ["--kv-heads", "1", "--dtype", "fp64", "--no-causal", "--seq", "24"]
    status, summary = command(tmp_path, "sdpa_flash", "naive", *options)
    assert status == 0
    assert [row["variant"] for row in summary["rows"]] == ["sdpa_flash", "naive"]
    step = Trace.load(tmp_path / summary["rows"][0]["trace"]).steps[0]
    op = next(op for op in step.ops if op.name.endswith("flash_attention_for_cpu"))
    assert op.args["Input Dims"][:3] == [[1, 2, 24, 8], [1, 1, 24, 8], [1, 1, 24, 8]]
    assert op.args["Input type"][0] == "double"
    assert op.args["Concrete Inputs"][4] == "False"


def test_json_goes_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, summary = command(tmp_path, "math", "--format", "json")
    assert json.loads(capsys.readouterr().out) == summary


def test_a_variant_that_cannot_run_is_a_row(tmp_path: Path) -> None:
    """flash refuses head sizes above 256; the others go on."""
    status, summary = command(tmp_path, "flash", "math", "--head-dim", "300")
    flash, math = summary["rows"]
    assert status == 0 and math["factor"] == 1.0
    assert "256" in flash["error"] and "\n" not in flash["error"] and "call_us" not in flash


def test_nothing_that_can_run_is_exit_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, summary = command(tmp_path, "sdpa_cudnn")
    assert status == 1 and len(summary["rows"]) == 1
    assert "sdpa_cudnn  cannot run: torch has this backend on CUDA only" in capsys.readouterr().out


def test_causes_are_taken_from_the_warnings_of_sdpa() -> None:
    from attn_ext.profile.calls import reason

    warned = [
        "Memory efficient kernel not used because: (Triggered internally at sdp_utils.cpp:1.)",
        "Memory Efficient attention has been runtime disabled. (Triggered internally at x.)",
        "Flash attention kernel not used because: (Triggered internally at sdp_utils.cpp:2.)",
        "Expected query to be of dtype: {Half, BFloat16}. (Triggered internally at x.)",
        "CuDNN attention kernel not used because: (Triggered internally at sdp_utils.cpp:3.)",
        "cuDNN attention has been runtime disabled. (Triggered internally at x.)",
    ]
    error = RuntimeError("No available kernel. Aborting execution.\nmore")
    flash = "Expected query to be of dtype: {Half, BFloat16}."
    assert reason("sdpa_flash", error, warned) == flash
    assert reason("sdpa_efficient", error, warned).startswith("Memory Efficient attention has")
    assert reason("sdpa_cudnn", error, warned) == "cuDNN attention has been runtime disabled."
    assert reason("flash", error, warned) == "No available kernel. Aborting execution."
    assert reason("sdpa_flash", error, []) == "No available kernel. Aborting execution."
    assert reason("naive", RuntimeError(), []) == "RuntimeError"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flsh"], "run: VARIANT: expected some of naive, inplace, .*, got flsh"),
        (["--kv-heads", "3"], "run: --kv-heads: expected a divisor of heads = 2, got 3"),
        (["--heads", "0"], "run: --heads: expected at least 1, got 0"),
        (["--head-dim", "-8"], "run: --head-dim: expected at least 1, got -8"),
        (["--seq", "many"], "run: argument --seq: invalid int value: 'many'"),
        (["--dtype", "int8"], "run: --dtype: expected one of fp16, bf16, fp32, fp64, got int8"),
        (["--steps", "0"], "run: --steps: expected at least 1, got 0"),
        (["--warmup", "0"], "run: --warmup: expected at least 1, got 0"),
        (["--layers", "0"], "run: --layers: expected at least 1, got 0"),
        (["--device", "tpu"], "run: --device: expected cpu, cuda or cuda:N, got tpu"),
        (["--device", "cuda:x"], "run: --device: expected cpu, cuda or cuda:N, got cuda:x"),
        (["--device", "cuda:99"], "run: --device: expected .*, got cuda:99"),
        (["--format", "xml"], "run: argument --format: invalid choice: 'xml' .*"),
        (["--fast"], ": unrecognized arguments: --fast"),
    ],
)
def test_errors_are_one_line_and_exit_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    try:
        status: int | str | None = cli.main(["run", *TINY, "--out", str(out), *arguments])
    except SystemExit as stop:  # argparse's own
        status = stop.code
    assert status == 2
    assert re.fullmatch(f"attn-ext ?{message}\n", capsys.readouterr().err)
    assert not out.exists(), "nothing is measured or written"


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["run", *TINY, "--out", str(tmp_path / "file")]) == 2
    assert "--out: expected a folder to write to, got" in capsys.readouterr().err


def test_the_python_face_raises_the_same_errors(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="kv_heads: expected a divisor of heads = 16, got 5"):
        Case(kv_heads=5)
    with pytest.raises(CaseError, match="got none"):
        run([], TINY_CASE, out=tmp_path)
    if torch.version.cuda is None:
        with pytest.raises(CaseError, match=r"since torch \S+ has no CUDA, got cuda"):
            run(["math"], TINY_CASE, out=tmp_path, device="cuda")


def test_the_shape_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    options = cli.parser().parse_args(["run"])
    gpu, cpu = default_case("cuda"), default_case("cpu")
    assert (case_of(options, "cuda"), case_of(options, "cpu")) == (gpu, cpu)
    assert vars(gpu) == vars(Case(8, 16, 16, 1024, 64, "bf16", causal=True))
    assert case_of(cli.parser().parse_args(["run", "--heads", "6"]), "cpu").kv_heads == 6


def test_tags_tell_runs_apart() -> None:
    assert Case().tag("flash") == "8_16_1024_64_flash_eager"
    assert Case(compile=True, backward=True).tag("x") == "8_16_1024_64_x_compile_backward"


def test_the_bar_is_for_terminals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    command(tmp_path, "math")
    out, err = capsys.readouterr()
    assert "math, seq 16: profiling" in err and "profiling" not in out
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    command(tmp_path, "math")
    assert capsys.readouterr().err == ""


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    run(
        ["math", "sdpa_cudnn"], TINY_CASE, out=tmp_path, device="cpu", steps=1, warmup=1,
        progress=lambda done, total, what: seen.append((done, total)),
    )  # fmt: skip
    total = seen[0][1]
    assert seen == [(done, total) for done in range(total)]
