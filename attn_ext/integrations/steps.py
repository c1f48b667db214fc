"""Profiles some steps of a training loop: a trace on disk, and the profiler's table."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from attn_ext.profile import machine
from attn_ext.profile.figures import Row, Summary, read_trace
from attn_ext.profile.table import render, write
from attn_ext.profile.trace import Trace


class StepProfiler:
    """Call `step` after each training step, in a `with` block or between `start` and `stop`.

    The first `wait` steps are timed, all but the very first; the next `warmup` run under the
    profiler and are thrown away; the `active` ones after them are kept. Then `path` is a Chrome
    trace, and `row` has the figures of a step. Of a loop that ends earlier the trace has the steps
    that came, and where none did, there is neither trace nor row.

    Args:
        out: a folder, made where there is none.
        name: of the trace, <out>/<name>.json.gz, and of the row.
        wait, warmup, active: counts of steps; active is at least 1.
        device: where the training runs; None is CUDA where there is one.

    Raises:
        ValueError: a count that is too low.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] = "profile",
        name: str = "train",
        *,
        wait: int = 5,
        warmup: int = 2,
        active: int = 3,
        device: torch.device | str | None = None,
    ) -> None:
        for what, count, least in (("wait", wait, 0), ("warmup", warmup, 0), ("active", active, 1)):
            if count < least:
                raise ValueError(f"{what}: expected at least {least}, got {count}")
        self.path = Path(out) / f"{name}.json.gz"
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.steps = 0  # that ended
        self.row: Row | None = None
        self.wait, self.first, self.end = wait, wait + warmup, wait + warmup + active
        self._name, self._since = name, 0.0
        self._step_us: float | None = None
        self._on_gpu = self.device.type == "cuda"
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
        self._label()

    def step(self) -> bool:
        """Ends a step. True with the one that completes the trace."""
        self.steps += 1
        if self.steps > self.end:
            return False
        # What a step launched belongs to it, and not to the time of the next.
        if self._on_gpu and (self.steps in (1, self.wait) or self.steps > self.wait):
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self.steps == 1:
            self._since = now
        elif self.steps == self.wait:
            self._step_us = (now - self._since) / (self.wait - 1) * 1e6
        self._profiler.step()
        self._label()
        return self.steps == self.end

    def stop(self) -> None:
        self._profiler.stop()

    def print(self) -> None:
        """The table, and where the trace is; or why there is none."""
        if self.row is None:
            print(f"no profile: training ended after {self.steps} steps of {self.end}")
            return
        print_table([self.row], "a training step", self.device)
        print(f"wrote {self.path}: attn-ext report reads it, https://ui.perfetto.dev shows it")

    def _label(self) -> None:
        """Writes into the trace what it is of, once the profiler's session has begun."""
        if self.steps == self.wait:
            about = {"variant": self._name, "device": machine.device_name(self.device)}
            self._profiler.add_metadata_json("attn_ext", json.dumps(about))

    def _read(self, profiler: profile) -> None:
        # The profiler opens a step as soon as one ends: of a loop that has ended, the last is none.
        kept = min(self.steps, self.end) - self.first
        if kept > 0:
            profiler.export_chrome_trace(str(self.path))
            self.row = Row(self._name, trace=self.path.name, call_us=self._step_us)
            trace = Trace.load(self.path)
            read_trace(self.row, trace, self._on_gpu, trace.steps[:kept])

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


def print_table(rows: Sequence[Row], title: str, device: torch.device) -> None:
    """The rows of StepProfilers as the profiler's table."""
    facts = machine.facts(device) | {"unit": "step"}
    write(render(Summary(facts, list(rows)), title))
