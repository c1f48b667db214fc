"""The way from naive to fused attention as a page: guess, verdict and what was seen, by variant."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from attn_ext.profile.case import Case
from attn_ext.profile.columns import columns, mib, us
from attn_ext.profile.errors import InputError
from attn_ext.profile.event import Event
from attn_ext.profile.figures import Row, Summary, read_trace, set_factors
from attn_ext.profile.guess import parse
from attn_ext.profile.kernel_name import decode
from attn_ext.profile.layers import render as render_layers
from attn_ext.profile.region import Region
from attn_ext.profile.saved import read_summaries
from attn_ext.profile.table import UNKNOWN, fitting, grid, plain, render, where
from attn_ext.profile.trace import Trace
from attn_ext.profile.verdicts import Subject, check

_WIDTH = 100
#: How deep the model is whose savings the page ends with.
_LAYERS = 48
#: Events of a call that are listed, the longest ones.
_LISTED = 8


class Chapter(NamedTuple):
    """A variant, what to say of it, and what to guess on a GPU and on a CPU. {scores} is the size
    of the matrix of scores."""

    variant: str
    title: str
    lead: str
    on_gpu: str
    on_cpu: str


CHAPTERS = (
    Chapter(
        "naive",
        "the formula, step by step",
        "A product, a scale, a mask, a softmax, a product: five ops, so five kernels, and nothing "
        "else.",
        "kernels=5 memcpy=0 memset=0",
        "copies=0",
    ),
    Chapter(
        "inplace",
        "the copy goes",
        "`masked_fill_` writes into the scores that are there. One underscore, one operation of "
        "the device less; the memory stays, since the matrix of scores does.",
        "kernels=5 memcpy=0 peak_bytes>={scores}",
        "copies=0 peak_bytes>={scores}",
    ),
    Chapter(
        "flash",
        "one kernel, no matrix",
        "Fused, the scores are never written: one launch, and less memory than they would take. "
        "And a kernel this fast must keep most of the GPU's warps busy.",
        "kernels=1 memcpy=0 peak_bytes<{scores} occupancy>50%",
        "copies=0 peak_bytes<{scores}",
    ),
    Chapter(
        "sdpa_cudnn",
        "the cleanest trace",
        "cuDNN too answers with one kernel, and no trace looks cleaner. So there is nothing left "
        "to wait for but the GPU.",
        "kernels=1 memcpy=0 bound=GPU",
        "backend=sdpa_cudnn",
    ),
)


class Seen(NamedTuple):
    """An event of a call: what it is, its time in us, and the op that it belongs to."""

    what: str
    us: float
    op: str


@dataclass
class Told:
    """A chapter with what the trace says."""

    variant: str
    title: str
    lead: str
    guess: str
    verdicts: str
    row: str
    outcome: str
    events: list[Seen]


def story(folder: Path, command: str) -> str:
    """The page as Markdown, from what `attn-ext run` left in a folder.

    Args:
        command: what the page says that it was made by.

    Raises:
        InputError: not the folder of a run, or none of the chapters' variants in it.
    """
    summary, traces = _load(folder)
    told: list[Told] = []
    before: Row | None = None
    for chapter in CHAPTERS:
        row = next((row for row in summary.rows if row.variant == chapter.variant), None)
        if row is not None:
            told.append(_tell(chapter, row, before, summary, traces.get(chapter.variant)))
            before = before if row.error else row
    if not told:
        expected = ", ".join(chapter.variant for chapter in CHAPTERS)
        raise InputError(f"{folder}: expected a run of some of {expected}, got none of them")
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("attn_ext.profile"), trim_blocks=True, keep_trailing_newline=True
    )
    case = Case(**summary.facts["case"])
    side_by_side = render(summary, f"attention of {case}", width=None)
    side_by_side += render_layers(summary, _LAYERS)
    return environment.get_template("story.md.jinja").render(
        title=f"Attention of {case}",
        where=where(summary),
        command=command,
        on_gpu=summary.on_gpu,
        chapters=told,
        table=plain(side_by_side).rstrip(),
    )


def _load(folder: Path) -> tuple[Summary, dict[str, Trace]]:
    """The run, its figures read anew from its traces: what it measured beside them is kept."""
    (summary, *_) = read_summaries(folder / "summary.json")
    traces: dict[str, Trace] = {}
    rows = []
    for old in summary.rows:
        row = Row(
            old.variant, error=old.error, trace=old.trace, cold_us=old.cold_us,
            call_us=old.call_us, cpu_us=old.cpu_us, peak_bytes=old.peak_bytes,
        )  # fmt: skip
        if old.trace and (folder / old.trace).is_file():
            traces[row.variant] = Trace.load(folder / old.trace)
            read_trace(row, traces[row.variant], summary.on_gpu)
        rows.append(row)
    anew = Summary(summary.facts, rows)
    set_factors(anew)
    return anew, traces


def _tell(
    chapter: Chapter, row: Row, before: Row | None, summary: Summary, trace: Trace | None
) -> Told:
    case = Case(**summary.facts["case"])
    scores = case.batch * case.heads * case.seq**2 * int(case.dtype[2:]) // 8
    template = chapter.on_gpu if summary.on_gpu else chapter.on_cpu
    guess = f"{chapter.variant}: {template.format(scores=f'{scores / 2**20:g}MiB')}"
    subject = Subject(chapter.variant, trace or Trace({"traceEvents": []}), row)
    lines = [line for one in check(parse(guess), [subject]) for line in str(one).splitlines()]
    step = trace.steps[0] if trace and trace.steps else None
    return Told(
        variant=chapter.variant,
        title=chapter.title,
        lead=textwrap.fill(chapter.lead, _WIDTH),
        guess=guess,
        verdicts="\n".join(_wrapped(line) for line in lines),
        row="" if row.error else _row(row, summary),
        outcome=_outcome(row, before, summary),
        events=_events(step, summary.on_gpu) if step else [],
    )


def _wrapped(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(line, _WIDTH, subsequent_indent=indent or " " * 9)


def _row(row: Row, summary: Summary) -> str:
    shown, _ = fitting(columns(summary), [row])
    titles = ["variant", *(column.title for column in shown)]
    cells = [row.variant, *(column.cell(row) or UNKNOWN for column in shown)]
    return plain(grid(titles, [cells])).rstrip()


def _outcome(row: Row, before: Row | None, summary: Summary) -> str:
    """In a sentence: time and memory, beside the chapter before."""

    def time(of: Row) -> float | None:
        return of.gpu_us if summary.by_device else of.call_us

    own, peak = time(row), mib(row.peak_bytes)
    if own is None:
        return ""
    text = f"{us(own)} us {'on the GPU' if summary.by_device else 'a call'}, {peak} MiB"
    if before is None or not (earlier := time(before)):
        return f"{text} on top of the inputs."
    return (
        f"{text}: {earlier / own:.2f} times as fast as `{before.variant}`, which takes "
        f"{mib(before.peak_bytes)} MiB."
    )


def _events(step: Region, on_gpu: bool) -> list[Seen]:
    """The longest works of a call, in their order: of the device, else of the ops by themselves."""
    if on_gpu:
        works = [(event, event.duration_us) for event in step.device_events]
    else:
        works = _own_times([op for op in step.operators if op.tid == step.span.tid])
    works = sorted(works, key=lambda work: -work[1])[:_LISTED]
    return [
        Seen(_name(event), time, " > ".join(f"`{op}`" for op in step.path(event) if "::" in op))
        for event, time in sorted(works, key=lambda work: work[0].start_us)
    ]


def _own_times(ops: list[Event]) -> list[tuple[Event, float]]:
    """The time of each op without the ops that it calls, all of one thread."""
    open_ops: list[int] = []
    ops = sorted(ops, key=lambda op: (op.start_us, -op.duration_us))
    own = [op.duration_us for op in ops]
    for at, op in enumerate(ops):
        while open_ops and ops[open_ops[-1]].end_us <= op.start_us:
            open_ops.pop()
        if open_ops:
            own[open_ops[-1]] -= op.duration_us
        open_ops.append(at)
    return list(zip(ops, own, strict=True))


def _name(event: Event) -> str:
    if event.category == "cpu_op":
        return f"`{event.name}`"
    size = "" if event.bytes is None else f", {_size(event.bytes)}"
    return f"{decode(event.name).title}{size}"


def _size(size: int) -> str:
    return f"{mib(size)} MiB" if size >= 2**20 else f"{size} bytes"
