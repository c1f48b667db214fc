"""`attn-ext run`: variants of attention side by side."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from attn_ext.profile import asking, layers
from attn_ext.profile import options as shared
from attn_ext.profile.case import VARIANTS, CaseError, check_variants
from attn_ext.profile.output import write_json
from attn_ext.profile.progress import progress_bar
from attn_ext.profile.table import render, room, write

_TEXT = """\
Profiles attention from its most naive to its fastest form, each beside torch's own backends, and
prints what one call of each costs. Writes DIR/<shape>_<variant>_<mode>.json.gz, a trace to open at
https://ui.perfetto.dev, for each variant, and DIR/summary.json.

Guess first, then look: with --guess or --ask each guess gets a verdict, and a miss what explains
it. Exit status: 0; 1 where no variant could run, or a guess missed; 3 where none missed but one
cannot be told.
"""


def add(subparsers: shared.Subparsers) -> None:
    command = shared.add_command(
        subparsers,
        "run",
        handle,
        help="profile variants of attention side by side",
        text=_TEXT,
        examples=[
            "run",
            "run naive inplace --seq 256 --backward --layers 48",
            "run naive inplace --guess 'naive: copies>=1; inplace: copies=0'",
            "run flash sdpa_flash --heads 32 --kv-heads 8 --dtype bf16 --format json",
        ],
    )
    shared.add_variants(command)
    shared.add_shape(command)
    how = command.add_argument_group("the run")
    shared.add_device(how)
    how.add_argument("--steps", type=int, default=5, metavar="N", help="profiled calls; default: 5")
    how.add_argument(
        "--warmup", type=int, default=3, metavar="N", help="calls before them; default: 3"
    )
    how.add_argument(
        "--guess",
        action="append",
        default=[],
        metavar="TEXT",
        help="what you expect, as attn-ext check takes it, or a TOML file of it; may be repeated",
    )
    how.add_argument("--ask", action="store_true", help="asks what you expect before it measures")
    how.add_argument(
        "--layers", type=int, metavar="N", help="also what a model of N such layers costs and saves"
    )
    shared.add_out(how)
    shared.add_format(how)


def handle(options: argparse.Namespace) -> int:
    # A command that is wrong fails at once, not after the seconds that torch takes to load.
    variants = options.variant or VARIANTS
    check_variants(variants)
    shared.case_of(options, "cpu")
    guesses = asking.given(options.guess)
    if options.layers is not None and options.layers < 1:
        raise CaseError("layers", "at least 1", options.layers)
    from attn_ext.profile import calls, collect

    device = calls.pick_device(options.device)
    case = shared.case_of(options, device.type)
    guesses += asking.ask(variants) if options.ask else []
    stated = asking.now()
    with progress_bar() as progress:
        summary = collect.run(
            variants,
            case,
            out=options.out,
            device=str(device),
            steps=options.steps,
            warmup=options.warmup,
            progress=progress,
        )
    verdicts = asking.judge(guesses, options.out) if guesses else []
    if guesses:
        summary.facts["guesses"] = asking.record(guesses, verdicts, stated)
        write_json(Path(options.out) / "summary.json", summary.to_dict())
    if options.format == "json":
        print(json.dumps(summary.to_dict(), indent=1))
    else:
        write(render(summary, f"attention of {case}", room(options.wide)))
        if options.layers:
            write(layers.render(summary, options.layers))
        print("".join(f"\n{verdict}" for verdict in verdicts))
        print(
            f"wrote traces (open them at https://ui.perfetto.dev) and summary.json: {options.out}"
        )
    return asking.status(verdicts) if summary.base else 1
