"""`attn-ext exec`: a script runs as under Python, and its steps are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripts import GENERATE, TRAIN

from attn_ext.profile import Trace, cli

FEW = ["--skip", "3", "--warmup", "1", "--active", "2"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the scripts in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    for name, script in (("train", TRAIN), ("generate", GENERATE)):
        (tmp_path / f"{name}.py").write_text(script)
    return tmp_path


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "profile" / "summary.json").read_text())


def op_names(folder: Path, trace: str) -> list[str]:
    steps = Trace.load(folder / "profile" / trace).steps
    assert len(steps) == 2
    return [op.name for op in steps[0].operators]


def test_a_script_as_it_is_and_on_our_kernels(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Steps are those of the optimizer that stepped first; the script is left after the last."""
    assert cli.main(["exec", "--activate", "naive", *FEW, "--", "train.py", "30"]) == 0
    out = capfd.readouterr().out
    assert out.count("trained 5\n") == 2 and "trained 6" not in out and "at the end" not in out
    found = summary(folder)
    assert found["unit"] == "step" and found["command"] == "train.py 30"
    assert [row["variant"] for row in found["rows"]] == ["as_is", "naive"]
    assert all(row["call_us"] > 0 and row["ops"] > 0 for row in found["rows"])
    assert found["rows"][0]["factor"] == 1.0
    for row in found["rows"]:
        assert row["attention_calls"] == 1 and 0 < row["attention_share"] < 1
        assert row["forward_us"] > 0 and row["backward_us"] > 0
    assert [row["ran"] for row in found["rows"]] == [["sdpa_flash"], ["naive"]]
    as_is = op_names(folder, "train_as_is.json.gz")
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in as_is
    assert not any(name.startswith("attn_ext::") for name in as_is)
    assert "attn_ext::naive_attention" in op_names(folder, "train_naive.json.gz")
    about = Trace.load(folder / "profile" / "train_naive.json.gz").metadata["attn_ext"]
    assert about == {"command": ["train.py", "30"], "swap": "naive"}


def test_to_the_end(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["exec", "--to-end", *FEW, "--format", "json", "--", "train.py", "8"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == summary(folder), "what the script prints is not on stdout"
    assert "at the end __main__ ['8']" in err


def test_too_few_steps(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["exec", *FEW, "--", "train.py", "4"]) == 2
    assert capfd.readouterr().err.endswith(
        "attn-ext exec: SCRIPT: expected over 4 ends of a step by optimizer; --skip, --warmup "
        "and --count decide, got 4\n"
    )
    assert not (folder / "profile" / "summary.json").exists()


def test_a_script_that_fails(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "fails.py").write_text("import sys; print('here', flush=True); sys.exit(7)")
    assert cli.main(["exec", "--", "fails.py"]) == 7
    out, err = capfd.readouterr()
    assert out == "here\n"
    assert err.endswith("attn-ext exec: as_is: the script ended with status 7\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "none.py"], "SCRIPT: expected a file, or -m MODULE, got none.py"),
        (
            ["--activate", "fast,naive", "--", "train.py"],
            "--activate: expected some of aten, naive",
        ),
        (["--active", "0", "--", "train.py"], "--active: expected at least 1, got 0"),
        (["--skip", "-1", "--", "train.py"], "--skip: expected at least 0, got -1"),
    ],
)
def test_errors(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["exec", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"attn-ext exec: {message}")
