"""A run as a table of text, at most 100 columns wide. With rich it gets colours, without it is the
same table."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from typing import NamedTuple, TextIO

from attn_ext.profile.figures import Row, Summary

WIDTH = 100
_GAP = "  "
#: What stands for a figure that is not known.
UNKNOWN = "-"


class Span(NamedTuple):
    text: str
    style: str = ""


#: A line of the table; the styles are rich's.
Line = list[Span]


class Column(NamedTuple):
    title: str
    cell: Callable[[Row], str | None]
    meaning: str


def count(value: int | None) -> str | None:
    return None if value is None else str(value)


def us(value: float | None) -> str | None:
    return None if value is None else f"{value:,.1f}"


def mib(value: int | None) -> str | None:
    if value is None:
        return None
    mib = value / 2**20
    return f"{mib:,.1f}" if mib >= 1 or value == 0 else f"{mib:.2g}"


def columns(summary: Summary) -> list[Column]:
    """The columns of which at least one cell is known."""
    base = summary.base
    unit = summary.unit
    by = "GPU us" if summary.by_device else f"{unit} us"
    all_columns = [
        Column("kernels", lambda row: count(row.kernels), f"kernels of a {unit}"),
        Column("memcpy", lambda row: count(row.memcpy), "copies by the device"),
        Column("memset", lambda row: count(row.memset), "fills by the device"),
        Column("lost", lambda row: count(row.lost), "launches of the run without a kernel seen"),
        Column("GPU us", lambda row: us(row.gpu_us), f"sum of a {unit}'s device events"),
        Column("ops", lambda row: count(row.ops), f"operators of a {unit}, nested ones included"),
        Column("copies", lambda row: count(row.copies), "tensors copied by them"),
        Column("copied MiB", lambda row: mib(row.copy_bytes), "written by the copies"),
        Column("cold us", lambda row: us(row.cold_us), "wall time of the very first call"),
        Column(f"{unit} us", lambda row: us(row.call_us), f"wall time of a {unit}, not profiled"),
        Column("CPU us", lambda row: us(row.cpu_us), "time to issue it, not profiled"),
        Column("peak MiB", lambda row: mib(row.peak_bytes), "allocated on top of the inputs"),
        Column(
            f"vs {base.variant if base else ''}",
            lambda row: None if row.factor is None else f"{row.factor:.2f}x",
            f"how many times as fast, by {by}",
        ),
    ]
    if not any(row.lost for row in summary.rows):
        all_columns = [column for column in all_columns if column.title != "lost"]
    return [c for c in all_columns if any(c.cell(row) is not None for row in summary.rows)]


def where(summary: Summary) -> str:
    """Device and versions, as far as they are known."""
    facts = summary.facts
    parts = [str(facts["device"])] if "device" in facts else []
    parts += [f"{key} {facts[key]}" for key in ("torch", "cuda", "cudnn") if key in facts]
    if not summary.on_gpu and "threads" in facts:
        parts.append(f"{facts['threads']} threads")
    return ", ".join(parts)


def render(summary: Summary, title: str) -> list[Line]:
    """The table: title, where it ran, a row for each variant, notes, what the columns mean."""
    shown = columns(summary)
    lines = [[Span(cut(title), "bold")], [Span(cut(where(summary)), "dim")], []]
    lines += grid(
        ["variant", *(column.title for column in shown)],
        [
            [row.variant, *(column.cell(row) or UNKNOWN for column in shown)]
            if row.error is None
            else [row.variant, f"cannot run: {row.error}"]
            for row in summary.rows
        ],
    )
    for row in summary.rows:
        for note in row.notes:
            lines += [[Span(text, "yellow")] for text in _wrapped(f"{row.variant}: {note}")]
    names = [row.variant for row in summary.rows] + [column.title for column in shown]
    width = max(map(len, ["variant", *names]))
    for column in shown:
        lines.append([Span(f"{column.title.ljust(width)}{_GAP}{column.meaning}", "dim")])
    return lines


def grid(titles: list[str], rows: list[list[str]]) -> list[Line]:
    """Aligned lines between two rules. A row of two cells in a wider table is a name and a text."""
    full = [row for row in (titles, *rows) if len(row) == len(titles)]
    widths = [max(len(row[at]) for row in full) for at in range(len(titles))]
    widths[0] = max(len(row[0]) for row in (titles, *rows))
    rule = [Span("-" * (sum(widths) + len(_GAP) * (len(widths) - 1)), "dim")]

    def aligned(cells: list[str]) -> str:
        return "".join(_GAP + cell.rjust(w) for cell, w in zip(cells, widths[1:], strict=True))

    lines = [[Span(titles[0].ljust(widths[0]) + aligned(titles[1:]), "bold")], rule]
    for name, *cells in rows:
        if len(cells) == len(titles) - 1:
            rest = Span(aligned(cells))
        else:
            rest = Span(_GAP + cut(cells[0], WIDTH - widths[0] - len(_GAP)), "yellow")
        lines.append([Span(name.ljust(widths[0]), "cyan"), rest])
    return [*lines, rule]


def plain(lines: list[Line]) -> str:
    return "".join("".join(span.text for span in line).rstrip() + "\n" for line in lines)


def write(lines: list[Line], stream: TextIO | None = None) -> None:
    """Prints the lines, in colour where rich is installed and the stream is a terminal.

    rich leaves the colours out where NO_COLOR is set.
    """
    stream = stream or sys.stdout
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        stream.write(plain(lines))
        return
    console = Console(file=stream, highlight=False)
    for line in lines:
        text = Text.assemble(*((span.text, span.style) for span in line))
        text.rstrip()
        console.print(text, soft_wrap=True)


def cut(text: str, width: int = WIDTH) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")
