"""`attn-ext view`: a trace in Perfetto, from this machine to this machine's browser."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from attn_ext.profile import options as shared
from attn_ext.profile.errors import InputError

_TEXT = """\
Serves one trace on 127.0.0.1 and opens Perfetto on it. The browser loads Perfetto from
https://ui.perfetto.dev and hands it the trace: the trace itself does not leave the machine. Runs
until Ctrl-C. On a machine without a browser, forward the port: ssh -L 9001:127.0.0.1:9001 HOST.
"""


def add(subparsers: shared.Subparsers) -> None:
    command = shared.add_command(
        subparsers,
        "view",
        handle,
        help="open a trace in Perfetto",
        text=_TEXT,
        examples=["view profile/8_16_1024_64_flash_eager.json.gz"],
    )
    command.add_argument("trace", metavar="TRACE", help="a Chrome trace, gzip or not")
    command.add_argument(
        "--port", type=int, default=9001, metavar="N", help="default: 9001; 0 takes a free one"
    )
    command.add_argument("--no-browser", action="store_true", help="print the address only")


def handle(options: argparse.Namespace) -> int:
    from attn_ext.profile.viewer import Viewer

    path = Path(options.trace)
    try:
        viewer = Viewer(path, options.port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"--port: expected a free port, got {options.port} ({reason})") from None
    with viewer:
        print(f"{path.name} in Perfetto: {viewer.address} (Ctrl-C ends it)", flush=True)
        if not options.no_browser:
            webbrowser.open(viewer.address)
        try:
            viewer.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
