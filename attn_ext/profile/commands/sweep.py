"""`attn-ext sweep`: time and memory of variants over the length of the sequences."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from attn_ext.profile import options as shared
from attn_ext.profile.case import VARIANTS, CaseError, check_variants
from attn_ext.profile.output import write_json
from attn_ext.profile.progress import progress_bar
from attn_ext.profile.sweep import Sweep, lengths_fit, lengths_of, render
from attn_ext.profile.table import write

_TEXT = """\
Measures variants at several lengths and fits how time and memory grow: an S x S matrix shows as a
memory exponent near 2, fused attention as one near 1, and time tends to 2 for all of them. Writes
DIR/sweep.json, a trace for each variant and length, and DIR/sweep.png (or .svg) where matplotlib
is installed. A variant that fails or gets too slow is left out from that length on.
"""


def add(subparsers: shared.Subparsers) -> None:
    command = shared.add_command(
        subparsers,
        "sweep",
        handle,
        help="time and memory over the length, with fitted growth",
        text=_TEXT,
        examples=["sweep --seq 512..16384", "sweep naive flash --seq 100,200,300 --plot svg"],
    )
    shared.add_variants(command)
    command.add_argument(
        "--seq",
        dest="lengths",
        default="512..4096",
        metavar="RANGE",
        help="A..B doubles from A to B; or a list, A,B,C; default: 512..4096",
    )
    shared.add_shape(command, without=("seq",))
    how = command.add_argument_group("the sweep")
    shared.add_device(how)
    how.add_argument("--steps", type=int, default=3, metavar="N", help="profiled calls; default: 3")
    how.add_argument(
        "--warmup", type=int, default=2, metavar="N", help="calls before them; default: 2"
    )
    how.add_argument(
        "--limit",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="longest call after which longer lengths are still tried; default: 10",
    )
    shared.add_out(how)
    how.add_argument("--plot", default="png", choices=("png", "svg", "none"), help="default: png")
    how.add_argument(
        "--format", default="table", choices=("table", "json"), help="of what is printed"
    )


def handle(options: argparse.Namespace) -> int:
    variants = options.variant or VARIANTS
    check_variants(variants)
    lengths = lengths_of(options.lengths)
    lengths_fit(lengths)
    if options.limit <= 0:
        raise CaseError("limit", "seconds above 0", options.limit)
    shared.case_of(options, "cpu")
    from attn_ext.profile import calls, collect

    device = calls.pick_device(options.device)
    case = shared.case_of(options, device.type)
    with progress_bar() as progress:
        summaries = collect.measure(
            variants,
            [replace(case, seq=length) for length in lengths],
            out=options.out,
            device=device,
            steps=options.steps,
            warmup=options.warmup,
            limit_s=options.limit,
            progress=progress,
        )
    sweep = Sweep(summaries)
    folder = Path(options.out)
    text = write_json(folder / "sweep.json", sweep.to_dict())
    last = f"seq {lengths[-1]}"
    of_all = str(replace(case, seq=lengths[-1])).replace(last, f"seq {lengths[0]} to {lengths[-1]}")
    title = f"attention of {of_all}"
    wrote = ["sweep.json", *_plot(sweep, title, folder, options.plot)]
    if options.format == "json":
        print(text)
    else:
        write(render(sweep, title))
        print(f"\nwrote traces, {' and '.join(wrote)}: {options.out}")
    return 0 if any(summary.base for summary in summaries) else 1


def _plot(sweep: Sweep, title: str, folder: Path, kind: str) -> list[str]:
    """The picture's name, where there is one: a word on why not in its place."""
    if kind == "none":
        return []
    from attn_ext.profile.plot import plot

    try:
        plot(sweep, title, folder / f"sweep.{kind}")
    except ImportError:
        return [f"no sweep.{kind} (matplotlib is not installed)"]
    return [f"sweep.{kind}"]
