"""Trains the same GPT with one attention after another, from the same weights on the same text.

python benchmarks/train_gpt.py                                        a minute on two CPU cores
python benchmarks/train_gpt.py --attention sdpa naive inplace flash
python benchmarks/train_gpt.py --size 124M --attention sdpa activate flash naive inplace

Attentions: `sdpa` (F.scaled_dot_product_attention, torch chooses), `activate` (the same call under
attn_ext.activated()), `eager` (plain torch), and every backend of attn_ext. Prints loss, time of a
step and peak memory; writes <out>/<device>-train.json and, with matplotlib, the loss curves. The
time of a step is a median without the first steps and without those under the profiler.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT, SIZES, Attend, Size, least_losses, make_text
from measure import RESULTS, Result, pinned
from torch import Tensor

import attn_ext
from attn_ext.integrations.steps import StepProfiler, print_table
from attn_ext.profile.case import DTYPES
from attn_ext.profile.progress import progress_bar
from attn_ext.sdpa import OWN_BACKENDS

NAMES = ("sdpa", "activate", "eager", *attn_ext.BACKENDS)
WARMUP, PROFILED = 2, 3  # steps of the profiler, the last of the run
# Bytes for each score [B, H, S, S]: kept of every layer for backward, and more while a layer works.
# In bf16 plain torch keeps the softmax in fp32 and a copy of it, and math does all in fp32.
SCORE_BYTES = {
    "eager": {"bf16": (6, 14), "fp32": (4, 12)},
    "naive": {"bf16": (2, 6), "fp32": (4, 12)},
    "inplace": {"bf16": (2, 4), "fp32": (4, 8)},
    "math": {"bf16": (4, 16), "fp32": (4, 16)},
}


def eager(query: Tensor, key: Tensor, value: Tensor, *, hidden: Tensor) -> Tensor:
    scores = query @ key.transpose(2, 3) * query.shape[3] ** -0.5
    return scores.masked_fill(hidden, -inf).softmax(-1) @ value


def attention(
    name: str, size: Size, device: torch.device
) -> tuple[Attend, AbstractContextManager[Any]]:
    """What the model calls, and what the training stands in."""
    if name == "eager":
        hidden = torch.ones(size.seq, size.seq, dtype=torch.bool, device=device).triu(1)
        return partial(eager, hidden=hidden), pinned(name)
    if name in (*OWN_BACKENDS, "auto"):
        own = partial(attn_ext.scaled_dot_product_attention, is_causal=True, backend=name)
        return own, pinned(name)
    torchs = partial(F.scaled_dot_product_attention, is_causal=True)
    return torchs, attn_ext.activated() if name == "activate" else pinned(name)


def kept_bytes(size: Size, name: str, dtype: str, batch: int) -> int:
    """What the layers keep of a forward pass for backward."""
    element, tokens = {"bf16": 2, "fp32": 4}[dtype], batch * size.seq
    of_width = 8 + 15 * element  # fifteen tensors as wide as the model, and two in fp32 always
    of_scores = SCORE_BYTES.get(name, {}).get(dtype, (0, 0))[0] * batch * size.heads * size.seq**2
    return size.layers * (tokens * size.width * of_width + of_scores)


def predicted_bytes(size: Size, parameters: int, name: str, dtype: str, batch: int) -> int:
    """Peak memory of a step: the optimizer's state, what layers keep, the output or the scores."""
    # In fp32 weights, gradients and two moments; in bf16 autocast's copy of the weights.
    state = {"bf16": 18, "fp32": 16}[dtype] * parameters
    output = batch * size.seq * size.vocabulary * 16  # logits, in fp32, their softmax, gradients
    working = SCORE_BYTES.get(name, {}).get(dtype, (0, 0))[1] * batch * size.heads * size.seq**2
    return state + kept_bytes(size, name, dtype, batch) + max(output, working)


def micro_batch(options: argparse.Namespace, parameters: int, device: torch.device) -> int:
    """The largest part of a batch that should fit with every attention asked for."""
    if device.type != "cuda":
        return options.batch
    room = 0.8 * torch.cuda.get_device_properties(device).total_memory

    def fits(batch: int) -> bool:
        return all(
            predicted_bytes(SIZES[options.size], parameters, name, options.dtype, batch) < room
            for name in options.attention
        )

    parts = [part for part in range(options.batch, 0, -1) if options.batch % part == 0]
    return next(filter(fits, parts), 1)


