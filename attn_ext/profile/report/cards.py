"""The figures at the top of a group: what a reader wants to know before the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from attn_ext.profile.columns import mib, us
from attn_ext.profile.figures import Row, Summary


@dataclass(frozen=True)
class Card:
    """`value` in large print, `note` below it; `meaning` defines it."""

    label: str
    value: str
    note: str
    meaning: str
    alarm: bool = False


def cards(summary: Summary) -> list[Card]:
    """Those whose figures are known."""
    rows = [row for row in summary.rows if row.error is None]
    return [*_time(summary, rows), *_kernels(rows), *_copies(rows), *_memory(rows), *_lost(rows)]


def _time(summary: Summary, rows: Sequence[Row]) -> Iterator[Card]:
    def time(row: Row) -> float | None:
        return row.gpu_us if summary.on_gpu else row.call_us

    clock = "sum of a call's device events" if summary.on_gpu else "wall time of a call"
    best = _least(rows, time)
    if best is None:
        return
    value = f"{us(time(best))} us"
    if len(rows) == 1:
        yield Card("GPU time" if summary.on_gpu else "Time per call", value, best.variant, clock)
        return
    base = summary.base
    against = f", {best.factor:.1f}x {base.variant}" if base and best.factor else ""
    yield Card("Fastest", best.variant, value + against, f"The least {clock}.")


def _kernels(rows: Sequence[Row]) -> Iterator[Card]:
    counts = {row.variant: row.kernels for row in rows if row.kernels is not None}
    if counts:
        yield Card(
            "Kernels per call", _span([str(count) for count in _ends(counts.values())]),
            _who(counts), "Kernels that one call runs on the device, copies and fills apart.",
        )  # fmt: skip


def _copies(rows: Sequence[Row]) -> Iterator[Card]:
    """Copies by the device, or on a CPU those of aten::copy_."""
    copied = [
        (row, row.memcpy if row.memcpy is not None else row.copies,
         row.memcpy_bytes if row.memcpy is not None else row.copy_bytes)
        for row in rows
    ]  # fmt: skip
    known = [(row, count, size) for row, count, size in copied if count is not None]
    if not known:
        return
    meaning = "The most bytes that copies of whole tensors write in one call."
    row, count, size = max(known, key=lambda one: (one[2] or 0, one[1]))
    if not count:
        yield Card("Hidden copies", "none", "no call copies a tensor", meaning)
        return
    times = f"{count} {'copy' if count == 1 else 'copies'} in {row.variant}"
    value = str(count) if size is None else f"{mib(size)} MiB"
    yield Card("Hidden copies", value, times, meaning)


def _memory(rows: Sequence[Row]) -> Iterator[Card]:
    peaks = {row.variant: row.peak_bytes for row in rows if row.peak_bytes is not None}
    if peaks:
        values = [str(mib(peak)) for peak in _ends(peaks.values())]
        yield Card(
            "Peak memory", f"{_span(values)} MiB", _who(peaks),
            "Most bytes allocated at once in a call, on top of its inputs.",
        )  # fmt: skip


def _lost(rows: Sequence[Row]) -> Iterator[Card]:
    lost = sum(row.lost or 0 for row in rows)
    if lost:
        yield Card(
            "Launches lost", str(lost), "the profiler saw no kernel for them",
            "Launches in the trace without a kernel: counts of their steps would be too low.",
            alarm=True,
        )  # fmt: skip


def _least(rows: Sequence[Row], figure: Callable[[Row], float | None]) -> Row | None:
    known = [row for row in rows if figure(row) is not None]
    return min(known, key=lambda row: figure(row) or 0.0, default=None)


def _ends(values: Iterable[int]) -> list[int]:
    ordered = sorted(values)
    return [ordered[0], ordered[-1]]


def _span(ends: Sequence[str]) -> str:
    return ends[0] if ends[0] == ends[-1] else f"{ends[0]} to {ends[-1]}"


def _who(figures: dict[str, int]) -> str:
    """Names the ends of the span."""
    if len(set(figures.values())) == 1:
        return next(iter(figures)) if len(figures) == 1 else "all the same"
    least, most = min(figures, key=figures.__getitem__), max(figures, key=figures.__getitem__)
    return f"{least} least, {most} most"
