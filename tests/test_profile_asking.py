"""`attn-ext run --guess` and `--ask`: stated before, judged after."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from attn_ext.profile import cli

TINY = ["run", "naive", "inplace", "--device", "cpu", "--batch", "1", "--heads", "2", "--seq", "16",
        "--head-dim", "8", "--steps", "1", "--warmup", "1"]  # fmt: skip


def guesses(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "summary.json").read_text())["guesses"]
    return found


def test_verdicts_stand_below_the_table_and_in_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "naive: copies=1 backend=naive; inplace: copies=1"
    assert cli.main([*TINY, "--out", str(tmp_path), "--guess", text]) == 1
    out = capsys.readouterr().out
    assert "PASS     naive: copies=1, seen 1\n" in out
    assert "MISS     inplace: copies=1, seen 0\n" in out
    found = guesses(tmp_path)
    assert found["text"] == text and str(found["stated"]).startswith("20")
    assert [v["verdict"] for v in found["verdicts"]] == ["PASS", "PASS", "MISS"]


@pytest.mark.parametrize(("text", "status"), [("*: dtype=fp32", 0), ("naive: kernels=5", 3)])
def test_the_status(
    text: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU nobody knows of kernels: that is no PASS."""
    command = [*TINY, "--out", str(tmp_path), "--guess", text, "--format", "json"]
    assert cli.main(command) == status
    assert json.loads(capsys.readouterr().out)["guesses"] == guesses(tmp_path)


def test_a_file_of_guesses(tmp_path: Path) -> None:
    path = tmp_path / "guesses.toml"
    path.write_text("[guess.naive]\ncopies = 1\n[guess.inplace]\ncopies = 0\n")
    assert cli.main([*TINY, "--out", str(tmp_path), "--guess", str(path)]) == 0
    assert guesses(tmp_path)["text"] == "naive: copies=1; inplace: copies=0"


def test_asked_before_it_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess that cannot be read is asked for again, an empty line is none."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("copies=many\ncopies=1\n\n"))
    assert cli.main([*TINY, "--out", str(tmp_path), "--ask"]) == 0
    out, err = capsys.readouterr()
    assert err.count("naive: ") == 2 and "expected a number" in err and "inplace: " in err
    assert "PASS     naive: copies=1, seen 1" in out
    assert guesses(tmp_path)["text"] == "naive: copies=1"


def test_where_nobody_answers_nothing_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert cli.main([*TINY, "--out", str(tmp_path), "--ask"]) == 0
    assert "guesses" not in json.loads((tmp_path / "summary.json").read_text())


@pytest.mark.parametrize("guess", ["naive", "naive: fast=1", "none.toml"])
def test_a_wrong_guess_ends_the_run_before_it_begins(
    guess: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main([*TINY, "--out", str(out), "--guess", guess]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not out.exists()
