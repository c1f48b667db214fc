"""The training example: every attention learns the same, from the same weights and text."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
ATTENTIONS = ["sdpa", "eager", "naive", "inplace", "flash", "math", "auto", "activate"]


@pytest.fixture
def train_gpt(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import train_gpt

    return train_gpt


def losses_of(out: Path) -> dict[str, list[float]]:
    (path,) = out.glob("*-train.json")
    rows = json.loads(path.read_text())["rows"]
    return {name: losses for row in rows for name, losses in row["loss"].items()}


@pytest.mark.parametrize(
    ("dtype", "steps", "names", "tolerance"),
    [("fp32", 5, ATTENTIONS, 1e-4), ("bf16", 3, ["sdpa", "eager", "naive", "flash"], 2e-2)],
    ids=["fp32", "bf16"],
)
def test_every_attention_learns_the_same(
    device, train_gpt, tmp_path, dtype, steps, names, tolerance
) -> None:
    options = ["--steps", str(steps), "--batch", "1", "--device", device.type, "--dtype", dtype]
    assert train_gpt.main([*options, "--out", str(tmp_path), "--attention", *names]) == 0
    losses = losses_of(tmp_path)
    assert list(losses) == names
    first = losses["sdpa"]
    assert len(first) == steps and first[-1] < first[0]
    for name, own in losses.items():
        assert own == pytest.approx(first, abs=tolerance), name
    assert list(tmp_path.glob("*-train.png"))


def test_parts_of_a_batch_add_up(train_gpt, tmp_path) -> None:
    options = ["--steps", "3", "--batch", "2", "--device", "cpu", "--attention", "naive"]
    for micro in ("1", "2"):
        out = tmp_path / micro
        assert train_gpt.main([*options, "--micro-batch", micro, "--out", str(out)]) == 0
    whole = losses_of(tmp_path / "2")["naive"]
    assert losses_of(tmp_path / "1")["naive"] == pytest.approx(whole, abs=1e-4)


def test_profile_writes_a_trace_and_prints_the_table(train_gpt, tmp_path, capsys) -> None:
    options = ["--steps", "8", "--batch", "1", "--device", "cpu", "--profile"]
    arguments = [*options, "--out", str(tmp_path), "--attention", "naive", "flash"]
    assert train_gpt.main(arguments) == 0
    printed = capsys.readouterr().out
    for name in ("naive", "flash"):
        assert (tmp_path / "profile" / f"train-tiny-{name}.json.gz").exists()
        assert f"\ntrain-tiny-{name} " in printed


@pytest.mark.gpu
def test_compiled(train_gpt, tmp_path) -> None:
    names = ["sdpa", "flash", "naive"]
    options = ["--steps", "4", "--batch", "2", "--compile", "--device", "cuda", "--dtype", "bf16"]
    assert train_gpt.main([*options, "--out", str(tmp_path), "--attention", *names]) == 0
    losses = losses_of(tmp_path)
    for name in names:
        assert losses[name] == pytest.approx(losses["sdpa"], abs=2e-2), name


def test_an_attention_that_cannot_run_leaves_the_others(train_gpt, tmp_path, capsys) -> None:
    """torch has no cuDNN attention on a CPU."""
    options = ["--steps", "3", "--batch", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert train_gpt.main([*options, "--attention", "sdpa_cudnn", "flash"]) == 0
    assert "sdpa_cudnn cannot run: " in capsys.readouterr().out
    assert list(losses_of(tmp_path)) == ["flash"]


def test_the_text_is_a_chain_for_each_topic(train_gpt) -> None:
    gpt = train_gpt.make_text.__globals__
    text = train_gpt.make_text(64, 500, words=32, seed=3)
    assert torch.equal(text, train_gpt.make_text(64, 500, words=32, seed=3))
    assert not torch.equal(text, train_gpt.make_text(64, 500, words=32, seed=4))
    assert text[:, 0].unique().tolist() == list(range(gpt["TOPICS"]))
    together = set()
    for topic in range(gpt["TOPICS"]):
        rows = text[text[:, 0] == topic]
        pairs = {tuple(pair) for row in rows.tolist() for pair in pairwise(row)}
        assert len(pairs) <= 8 * 32
        together |= pairs
    assert len(together) > 2 * 8 * 32
    knows, sees_one = train_gpt.least_losses(32, seed=3)
    assert 1.8 < knows < 1.85 and knows + 0.5 < sees_one < knows + 1.4


def test_bad_options_are_refused(train_gpt, capsys) -> None:
    for arguments, message in [
        (["--steps", "2"], "--steps: expected at least 3, got 2"),
        (["--steps", "7", "--profile"], "--steps: expected at least 8, got 7"),
        (["--batch", "4", "--micro-batch", "3"], "--micro-batch: expected a divisor of 4"),
        (["--attention", "fast"], "invalid choice: 'fast'"),
    ]:
        with pytest.raises(SystemExit):
            train_gpt.main(arguments)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["flash", "naive", "inplace", "eager", "math"])
def test_what_layers_keep_is_predicted(train_gpt, name, dtype) -> None:
    """Counted on the CPU, where autocast leaves the softmax of eager in bf16."""
    device = torch.device("cpu")
    size = replace(train_gpt.SIZES["tiny"], seq=512)
    attend, stand = train_gpt.attention(name, size, device)
    model = train_gpt.GPT(size, attend)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        stand,
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        model(train_gpt.make_text(8, size.seq + 1, size.words, seed=0))
    for weight in model.parameters():
        kept.pop(weight.data_ptr(), None)
    predicted = train_gpt.kept_bytes(size, name, dtype, batch=8)
    if (name, dtype) == ("eager", "bf16"):
        predicted -= 4 * size.layers * 8 * size.heads * size.seq**2
    assert sum(kept.values()) == pytest.approx(predicted, rel=0.1)


def test_a_batch_is_cut_to_what_fits(train_gpt, monkeypatch) -> None:
    options = train_gpt.parse(["--size", "124M", "--batch", "8", "--attention", "flash", "eager"])
    options.dtype = "bf16"
    needs = [
        train_gpt.predicted_bytes(train_gpt.SIZES["124M"], 10**8, "eager", "bf16", n)
        for n in (1, 2, 4, 8)
    ]
    for memory, micro in ((needs[0], 1), (needs[2] * 1.3, 4), (needs[3], 4), (needs[3] * 2, 8)):
        card = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, card=card: card)
        assert train_gpt.micro_batch(options, 10**8, torch.device("cuda")) == micro
    assert train_gpt.micro_batch(options, 10**8, torch.device("cpu")) == 8