class Run:
    """One training, and what came of it."""

    def __init__(self, name: str, options: argparse.Namespace, text: Tensor) -> None:
        self.name, self.options, self.text = name, options, text
        self.device = text.device
        self.losses: list[float] = []
        self.step_us: list[float] = []
        self.peak_bytes: int | None = None
        self.profiler: StepProfiler | None = None
        if options.profile:
            self.profiler = StepProfiler(
                Path(options.out) / "profile", f"train-{options.size}-{name}",
                wait=options.steps - WARMUP - PROFILED, warmup=WARMUP, active=PROFILED,
                device=self.device,
            )  # fmt: skip

    @property
    def median_us(self) -> float:
        unseen = self.options.steps - (WARMUP + PROFILED if self.profiler else 0)
        return median(self.step_us[min(unseen - 1, max(2, unseen // 10)) : unseen])

    def train(self, size: Size, micro: int, progress: Callable[..., None]) -> None:
        torch.manual_seed(self.options.seed)
        attend, stand = attention(self.name, size, self.device)
        model = GPT(size, attend).to(self.device)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=size.lr, betas=(0.9, 0.95), weight_decay=0.1,
            fused=self.device.type == "cuda",
        )  # fmt: skip
        # The attention that is pinned or active is no part of what compiled code is looked up by.
        torch.compiler.reset()
        call = torch.compile(model, dynamic=False) if self.options.compile else model
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with (
            stand,
            torch.compiler.config.patch(force_disable_caches=True),
            self.profiler or nullcontext(),
        ):
            for step in range(self.options.steps):
                for group in optimizer.param_groups:
                    group["lr"] = size.lr * min(1.0, (step + 1) / 10)
                start = time.perf_counter()
                self.losses.append(self._step(call, optimizer, step, micro))
                self.step_us.append((time.perf_counter() - start) * 1e6)
                if self.profiler:
                    self.profiler.step()
                progress(step + 1, self.losses[-1], self.step_us[-1])
        if self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated()

    def _step(self, call: Any, optimizer: torch.optim.Optimizer, step: int, micro: int) -> float:
        batch = self.options.batch
        rows = self.text[step * batch : (step + 1) * batch]
        total = torch.zeros((), device=self.device)
        for part in rows.split(micro):
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.options.dtype == "bf16"
            ):
                loss = call(part) * (len(part) / batch)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total.item()  # waits for the device


def row(run: Run, size: Size, parameters: int, micro: int) -> dict[str, Any]:
    """One training in the form of a result file's row."""
    options = run.options
    facts = {
        "case": "train", "pass": "fwd+bwd", "dtype": DTYPES[options.dtype],
        "batch": options.batch, "micro_batch": micro, "heads": size.heads,
        "kv_heads": size.heads, "seq_q": size.seq, "seq_k": size.seq,
        "head_dim": size.width // size.heads, "causal": True, "layers": size.layers,
        "vocabulary": size.vocabulary, "parameters": parameters, "compile": options.compile,
        "seed": options.seed, "call_us": {run.name: run.median_us},
        "predicted_bytes": {
            run.name: predicted_bytes(size, parameters, run.name, options.dtype, micro)
        },
        "loss": {run.name: [round(loss, 5) for loss in run.losses]},
    }  # fmt: skip
    if run.peak_bytes is not None:
        facts["peak_bytes"] = {run.name: run.peak_bytes}
    return facts


def print_runs(runs: list[Run], size: Size) -> None:
    first = runs[0]
    print(f"\n{'attention':15}{'loss':>9}{'differs by':>12}{'step ms':>10}{'words/s':>12}", end="")
    print(f"{'times ' + first.name:>15}{'peak MiB':>11}")
    for run in runs:
        apart = max(abs(a - b) for a, b in zip(run.losses, first.losses, strict=True))
        words = run.options.batch * size.seq / run.median_us * 1e6
        peak = "-" if run.peak_bytes is None else f"{run.peak_bytes / 2**20:,.0f}"
        print(
            f"{run.name:15}{run.losses[-1]:9.4f}{apart:12.1e}{run.median_us / 1e3:10.1f}"
            f"{words:12,.0f}{first.median_us / run.median_us:14.2f}x{peak:>11}"
        )
    knows, sees_one = least_losses(size.words, first.options.seed)
    print(f"least loss: {knows:.2f}; of a model that sees the last word alone: {sees_one:.2f}")


def plot(runs: list[Run], size: Size, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for index, run in enumerate(runs):  # curves that should lie on each other: the first is widest
        width = len(runs) - index
        by_step.plot(run.losses, linewidth=width, label=run.name)
        seconds = [(step + 1) * run.median_us / 1e6 for step in range(len(run.losses))]
        by_time.plot(seconds, run.losses, linewidth=1.5, label=run.name)
    knows, sees_one = least_losses(size.words, runs[0].options.seed)
    for loss, style, label in (
        (knows, ":", "knows the text"),
        (sees_one, "--", "sees the last word alone"),
    ):
        for axes in (by_step, by_time):
            axes.axhline(loss, color="gray", linestyle=style, linewidth=1)
        by_step.annotate(label, (0, loss), va="bottom", fontsize="small", color="gray")
    by_step.set_xlabel("step")
    by_step.set_ylabel("loss, nats a word")
    by_time.set_xlabel("seconds, by the median step")
    by_time.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--attention", nargs="+", choices=NAMES, default=["sdpa", "flash"])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, help="sequences of a step; default: 8, 4 for 124M")
    parser.add_argument("--micro-batch", type=int, help="sequences at once; default: what fits")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16" if on_gpu else "fp32")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--compile", action="store_true", help="under torch.compile")
    parser.add_argument("--profile", action="store_true", help="profile the last three steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of what is written")
    options = parser.parse_args(arguments)
    options.batch = options.batch or SIZES[options.size].batch
    least = 3 + (WARMUP + PROFILED if options.profile else 0)
    if options.steps < least:
        parser.error(f"--steps: expected at least {least}, got {options.steps}")
    if options.micro_batch is not None and options.batch % options.micro_batch:
        parser.error(f"--micro-batch: expected a divisor of {options.batch}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    size, device = SIZES[options.size], torch.device(options.device)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(size, eager).parameters())
    micro = options.micro_batch or micro_batch(options, parameters, device)
    print(
        f"GPT of {parameters / 1e6:.1f}M parameters, {options.dtype}, {options.steps} steps of "
        f"{options.batch} x {size.seq} words, {micro} sequences at once"
    )
    for name in options.attention:
        needs = predicted_bytes(size, parameters, name, options.dtype, micro)
        print(f"{name:15} should need {needs / 2**20:,.0f} MiB")
    text = make_text(options.steps * options.batch, size.seq + 1, size.words, options.seed)
    text = text.to(device)
    runs: list[Run] = []
    result = Result("train", "gpu" if device.type == "cuda" else "cpu")
    result.path = options.out / result.path.name
    options.out.mkdir(parents=True, exist_ok=True)
    with result, progress_bar() as bar:
        for index, name in enumerate(options.attention):

            def progress(step: int, loss: float, step_us: float, name=name, index=index) -> None:
                what = f"{name}: step {step}, loss {loss:.3f}, {step_us / 1e3:,.0f} ms"
                if bar:
                    done = index * options.steps + step
                    bar(done, len(options.attention) * options.steps, what)
                if step % max(1, options.steps // 5) == 0:
                    print(what, flush=True)

            run = Run(name, options, text)
            try:
                run.train(size, micro, progress)
            except RuntimeError as error:  # also where memory runs out
                print(f"{name} cannot run: {str(error).splitlines()[0]}")
            else:
                runs.append(run)
                result.add(row(run, size, parameters, micro))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if not runs:
        return 1
    print_runs(runs, size)
    if options.profile:
        rows = [run.profiler.row for run in runs if run.profiler and run.profiler.row]
        print_table(rows, f"a training step of {options.size}", device)
    try:
        plot(runs, size, result.path.with_suffix(".png"))
    except ImportError:
        print("no figure: pip install matplotlib")
    print(f"wrote {result.path.with_suffix('.*')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
