"""Profiles some steps of a training loop: a trace on disk, and the profiler's table."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from attn_ext.profile.figures import Row, Summary, read_trace
from attn_ext.profile.table import render, write
from attn_ext.profile.trace import Trace


class StepProfiler:
    """Call `step` after each training step, in a `with` block or between `start` and `stop`.

    Of the steps, the first `wait` pass unseen, `warmup` run under the profiler and are thrown away,
    and `active` are kept. Then `<out>/<name>.json.gz` is a Chrome trace (open it at
    https://ui.perfetto.dev), and `row` holds the figures of a step. A loop that ends before leaves
    no trace.

    Args:
        out: a folder, made where there is none.
        name: of the trace and of the row.
        wait, warmup, active: counts of steps; active is at least 1.
        device: where the training runs; None is CUDA where there is one.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] = "profile",
        name: str = "train",
        *,
        wait: int = 3,
        warmup: int = 2,
        active: int = 3,
        device: torch.device | str | None = None,
    ) -> None:
        for what, count, least in (("wait", wait, 0), ("warmup", warmup, 0), ("active", active, 1)):
            if count < least:
                raise ValueError(f"{what}: expected at least {least}, got {count}")
        self.path = Path(out) / f"{name}.json.gz"
        self.row: Row | None = None
        self._name = name
        self._on_gpu = (
            torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
        )
        self._watched = range(wait, wait + warmup + active)  # numbers of the steps that are seen
        self._step = 0
        self._profiler = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_gpu,
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._read,
            record_shapes=True,
            profile_memory=not self._on_gpu,
        )

    def start(self) -> None:
        # Kineto of torch 2.13 prints a line at each start and stop; what it loses, the row says.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.start()

    def step(self) -> None:
        """Ends a step."""
        if self._on_gpu and self._step in self._watched:
            torch.cuda.synchronize()  # its work belongs to it, not to the one that follows
        self._step += 1
        self._profiler.step()

    def stop(self) -> None:
        self._profiler.stop()

    def __enter__(self) -> StepProfiler:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.stop()

    def _read(self, profiler: profile) -> None:
        profiler.export_chrome_trace(str(self.path))
        self.row = Row(self._name, trace=self.path.name)
        read_trace(self.row, Trace.load(self.path), self._on_gpu)


def print_table(rows: list[Row], title: str, on_gpu: bool) -> None:
    """The rows of one or more StepProfilers as the profiler's table."""
    facts = {"kind": "gpu" if on_gpu else "cpu", "torch": torch.__version__}
    write(render(Summary(facts, rows), title))
