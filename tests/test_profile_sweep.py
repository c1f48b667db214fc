"""`attn-ext sweep`: the fit, the lengths, and what an S x S matrix looks like in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from attn_ext.profile import CaseError, cli, machine
from attn_ext.profile.growth import growth
from attn_ext.profile.sweep import lengths_of

TINY = ["--device", "cpu", "--batch", "1", "--heads", "2", "--head-dim", "8"]


def sweep(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    options = [*TINY, "--steps", "1", "--warmup", "1", "--out", str(tmp_path)]
    assert cli.main(["sweep", *arguments, *options]) == 0
    return json.loads((tmp_path / "sweep.json").read_text())


def test_a_power_law_is_found_exactly() -> None:
    fit = growth({length: 3.0 * length**2 for length in (512, 1024, 2048, 8192)})
    assert fit is not None and fit.points == 4
    assert (fit.exponent, fit.local) == (pytest.approx(2), pytest.approx(2))
    assert fit.residual == pytest.approx(0, abs=1e-9)


def test_growth_that_has_not_settled_shows() -> None:
    """A fixed cost below a quadratic one: the fit is off, the end is steeper."""
    fit = growth({length: 100.0 + (length / 100) ** 2 for length in (512, 1024, 2048, 4096)})
    assert fit is not None and fit.residual > 0.1
    assert fit.local > fit.exponent > 0.5


def test_points_off_the_line_are_the_residual() -> None:
    fit = growth({100: 1.1, 200: 2 / 1.1, 400: 4 / 1.1, 800: 8.8})
    assert fit is not None and fit.exponent == pytest.approx(1)
    assert fit.residual == pytest.approx(0.1)


def test_no_growth_from_two_points_or_zeros() -> None:
    assert growth({512: 1.0, 1024: 2.0}) is None
    assert growth({512: 1.0, 1024: 2.0, 2048: 0.0}) is None


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("512..4096", [512, 1024, 2048, 4096]),
        ("100..300", [100, 200, 300]),
        ("100..1000", [100, 200, 400, 800, 1000]),
        ("7..7", [7]),
        ("300,100,200,100", [100, 200, 300]),
    ],
)
def test_lengths(text: str, lengths: list[int]) -> None:
    assert lengths_of(text) == lengths


@pytest.mark.parametrize("text", ["", "a..b", "512..", "4096..512", "0..8", "1,2,", "1..2..3"])
def test_lengths_that_cannot_be(text: str) -> None:
    with pytest.raises(CaseError, match=r"seq: expected lengths such as .*, got "):
        lengths_of(text)


def test_the_matrix_of_scores_is_quadratic_and_flash_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = sweep(tmp_path, "naive", "flash", "sdpa_cudnn", "--seq", "128..1024", "--plot", "none")
    memory = {variant: fits["peak_bytes"] for variant, fits in found["growth"].items()}
    assert set(memory) == {"naive", "flash"}
    assert memory["naive"]["exponent"] == pytest.approx(2, abs=0.1)
    assert memory["flash"]["exponent"] == pytest.approx(1, abs=0.1)
    assert max(fit["residual"] for fit in memory.values()) < 0.1
    assert found["lengths"] == [128, 256, 512, 1024]
    for length, summary in zip(found["lengths"], found["summaries"], strict=True):
        assert summary["case"]["seq"] == length
        naive = summary["rows"][0]
        assert naive["call_us"] > 0 and (tmp_path / naive["trace"]).exists()
    out = capsys.readouterr().out
    assert "sdpa_cudnn: from seq 128 on: torch has this backend on CUDA only" in out
    assert max(map(len, out.splitlines()[:-1])) <= 100


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_picture(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    sweep(tmp_path, "flash", "--seq", "8,16,32", "--plot", kind)
    data = (tmp_path / f"sweep.{kind}").read_bytes()
    assert data.startswith(b"\x89PNG") if kind == "png" else b"quadratic" in data or b"<svg" in data
    assert f"sweep.{kind}: " in capsys.readouterr().out


def test_without_matplotlib_there_is_a_word_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    sweep(tmp_path, "flash", "--seq", "8,16,32")
    assert "no sweep.png (matplotlib is not installed)" in capsys.readouterr().out
    assert not (tmp_path / "sweep.png").exists()


def test_a_variant_that_gets_too_slow_is_left_out(tmp_path: Path) -> None:
    found = sweep(tmp_path, "naive", "--seq", "8,16,32", "--limit", "1e-9", "--plot", "none")
    errors = [summary["rows"][0].get("error") for summary in found["summaries"]]
    assert errors == [None, *["a call took over 1e-09 s at seq 8"] * 2]


def test_a_matrix_that_the_host_cannot_hold_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * 2 * 16 * 16 * 4)
    found = sweep(tmp_path, "naive", "flash", "--seq", "8,16,32", "--plot", "none")
    naive, flash = (
        [summary["rows"][at].get("error") for summary in found["summaries"]] for at in (0, 1)
    )
    assert naive[:2] == [None, None] and flash == [None] * 3
    assert naive[2].startswith("its S x S matrices need 0.0 GiB")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seq", "8..16"], "--seq: expected at least 3 lengths, got 8, 16"),
        (["--limit", "0"], "--limit: expected seconds above 0, got 0.0"),
        (["flsh"], "VARIANT: expected some of "),
    ],
)
def test_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["sweep", *TINY, "--out", str(tmp_path / "out"), *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"attn-ext sweep: {message}")
    assert not (tmp_path / "out").exists()
