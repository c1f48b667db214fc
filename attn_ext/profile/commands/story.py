"""`attn-ext story`: from naive to fused, guess by guess, as a page of Markdown."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from attn_ext.profile import options as shared
from attn_ext.profile.errors import InputError
from attn_ext.profile.progress import progress_bar

_TEXT = """\
Runs naive, in-place, flash and cuDNN attention and writes a page that takes them one by one: what
one would guess, whether it holds, what the trace shows instead, what it costs. With --from the page
is written from a run that is there, without a GPU and without torch.
"""


def add(subparsers: shared.Subparsers) -> None:
    command = shared.add_command(
        subparsers,
        "story",
        handle,
        help="from naive to fused, guess by guess, as a page",
        text=_TEXT,
        examples=["story", "story --from profile --page STORY.md"],
    )
    command.add_argument("--from", dest="run", metavar="DIR", help="what attn-ext run wrote")
    command.add_argument("--page", metavar="FILE", help="default: STORY.md in the run's folder")
    shared.add_shape(command)
    how = command.add_argument_group("the run")
    shared.add_device(how)
    shared.add_out(how)


def handle(options: argparse.Namespace) -> int:
    from attn_ext.profile.story import CHAPTERS, story

    command = "attn-ext story"
    if options.run is None:
        shared.case_of(options, "cpu")
        from attn_ext.profile import calls, collect

        device = calls.pick_device(options.device)
        case = shared.case_of(options, device.type)
        variants = [chapter.variant for chapter in CHAPTERS]
        with progress_bar() as progress:
            collect.run(variants, case, out=options.out, device=str(device), progress=progress)
        folder = Path(options.out)
    else:
        folder = Path(options.run)
        command += f" --from {shlex.quote(options.run)}"
    page = Path(options.page) if options.page else folder / "STORY.md"
    text = story(folder, command)
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"--page: expected a file to write, got {page} ({error.strerror})"
        ) from None
    print(f"wrote the page: {page}")
    return 0
