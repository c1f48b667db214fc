"""What `attn-ext exec` shows of a script: a row for each way that its attention ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attn_ext.profile.figures import Row, Summary, read_trace, set_factors
from attn_ext.profile.record import Recorded
from attn_ext.profile.trace import Trace

#: The row of the script as it is.
AS_IS = "as_is"


def read_run(name: str, recorded: Recorded, path: Path, steps: int) -> Row:
    """The figures of a step: those of the trace, and those measured beside it.

    What the script did after its last step is in the trace as well, but is none of the `steps`.
    """
    row = Row(name, trace=path.name, call_us=recorded.step_us)
    trace = Trace.load(path)
    read_trace(row, trace, recorded.machine["kind"] == "gpu", trace.steps[:steps])
    row.peak_bytes = recorded.peak_bytes
    return row


def summarize(runs: list[Row], machine: dict[str, Any], command: str) -> Summary:
    summary = Summary(machine | {"command": command, "unit": "step"}, runs)
    set_factors(summary)
    return summary
