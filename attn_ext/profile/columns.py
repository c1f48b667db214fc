"""The columns of a run's table: how a figure of a row is written, and what it means."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from attn_ext.profile.figures import Row, Summary


class Column(NamedTuple):
    """`rank` is the order in which columns go where there is no room: the highest first."""

    title: str
    cell: Callable[[Row], str | None]
    meaning: str
    rank: int = 0


def count(value: int | None) -> str | None:
    return None if value is None else str(value)


def us(value: float | None) -> str | None:
    return None if value is None else f"{value:,.1f}"


def mib(value: int | None) -> str | None:
    if value is None:
        return None
    mib = value / 2**20
    return f"{mib:,.1f}" if mib >= 1 or value == 0 else f"{mib:.2g}"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"


def _rate(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _of_peak(row: Row) -> str | None:
    return None if row.peak_percent is None else f"{row.peak_percent:.0f}% {row.limit}"


def _bound(row: Row) -> str | None:
    return None if row.busy is None else f"{row.bound} {row.busy:.0%}"


def _yes(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"


def columns(summary: Summary) -> list[Column]:
    """The columns of which at least one cell is known."""
    base = summary.base
    unit = summary.unit
    time = "device's time" if summary.on_gpu else "host's time, profiled"
    by = "GPU us" if summary.by_device else f"{unit} us"
    all_columns = [
        Column("kernels", lambda row: count(row.kernels), f"kernels of a {unit}"),
        Column("memcpy", lambda row: count(row.memcpy), "copies by the device"),
        Column("memset", lambda row: count(row.memset), "fills by the device", 3),
        Column("lost", lambda row: count(row.lost), "launches of the run without a kernel seen"),
        Column("GPU us", lambda row: us(row.gpu_us), f"sum of a {unit}'s device events"),
        Column("attn", lambda row: count(row.attention_calls), "calls of attention in it"),
        Column("fwd us", lambda row: us(row.forward_us), f"forward attention, of the {time}", 1),
        Column("bwd us", lambda row: us(row.backward_us), f"its gradients, of the {time}", 1),
        Column(
            "attn %",
            lambda row: None if row.attention_share is None else f"{row.attention_share:.0%}",
            f"what both are of the {time}",
        ),
        Column("ops", lambda row: count(row.ops), f"operators of a {unit}, nested ones included"),
        Column("copies", lambda row: count(row.copies), "tensors copied by them"),
        Column("copied MiB", lambda row: mib(row.copy_bytes), "written by the copies"),
        Column(
            "cold ms",
            lambda row: us(None if row.cold_us is None else row.cold_us / 1e3),
            "wall time of the very first call, which compiles, plans and loads",
            5,
        ),
        Column(f"{unit} us", lambda row: us(row.call_us), f"wall time of a {unit}, not profiled"),
        Column("CPU us", lambda row: us(row.cpu_us), "time to issue it, not profiled", 1),
        Column("bound", _bound, f"which sets the pace, and GPU us / {unit} us", 2),
        Column(
            "TFLOP/s",
            lambda row: _rate(row.tflops),
            "work that the mask lets through, over that time",
            2,
        ),
        Column("of peak", _of_peak, "of the peak that the work would reach first, by its limit", 5),
        Column(
            "GB/s", lambda row: _rate(row.gbps), "the least that must be moved, over the time", 6
        ),
        Column("ran", lambda row: ", ".join(row.ran) or None, "backend in the trace", 8),
        Column(
            "occ %",
            lambda row: _percent(row.occupancy_percent),
            "warps that the longest kernel keeps busy, of those the GPU holds",
            4,
        ),
        Column(
            "Kineto %",
            lambda row: _percent(row.kineto_occupancy_percent),
            "the same as the trace has it, where that is wrong",
            7,
        ),
        Column("tensor cores", lambda row: _yes(row.tensor_cores), "as kernels' names tell", 6),
        Column(
            "peak MiB",
            lambda row: mib(row.peak_bytes),
            "allocated on top of the inputs" if unit == "call" else "most memory held in a step",
        ),
        Column(
            f"vs {base.variant if base else ''}",
            lambda row: None if row.factor is None else f"{row.factor:.2f}x",
            f"how many times as fast, by {by}",
        ),
    ]
    if not any(row.lost for row in summary.rows):
        all_columns = [column for column in all_columns if column.title != "lost"]
    if unit == "call":  # it is all attention
        all_columns = [c for c in all_columns if c.title not in ("attn", "attn %")]
        if not any(row.backward_us for row in summary.rows):
            all_columns = [c for c in all_columns if c.title not in ("fwd us", "bwd us")]
    else:
        all_columns = [c for c in all_columns if c.title not in ("TFLOP/s", "GB/s", "of peak")]
    return [c for c in all_columns if any(c.cell(row) is not None for row in summary.rows)]
