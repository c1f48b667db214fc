"""`attn-ext story`: each chapter states a guess, and the trace answers it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attn_ext.profile import cli

ROOT = Path(__file__).parent.parent
H200 = "tests/data/h200/forward"


def test_the_page_of_an_h200_is_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = tmp_path / "STORY.md"
    assert cli.main(["story", "--from", H200, "--page", str(page)]) == 0
    assert page.read_text() == (ROOT / "STORY.md").read_text(), "run: make tables"


def test_what_the_page_tells() -> None:
    text = (ROOT / "STORY.md").read_text()
    chapters = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    naive, inplace, flash, cudnn, side_by_side = chapters
    assert "MISS     naive: memcpy=0, seen 1\n" in naive
    assert "a copy by the device, 256.0 MiB" in naive and "`aten::clone`" in naive
    assert "PASS     inplace: memcpy=0, seen 0\n" in inplace and "a copy" not in inplace
    assert "PASS     flash: kernels=1, seen 1\n" in flash and "times as fast as `inplace`" in flash
    assert "MISS     flash: occupancy>50%" in flash and "Kineto allows 48 KiB" in flash
    assert "sdpa_cudnn: kernels=1, seen 1" in cudnn
    assert "over 48 layers, beside naive" in side_by_side and "Kineto %" in side_by_side
    verdicts = re.findall(r"^(PASS|MISS|UNKNOWN) ", text, re.MULTILINE)
    assert set(verdicts) == {"PASS", "MISS"}


def test_on_a_cpu(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--batch", "1", "--heads", "2", "--seq", "64", "--head-dim", "8"]
    assert cli.main(["story", *options, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "STORY.md").read_text()
    assert "MISS     naive: copies=0, seen 1\n" in text
    assert "PASS     inplace: copies=0, seen 0\n" in text
    assert "PASS     flash: peak_bytes<0.03125MiB" in text
    assert "UNKNOWN  sdpa_cudnn: backend=sdpa_cudnn, the variant did not run" in text
    assert "| `aten::bmm` |" in text and "us of its own" in text


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["story", "--from", str(tmp_path)]) == 2
    assert "summary.json: No such file" in capsys.readouterr().err
    (tmp_path / "summary.json").write_text('{"schema": 1, "rows": [{"variant": "math"}]}')
    assert cli.main(["story", "--from", str(tmp_path)]) == 2
    assert "expected a run of some of naive, inplace, flash" in capsys.readouterr().err
