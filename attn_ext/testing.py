"""For tests: what a call does on the device, asserted by its trace.

    from attn_ext.testing import assert_trace

    def test_no_hidden_copy():
        assert_trace(lambda: model(batch), "memcpy=0 kernels<=40")

Anything that is not known fails: a check never passes because nothing was recorded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attn_ext.profile.guess import parse
from attn_ext.profile.trace import STEP, Trace
from attn_ext.profile.verdicts import PASS, Subject, check

__all__ = ["assert_trace", "record"]


def assert_trace(
    what: Trace | str | PathLike[str] | Callable[[], Any],
    guess: str,
    *,
    steps: int = 3,
    warmup: int = 2,
) -> Trace:
    """Asserts that a trace is as guessed, and returns it.

    Args:
        what: a Trace, a file, a torch.profiler.profile that has ended, or a function of no
            arguments, which is then profiled as `record` does.
        guess: in the language of attn_ext.profile.guess, such as "kernels=1 memcpy=0".
        steps, warmup: of `record`.

    Raises:
        AssertionError: a check that does not hold, or is not known. The text has every verdict and
            what explains it.
        GuessError, TraceError: a guess or a file that cannot be read.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    guesses = parse(guess)
    if isinstance(what, Trace):
        trace = what
    elif isinstance(what, (str, PathLike)):
        trace = Trace.load(what)
    elif hasattr(what, "export_chrome_trace"):
        trace = _exported(what)
    elif callable(what):
        trace = record(what, steps=steps, warmup=warmup)
    else:
        raise TypeError(
            f"assert_trace: expected a Trace, a path, a profiler or a function, got {what!r}"
        )
    verdicts = check(guesses, [Subject("trace", trace)])
    if any(verdict.verdict != PASS for verdict in verdicts):
        raise AssertionError("\n".join(["the trace is not as guessed", *map(str, verdicts)]))
    return trace


def record(call: Callable[[], Any], *, steps: int = 3, warmup: int = 2) -> Trace:
    """Profiles a function: `warmup` calls, then `steps` calls, each a step of the trace.

    CUDA is recorded where there is a device. The warm-up is inside the profiler's session, since
    CUPTI may lose kernels at the start of one.
    """
    from torch import cuda
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    if steps < 1 or warmup < 0:
        raise ValueError(f"record: expected steps >= 1 and warmup >= 0, got {steps} and {warmup}")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    on_gpu = cuda.is_available()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=warmup, active=steps, repeat=1) if warmup else None,
        record_shapes=True,
        profile_memory=not on_gpu,
    ) as profiler:
        for _ in range(warmup + steps):
            with record_function(STEP):
                call()
            if on_gpu:
                cuda.synchronize()
            if warmup:
                profiler.step()
    return _exported(profiler)


def _exported(profiler: Any) -> Trace:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return Trace.load(path)
