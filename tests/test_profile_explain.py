"""`attn-ext explain`: what torch and attn_ext choose, and what executes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

import attn_ext
from attn_ext.profile import VARIANTS, Case, cli
from attn_ext.profile.calls import NEEDS_CUDA
from attn_ext.profile.choice import choice, probe

CPU = torch.device("cpu")
SMALL = Case(batch=2, heads=4, kv_heads=2, seq=16, head_dim=8, dtype="fp32")


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert cli.main(["explain", "--device", "cpu", "--json", *arguments]) == 0
    answers: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return answers


def test_the_choice_is_what_runs() -> None:
    query, key, value = (torch.randn(1, 2, 16, 8) for _ in range(3))
    case = Case(batch=1, heads=2, kv_heads=2, seq=16, head_dim=8, dtype="fp32")
    for allowed, name in ((SDPBackend.MATH, "math"), (SDPBackend.FLASH_ATTENTION, "sdpa_flash")):
        with sdpa_kernel(allowed):
            found = choice(case, CPU)
            with profile() as profiler:
                F.scaled_dot_product_attention(query, key, value, is_causal=True)
        assert found.sdpa == name and found.order == [name]
        math = any("attention_math" in event.key for event in profiler.key_averages())
        assert math == (name == "math")


def test_auto_and_activate_are_told() -> None:
    assert choice(SMALL, CPU).auto == "flash"
    wide = Case(batch=1, heads=1, kv_heads=1, seq=8, head_dim=300, dtype="fp32")
    assert choice(wide, CPU).auto == choice(wide, CPU).sdpa
    assert not choice(SMALL, CPU).active
    with attn_ext.activated():
        assert choice(SMALL, CPU).active


@pytest.mark.parametrize("backward", [False, True])
def test_the_probe_sees_each_backend_run(backward: bool) -> None:
    case = Case(batch=2, heads=4, kv_heads=2, seq=16, head_dim=8, dtype="fp32", backward=backward)
    probed = {one.asked: one for one in probe(case, CPU)}
    assert tuple(probed) == ("sdpa", "auto", *VARIANTS)
    for variant in VARIANTS:
        if variant in NEEDS_CUDA:
            assert probed[variant].error == "torch has this backend on CUDA only"
        else:
            assert probed[variant].ran == [variant], probed[variant]
    assert probed["auto"].ran == ["flash"]


def test_shapes_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--kv-heads", "2", "--dtype", "bf16"]
    first, second = explained(capsys, "1x4x16x8", "2x2x8x300", *options)
    assert first["case"] == vars(Case(1, 4, 2, 16, 8, "bf16")) and first["auto"] == first["sdpa"]
    assert second["case"]["head_dim"] == 300 and "probe" not in second
    (default,) = explained(capsys)
    assert default["case"]["seq"] == 512 and set(default["refused"]) == set(NEEDS_CUDA)


def test_a_refusal_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--device", "cpu", "1x2x8x300", "--probe"]) == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("    flash "))
    assert "cannot run: " in line and "256" in line
    assert "    math            math\n" in out


@pytest.mark.parametrize("shape", ["8x16x1024", "axbxcxd", "8,16,1024,64", "0x1x1x1"])
def test_shapes_that_cannot_be(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--device", "cpu", shape]) == 2
    err = capsys.readouterr().err
    assert err.startswith("attn-ext explain: ") and err.count("\n") == 1 and "got" in err
