"""`attn-ext report`: what traces show, as a table, as JSON or as a page."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from attn_ext.profile import options as shared
from attn_ext.profile import table
from attn_ext.profile.errors import InputError

_TEXT = """\
Reads traces of torch.profiler, ours or not, and prints what a step of each costs. A folder that
`attn-ext run` wrote is reported with what its summary.json measured beside the traces. With --html
it writes a page that holds everything it shows and opens without a network: table, timeline,
kernels, roofline, memory. Needs no GPU.
"""


def add(subparsers: shared.Subparsers) -> None:
    command = shared.add_command(
        subparsers,
        "report",
        handle,
        help="a table or a page of HTML from traces",
        text=_TEXT,
        examples=[
            "report profile --html report.html",
            "report profile/8_16_1024_64_naive_eager.json.gz --format json",
            "report profile/8_16_1024_64_flash_eager.json.gz --region 'attn_ext.*'",
        ],
    )
    command.add_argument(
        "trace", nargs="+", metavar="TRACE", help="traces, summary.json files, or folders of them"
    )
    command.add_argument(
        "--region",
        metavar="NAME",
        help="report the ranges of this name (* and ? match any) instead of the steps",
    )
    command.add_argument("--html", metavar="FILE", help="write the page to FILE as well")
    command.add_argument(
        "--format", default="table", choices=("table", "json", "html"), help="of what is printed"
    )


def handle(options: argparse.Namespace) -> int:
    from attn_ext.profile import report

    found = report.load(options.trace, options.region)
    page = report.html(found) if options.html or options.format == "html" else ""
    if options.html:
        _write(Path(options.html), page)
    if options.format == "html":
        sys.stdout.write(page)
    elif options.format == "json":
        print(json.dumps(found.to_dict(), indent=1))
    else:
        for at, group in enumerate(found.groups):
            if at:
                print()
            table.write(table.render(group.summary, group.title))
        if options.html:
            print(f"\nwrote the page: {options.html}")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"--html: expected a file to write, got {path} ({error.strerror})"
        ) from None
