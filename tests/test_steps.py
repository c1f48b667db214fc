"""Steps of a training loop under the profiler: by hand, in Lightning, in Hugging Face's Trainer."""

from __future__ import annotations

import pytest
import torch
from frameworks import framework
from torch import nn

import attn_ext
from attn_ext.integrations.steps import StepProfiler
from attn_ext.profile import Trace

pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    """Predicts its input by attention to it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        out = attn_ext.scaled_dot_product_attention(q, k, v, is_causal=True, backend="flash")
        return (out.transpose(1, 2).flatten(2) - x).square().mean()


def loop(profiler: StepProfiler, steps: int, device: torch.device) -> list[bool]:
    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 6, 16, device=device)
    completed = []
    with profiler:
        for _ in range(steps):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            completed.append(profiler.step())
    return completed


def attention_ops(trace: Trace) -> list[list[str]]:
    """Of each step, the fused ops in order."""
    return [
        [op.name for op in step.operators if op.name.startswith("attn_ext::flash")]
        for step in trace.steps
    ]


BOTH_PASSES = ["attn_ext::flash_attention_forward", "attn_ext::flash_attention_backward"]


def test_the_steps_asked_for_are_in_the_trace(device, tmp_path, capfd) -> None:
    profiler = StepProfiler(tmp_path / "new", "loop", wait=3, warmup=1, active=2, device=device)
    assert loop(profiler, 9, device) == [False] * 5 + [True] + [False] * 3
    assert profiler.path == tmp_path / "new" / "loop.json.gz"
    trace = Trace.load(profiler.path)
    assert attention_ops(trace) == [BOTH_PASSES] * 2
    assert trace.metadata["attn_ext"]["variant"] == "loop"
    row = profiler.row
    assert row.variant == "loop" and row.call_us > 0
    assert row.kernels >= 8 if device.type == "cuda" else row.ops == len(trace.steps[0].operators)
    assert capfd.readouterr().out == ""
    profiler.print()
    printed = capfd.readouterr().out
    assert printed.startswith("a training step\n") and "\nloop " in printed
    assert f"wrote {profiler.path}" in printed


def test_a_loop_that_ends_early(device, tmp_path, capsys) -> None:
    part = StepProfiler(tmp_path, "part", wait=1, warmup=1, active=4, device=device)
    loop(part, 4, device)
    assert part.row is not None and part.row.call_us is None  # no step but the first was waited for
    assert attention_ops(Trace.load(part.path))[:2] == [BOTH_PASSES] * 2
    assert device.type == "cuda" or part.row.ops  # the two steps agree: none of them is empty
    for steps in (0, 1, 2):
        none = StepProfiler(tmp_path, f"none {steps}", wait=1, warmup=1, active=4, device=device)
        loop(none, steps, device)
        assert none.row is None and not none.path.exists()
    none.print()
    assert capsys.readouterr().out == "no profile: training ended after 2 steps of 6\n"


def test_from_the_first_step_on(device, tmp_path) -> None:
    profiler = StepProfiler(tmp_path, wait=0, warmup=0, active=1, device=device)
    assert loop(profiler, 2, device) == [True, False]
    assert attention_ops(Trace.load(profiler.path)) == [BOTH_PASSES]


def test_counts_that_are_too_low_are_refused(tmp_path) -> None:
    for options, message in [
        ({"wait": -1}, "wait: expected at least 0, got -1"),
        ({"active": 0}, "active: expected at least 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            StepProfiler(tmp_path, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("end", ["after", "before", "by an error"])
def test_lightning(device, tmp_path, capsys, end) -> None:
    pytorch = framework("lightning.pytorch")
    from attn_ext.integrations.lightning import ProfileSteps

    class Module(pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if end == "by an error" and index == 3:
                raise ArithmeticError
            return self.model(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = ProfileSteps(out=tmp_path, wait=2, warmup=1, active=2)
    trainer = pytorch.Trainer(
        max_steps=3 if end == "before" else 7, callbacks=[callback], logger=False, devices=1,
        accelerator=device.type, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(torch.randn(20, 6, 16), batch_size=2)
    if end == "by an error":
        with pytest.raises(ArithmeticError):
            trainer.fit(Module(), data)
        assert not torch.autograd._profiler_enabled()
        return
    trainer.fit(Module(), data)
    printed = capsys.readouterr().out
    if end == "before":
        assert "no profile: training ended after 3 steps of 5" in printed
        return
    assert attention_ops(Trace.load(tmp_path / "lightning.json.gz")) == [BOTH_PASSES] * 2
    assert "\nlightning " in printed


@pytest.mark.parametrize("end", ["after", "before"])
def test_hf_trainer(device, tmp_path, capsys, end) -> None:
    transformers = framework("transformers", "5.0")
    framework("accelerate")
    from attn_ext.integrations.hf_trainer import ProfileSteps
    from attn_ext.integrations.transformers import register

    config = transformers.GPT2Config(
        vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, attn_implementation="eager"
    )
    model = transformers.GPT2LMHeadModel(config)
    model.set_attn_implementation(register("flash"))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3 if end == "before" else 7, report_to=[],
        per_device_train_batch_size=2, gradient_accumulation_steps=2, save_strategy="no",
        use_cpu=device.type == "cpu", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    ids = torch.randint(31, (28, 8))
    callback = ProfileSteps(out=tmp_path, wait=2, warmup=1, active=2)
    transformers.Trainer(
        model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[callback],
    ).train()  # fmt: skip
    printed = capsys.readouterr().out
    if end == "before":
        assert "no profile: training ended after 3 steps of 5" in printed
        return
    # Two batches a step, two layers a batch.
    steps = attention_ops(Trace.load(tmp_path / "hf_trainer.json.gz"))
    assert [sorted(names) for names in steps] == [sorted(BOTH_PASSES * 4)] * 2
    assert "\nhf_trainer " in printed
