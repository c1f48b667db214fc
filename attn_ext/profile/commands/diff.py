"""`attn-ext diff`: what changed between two traces."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from attn_ext.profile import options as shared
from attn_ext.profile.errors import InputError

if TYPE_CHECKING:
    from attn_ext.profile.compare import Difference, Work

_TEXT = """\
Compares two traces region by region: which kernels are gone, added, slower or faster, copies, time,
what limits. Regions are the steps; in traces without any, the attention calls by op and shape.
What a run measured beside a trace (summary.json) goes before what a profiled host shows.
"""


def add(subparsers: shared.Subparsers) -> None:
    command = shared.add_command(
        subparsers,
        "diff",
        handle,
        help="what changed between two traces",
        text=_TEXT,
        examples=[
            "diff profile/8_16_1024_64_naive_eager.json.gz "
            "profile/8_16_1024_64_inplace_eager.json.gz",
            "diff profile/8_16_1024_64_math_eager.json.gz "
            "profile/8_16_1024_64_flash_eager.json.gz --by class --json",
        ],
    )
    command.add_argument("before", metavar="BEFORE", help="a trace")
    command.add_argument("after", metavar="AFTER", help="another one")
    command.add_argument(
        "--region", metavar="NAME", help="compare the ranges of this name (* and ? match any)"
    )
    command.add_argument(
        "--by", default="name", choices=("name", "class"), help="what tells kernels apart"
    )
    command.add_argument("--all", action="store_true", help="also the kernels that are the same")
    command.add_argument("--json", action="store_true", help="as JSON")


def handle(options: argparse.Namespace) -> int:
    from attn_ext.profile.compare import diff
    from attn_ext.profile.saved import load

    before, after = load(options.before), load(options.after)
    rows = (before.row, after.row)
    found = diff(before.trace, after.trace, options.region, options.by, rows)
    if not found:
        what = f"a range that matches {options.region}" if options.region else "attention"
        raise InputError(f"expected {what} in {options.before} or {options.after}, got none")
    if options.json:
        print(json.dumps([one.to_dict() for one in found], indent=1))
        return 0
    for one in found:
        print("\n".join(_lines(one, options.all)))
    return 0


def _lines(one: Difference, everything: bool) -> list[str]:
    where = {
        (True, False): ": only in the first trace",
        (False, True): ": only in the second trace",
    }.get((one.before is not None, one.after is not None), "")
    lines = [one.name + where]
    for name, before, after in one.figures:
        ratio = ""
        if isinstance(before, float) and isinstance(after, float) and before:
            ratio = f"  x {after / before:.2f}"
        lines.append(f"  {name:<10}  {_figure(before):>12} -> {_figure(after):>12}{ratio}")
    for change in one.changes:
        if everything or change.kind != "same":
            work = f"{_work(change.before):>14} -> {_work(change.after):>14}"
            lines.append(f"  {change.kind:<10}  {work}  {change.name[:100]}")
    return lines


def _figure(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if isinstance(value, float) else str(value)


def _work(work: Work | None) -> str:
    return "-" if work is None else f"{work.count} x {work.us / work.count:,.1f} us"
