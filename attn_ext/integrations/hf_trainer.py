"""Profiles steps of Hugging Face's Trainer.

from attn_ext.integrations.hf_trainer import ProfileSteps

trainer = Trainer(model, arguments, callbacks=[ProfileSteps(out="profile")], ...)
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from attn_ext.integrations.steps import StepProfiler


class ProfileSteps(TrainerCallback):
    """Writes a trace of some training steps and prints the profiler's table.

    A step is one of the optimizer's, with all batches that it accumulates; what runs between two
    steps, evaluation for example, belongs to the later one. Of several processes the first is
    profiled.

    Args:
        options: those of StepProfiler; its device is the Trainer's, unless given.
    """

    def __init__(self, **options: Any) -> None:
        StepProfiler(**options)  # so that a wrong option fails here
        self._options = {"name": "hf_trainer"} | options
        self._profiler: StepProfiler | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._profiler:  # of a training that an error has ended
            self._profiler.stop()
        if state.is_world_process_zero:
            self._profiler = StepProfiler(**{"device": args.device} | self._options)
            self._profiler.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._profiler and self._profiler.step():
            self._profiler.print()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._profiler:
            self._profiler.stop()
            if self._profiler.steps < self._profiler.end:
                self._profiler.print()
