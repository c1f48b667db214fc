"""`attn-ext exec` on a GPU: a training script as it is, and on our kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attn_ext.profile import cli

pytestmark = pytest.mark.gpu

SCRIPT = """\
import torch
import torch.nn.functional as F

layer = torch.nn.Linear(256, 768, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(layer.parameters())
for step in range(30):
    x = torch.randn(4, 1024, 256, device="cuda", dtype=torch.bfloat16)
    query, key, value = layer(x).view(4, 1024, 3, 4, 64).permute(2, 0, 3, 1, 4)
    F.scaled_dot_product_attention(query, key, value, is_causal=True).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_attention_of_a_training_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    Path("train.py").write_text(SCRIPT)
    assert cli.main(["exec", "--activate", "aten,naive", "--", "train.py"]) == 0
    rows = json.loads(Path("profile/summary.json").read_text())["rows"]
    as_is, aten, naive = rows
    assert as_is["ran"][0] in ("sdpa_flash", "sdpa_cudnn")
    assert aten["ran"] == ["sdpa_flash on attn_ext"] and naive["ran"] == ["naive"]
    for row in rows:
        assert row["attention_calls"] == 1 and 0 < row["attention_share"] < 1
        assert 0 < row["forward_us"] < row["backward_us"] < row["gpu_us"]
        assert row["call_us"] > 0 and row["peak_bytes"] > 0 and row["bound"]
    assert naive["peak_bytes"] > aten["peak_bytes"], "it keeps the matrices of scores"
