"""What a variant costs over a model's layers: one saved kernel, times the depth."""

from __future__ import annotations

from attn_ext.profile.figures import Row, Summary
from attn_ext.profile.table import UNKNOWN, Line, Span, grid


def render(summary: Summary, layers: int) -> list[Line]:
    """A row for each variant that ran: its figures of one layer `layers` times, and what it saves
    beside the first row."""
    base = summary.base
    if base is None:
        return []
    time = "GPU ms" if summary.by_device else "call ms"
    titles = ["variant", "device operations", time, "CPU ms", "saves", f"saves {time}"]
    rows = [
        [
            row.variant,
            _times(_operations(row), layers),
            _ms(_time(row, summary), layers),
            _ms(row.cpu_us, layers),
            _times(_saved(_operations(base), _operations(row)), layers),
            _ms(_saved(_time(base, summary), _time(row, summary)), layers),
        ]
        for row in summary.rows
        if row.error is None
    ]
    if not summary.on_gpu:  # which has neither
        titles = [titles[0], titles[2], titles[5]]
        rows = [[row[0], row[2], row[5]] for row in rows]
    text = f"over {layers} layers, beside {base.variant}"
    return [[], [Span(text, "bold")], *grid(titles, rows)]


def _operations(row: Row) -> int | None:
    """Kernels, copies and fills of the device."""
    if row.kernels is None or row.memcpy is None or row.memset is None:
        return None
    return row.kernels + row.memcpy + row.memset


def _time(row: Row, summary: Summary) -> float | None:
    return row.gpu_us if summary.by_device else row.call_us


def _saved(base: float | None, own: float | None) -> float | None:
    return None if base is None or own is None else base - own


def _times(value: float | None, layers: int) -> str:
    return UNKNOWN if value is None else f"{value * layers:,.0f}"


def _ms(value: float | None, layers: int) -> str:
    return UNKNOWN if value is None else f"{value * layers / 1e3:,.2f}"
