"""Runs a user's script under the profiler: the process that `attn-ext exec` starts.

python -m attn_ext.profile.record PLAN, where PLAN is the JSON of a Plan. The script runs as Python
would run it. A step ends where the optimizer that stepped first steps again, or with each call of
attention; the profiler sees the steps that the plan names, after which the script is left.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: What ends a step.
COUNTS = ("optimizer", "attention")
#: The name for attn_ext.activate() beside the backends of attn_ext.use().
ATEN = "aten"


@dataclass(frozen=True)
class Plan:
    """What to run and which of its steps to look at.

    Attributes:
        command: as after `python`: a script or "-m" and a module, then its arguments.
        skip: steps that run unprofiled; all but the first are timed.
        warmup: steps inside the profiler's session that are not kept.
        active: steps that are kept.
        count: what ends a step, one of COUNTS.
        to_end: lets the script run on after the last step.
        swap: what attention runs on: None as the script has it, "aten" attn_ext.activate(), else a
            backend of attn_ext.use().
        trace, facts: the files to write, a Chrome trace and what Recorded holds.
    """

    command: list[str]
    skip: int
    warmup: int
    active: int
    count: str
    to_end: bool
    swap: str | None
    trace: str
    facts: str


@dataclass
class Recorded:
    """What a recording measured beside its trace.

    Attributes:
        steps: steps that ended before the script was left, or ended.
        step_us: mean wall time of the skipped steps after the first, in us, nothing profiled.
        peak_bytes: most bytes that torch held on the GPU during a kept step.
        machine: device and versions, as in summary.json.
    """

    steps: int = 0
    step_us: float | None = None
    peak_bytes: int | None = None
    machine: dict[str, Any] = field(default_factory=dict)


class _Done(BaseException):
    """Leaves the script, past its handlers of exceptions, after the last step."""


class _Steps:
    """Counts the steps, times those that are skipped, and moves the profiler on."""

    def __init__(self, plan: Plan, profiler: Any, on_gpu: bool) -> None:
        self.plan, self.profiler, self.on_gpu = plan, profiler, on_gpu
        self.seen = Recorded()
        self._since = 0.0

    def end(self) -> None:
        plan, seen = self.plan, self.seen
        seen.steps += 1
        last = plan.skip + plan.warmup + plan.active
        if seen.steps > last:
            return
        if seen.steps in (1, plan.skip):
            self._synchronize()
            now = time.perf_counter()
            if seen.steps == plan.skip and plan.skip > 1:
                seen.step_us = (now - self._since) / (plan.skip - 1) * 1e6
            self._since = now
        if self.on_gpu:
            self._watch_memory(kept=seen.steps > plan.skip + plan.warmup)
        if seen.steps == last:
            self._synchronize()
        self.profiler.step()
        self.label()
        if seen.steps == last and not plan.to_end:
            raise _Done

    def label(self) -> None:
        """Writes into the trace what it is of, once the profiler's session has begun."""
        if self.seen.steps == self.plan.skip:
            about = {"command": self.plan.command, "swap": self.plan.swap}
            self.profiler.add_metadata_json("attn_ext", json.dumps(about))

    def _synchronize(self) -> None:
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()

    def _watch_memory(self, kept: bool) -> None:
        import torch

        if kept:
            peak = torch.cuda.max_memory_allocated()
            self.seen.peak_bytes = max(self.seen.peak_bytes or 0, peak)
        torch.cuda.reset_peak_memory_stats()


def record(plan: Plan) -> Recorded:
    """Runs the script in this process and writes the trace, if enough steps came."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    from attn_ext.profile import machine

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    profiler = profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu,
        schedule=schedule(wait=plan.skip, warmup=plan.warmup, active=plan.active, repeat=1),
        record_shapes=True,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(plan.trace),
    )
    steps = _Steps(plan, profiler, on_gpu)
    with _swapped(plan.swap), _counted(plan.count, steps):
        profiler.start()
        steps.label()
        try:
            _run(plan.command)
        except _Done:
            pass
        finally:
            profiler.stop()
            steps.seen.machine = machine.facts(device)
            Path(plan.facts).write_text(json.dumps(asdict(steps.seen)))
    return steps.seen


def _run(command: list[str]) -> None:
    """As `python COMMAND...` would."""
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


def _swapped(swap: str | None) -> AbstractContextManager[Any]:
    import attn_ext

    if swap is None:
        return nullcontext()
    return attn_ext.activated() if swap == ATEN else attn_ext.use(swap)


@contextmanager
def _counted(count: str, steps: _Steps) -> Iterator[None]:
    if count == "attention":
        with _attention_mode(steps):
            yield
        return
    from torch.optim import optimizer

    first: list[int] = []

    def stepped(which: Any, *rest: Any) -> None:
        first[:] = first or [id(which)]
        if id(which) == first[0]:
            steps.end()

    hook = optimizer.register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        hook.remove()


def _attention_mode(steps: _Steps) -> AbstractContextManager[Any]:
    """Ends a step after every call of attention that Python makes: F.sdpa, our ops, torch's."""
    from torch.overrides import TorchFunctionMode

    class Calls(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            name = str(getattr(func, "__name__", func))
            if re.search("attention|attn", name) and "backward" not in name:
                steps.end()
            return out

    return Calls()


if __name__ == "__main__":
    record(Plan(**json.loads(sys.argv[1])))
