"""`attn-ext exec`: a script of the user's under the profiler."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attn_ext.profile import options as shared
from attn_ext.profile.case import VARIANTS, CaseError
from attn_ext.profile.errors import InputError
from attn_ext.profile.figures import Row
from attn_ext.profile.output import writable, write_json
from attn_ext.profile.record import ATEN, COUNTS, Plan, Recorded
from attn_ext.profile.script import AS_IS, read_run, summarize
from attn_ext.profile.table import render, room, write

_TEXT = """\
Runs a script, unchanged, under torch's profiler and reads its attention out of the trace: forward
and backward, kernels, copies and time, and what share of a step they are.

A step ends where the optimizer steps (that which stepped first, if there are several), or with
--count attention at every call of attention that Python makes, which suits inference; torch.compile
hides calls from that count. The first --skip steps run unprofiled and all but the first of them are
timed; --warmup more start the profiler's session; --active are kept. Then the script is left,
unless --to-end is given.

With --activate the script runs once more for each way named, in a process of its own, with its
attention replaced: "aten" is attn_ext.activate(), a backend's name is attn_ext.use(backend).
Writes a trace for each run, and summary.json.
"""


def add(subparsers: shared.Subparsers) -> None:
    command = shared.add_command(
        subparsers,
        "exec",
        handle,
        help="your own script under the profiler",
        text=_TEXT,
        examples=[
            "exec --activate -- train.py --epochs 1",
            "exec --count attention --skip 12 --warmup 12 --active 12 -- -m generate",
        ],
    )
    command.add_argument(
        "script", nargs="+", metavar="SCRIPT", help="after --, as after python: a file or -m MODULE"
    )
    command.add_argument(
        "--activate",
        nargs="?",
        const=ATEN,
        metavar="WAYS",
        help=f"also with our attention: {ATEN} (the default), {', '.join(VARIANTS)}; comma between",
    )
    steps = command.add_argument_group("the steps")
    steps.add_argument("--count", default="optimizer", choices=COUNTS, help="what ends a step")
    for name, default, meaning in (
        ("skip", 5, "steps before the profiler starts"),
        ("warmup", 2, "profiled steps that are not kept"),
        ("active", 3, "profiled steps that are kept"),
    ):
        text = f"{meaning}; default: {default}"
        steps.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    steps.add_argument("--to-end", action="store_true", help="let the script run to its end")
    shared.add_out(command)
    shared.add_format(command)


def handle(options: argparse.Namespace) -> int:
    for name, least in (("skip", 0), ("warmup", 1), ("active", 1)):
        if getattr(options, name) < least:
            raise CaseError(name, f"at least {least}", getattr(options, name))
    ways = options.activate.split(",") if options.activate else []
    unknown = [way for way in ways if way not in (ATEN, *VARIANTS)]
    if unknown:
        raise CaseError("activate", f"some of {', '.join((ATEN, *VARIANTS))}", ", ".join(unknown))
    if options.script[0] != "-m" and not Path(options.script[0]).is_file():
        raise CaseError("SCRIPT", "a file, or -m MODULE", options.script[0])
    out = writable(options.out)
    runs: list[Row] = []
    machine: dict[str, Any] = {}
    for way in (None, *ways):
        name = AS_IS if way is None else way
        trace = out / f"{_stem(options.script)}_{name}.json.gz"
        recorded, status = _record(options, way, trace)
        if status:
            print(f"attn-ext exec: {name}: the script ended with status {status}", file=sys.stderr)
            return status
        before = options.skip + options.warmup
        if recorded is None or recorded.steps <= before:
            hint = f"by {options.count}; --skip, --warmup and --count decide"
            got = recorded.steps if recorded else 0
            raise InputError(f"SCRIPT: expected over {before} ends of a step {hint}, got {got}")
        machine = recorded.machine
        runs.append(read_run(name, recorded, trace, min(recorded.steps - before, options.active)))
    summary = summarize(runs, machine, shlex.join(options.script))
    text = write_json(out / "summary.json", summary.to_dict())
    if options.format == "json":
        print(text)
    else:
        write(render(summary, f"a step of {summary.facts['command']}", room(options.wide)))
        print(f"\nwrote traces and summary.json: {options.out}")
    return 0


def _stem(command: list[str]) -> str:
    return command[1].rpartition(".")[2] if command[0] == "-m" else Path(command[0]).stem


def _record(
    options: argparse.Namespace, way: str | None, trace: Path
) -> tuple[Recorded | None, int]:
    """Runs the script in a process of its own: what it recorded, and its exit status."""
    trace.unlink(missing_ok=True)
    with TemporaryDirectory() as folder:
        facts = Path(folder) / "facts.json"
        plan = Plan(
            options.script, options.skip, options.warmup, options.active, options.count,
            options.to_end, way, trace=str(trace.resolve()), facts=str(facts),
        )  # fmt: skip
        child = [sys.executable, "-m", "attn_ext.profile.record", json.dumps(asdict(plan))]
        # JSON on stdout is ours alone: what the script prints goes to stderr then.
        stdout = sys.__stderr__ if options.format == "json" else None
        status = subprocess.run(child, stdout=stdout).returncode
        recorded = Recorded(**json.loads(facts.read_text())) if facts.exists() else None
    return recorded, status
