"""Profiles steps of a Lightning Trainer.

from attn_ext.integrations.lightning import ProfileSteps

trainer = Trainer(callbacks=[ProfileSteps(out="profile")])
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from attn_ext.integrations.steps import StepProfiler


class ProfileSteps(Callback):
    """Writes a trace of some training batches and prints the profiler's table.

    A step is a batch, with the optimizer's step where gradients are not accumulated; what runs
    between two batches, validation for example, belongs to the later one. Of several processes the
    first is profiled. Not together with Trainer(profiler="pytorch"): torch has one profiler at a
    time.

    Args:
        options: those of StepProfiler; its device is the Trainer's, unless given.
    """

    def __init__(self, **options: Any) -> None:
        StepProfiler(**options)  # so that a wrong option fails here
        self._options = {"name": "lightning"} | options
        self._profiler: StepProfiler | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            device = trainer.strategy.root_device
            self._profiler = StepProfiler(**{"device": device} | self._options)
            self._profiler.start()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._profiler and self._profiler.step():
            self._profiler.print()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._profiler:
            self._profiler.stop()
            if self._profiler.steps < self._profiler.end:
                self._profiler.print()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._profiler:
            self._profiler.stop()
