"""`attn-ext check`: guesses against traces."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter

from attn_ext.profile import options as shared
from attn_ext.profile.fields import FIELDS
from attn_ext.profile.guess import GuessError, load, parse

_FIELDS = textwrap.fill(", ".join(FIELDS), width=96, initial_indent="  ", subsequent_indent="  ")
_TEXT = f"""\
Checks what you guessed of a trace before you look: SCOPE: FIELD=VALUE ..., scopes apart by ';'. A
scope names variants, ranges, ops or backends, * and ? match any. Operators: = != < <= > >=, ~ and
!~ with a regular expression, in LOW..HIGH. A miss is explained by what the trace shows.

Fields:
{_FIELDS}

Exit status: 0 where all hold, 1 with a MISS, 3 where none missed but something is UNKNOWN.
"""


def add(subparsers: shared.Subparsers) -> None:
    command = shared.add_command(
        subparsers,
        "check",
        handle,
        help="whether a trace is as you guessed",
        text=_TEXT,
        examples=[
            "check profile/8_16_1024_64_naive_eager.json.gz "
            "profile/8_16_1024_64_inplace_eager.json.gz "
            "--guess 'naive: copies>=1; inplace: copies=0'",
            "check profile/8_16_1024_64_flash_eager.json.gz --guess 'backend=flash ops<50' --json",
        ],
    )
    command.add_argument("trace", nargs="+", metavar="TRACE", help="traces, or folders of a run")
    command.add_argument(
        "--guess",
        action="append",
        default=[],
        metavar="TEXT",
        help="guesses; may be given several times",
    )
    command.add_argument(
        "--guesses", metavar="FILE", help="a TOML file with a table [guess.SCOPE] for each scope"
    )
    command.add_argument("--json", action="store_true", help="the verdicts as JSON")


def handle(options: argparse.Namespace) -> int:
    from attn_ext.profile.saved import subjects
    from attn_ext.profile.verdicts import MISS, UNKNOWN, check

    guesses = [guess for text in options.guess for guess in parse(text)]
    if options.guesses:
        guesses += load(options.guesses)
    if not guesses:
        raise GuessError("--guess or --guesses: expected at least one guess, got none")
    verdicts = check(guesses, subjects(options.trace))
    counts = Counter(verdict.verdict for verdict in verdicts)
    if options.json:
        print(json.dumps([verdict.to_dict() for verdict in verdicts], indent=1))
    else:
        for verdict in verdicts:
            print(verdict)
        print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 1 if counts[MISS] else 3 if counts[UNKNOWN] else 0
