"""`attn-ext env`: what to paste into a bug report."""

from __future__ import annotations

import argparse
import json

from attn_ext.profile import options as shared

_TEXT = """\
Says what decides how attention runs here: versions, devices, what the compiled libraries hold, what
the profiler can record. Works also where the libraries or torch do not load: the reason is told.
"""


def add(subparsers: shared.Subparsers) -> None:
    command = shared.add_command(
        subparsers,
        "env",
        handle,
        help="versions, devices, libraries; for bug reports",
        text=_TEXT,
        examples=["env", "env --json"],
    )
    command.add_argument("--json", action="store_true", help="as JSON")


def handle(options: argparse.Namespace) -> int:
    from attn_ext.profile.environment import environment

    sections = environment()
    if options.json:
        print(json.dumps(sections, indent=1))
        return 0
    width = max(len(key) for facts in sections.values() for key in facts)
    for name, facts in sections.items():
        if facts:
            print(name)
            print("".join(f"  {key.ljust(width)}  {value}\n" for key, value in facts.items()))
    return 0
