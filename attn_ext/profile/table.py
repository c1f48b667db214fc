"""A run as a table of text, at most 100 columns wide. With rich it gets colours, without it is the
same table."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import NamedTuple, TextIO

from attn_ext.profile.columns import Column, columns
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


def room(wide: bool) -> int | None:
    """How wide a table may be: as the terminal, at least WIDTH; None, as wide as it gets."""
    if wide:
        return None
    return (
        max(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns) if sys.stdout.isatty() else WIDTH
    )


def where(summary: Summary) -> str:
    """Device and versions, as far as they are known."""
    facts = summary.facts
    parts = [str(facts["device"])] if "device" in facts else []
    parts += [f"{key} {facts[key]}" for key in ("torch", "cuda", "cudnn") if key in facts]
    if not summary.on_gpu and "threads" in facts:
        parts.append(f"{facts['threads']} threads")
    return ", ".join(parts)


def render(summary: Summary, title: str, width: int | None = WIDTH) -> list[Line]:
    """The table: title, where it ran, a row for each variant, notes, what the columns mean."""
    shown, left_out = fitting(columns(summary), summary.rows, width)
    lines = [[Span(cut(title), "bold")], [Span(cut(where(summary)), "dim")], []]
    lines += grid(
        ["variant", *(column.title for column in shown)],
        [
            [row.variant, *_cells(row, shown)]
            if row.error is None
            else [row.variant, f"cannot run: {row.error}"]
            for row in summary.rows
        ],
    )
    for row in summary.rows:
        for note in row.notes:
            lines += [[Span(text, "yellow")] for text in _wrapped(f"{row.variant}: {note}")]
    names = [row.variant for row in summary.rows] + [column.title for column in shown]
    first = max(map(len, ["variant", *names]))
    for column in shown:
        lines.append([Span(f"{column.title.ljust(first)}{_GAP}{column.meaning}", "dim")])
    if left_out:
        titles = ", ".join(column.title for column in left_out)
        lines.append([Span(f"--wide has more: {titles}", "dim")])
    return lines


def _cells(row: Row, shown: list[Column]) -> list[str]:
    return [column.cell(row) or UNKNOWN for column in shown]


def fitting(
    all_columns: list[Column], rows: list[Row], width: int | None = WIDTH
) -> tuple[list[Column], list[Column]]:
    """The columns for which there is room, and those that had to go."""
    shown = list(all_columns)

    def total() -> int:
        lines = [[column.title for column in shown], *(_cells(row, shown) for row in rows)]
        widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
        first = max(len("variant"), *(len(row.variant) for row in rows))
        return first + sum(len(_GAP) + width for width in widths)

    while width is not None and total() > width and any(column.rank for column in shown):
        shown.remove(max(shown, key=lambda column: column.rank))
    return shown, [column for column in all_columns if column not in shown]


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
