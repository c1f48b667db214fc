"""The command `attn-ext`, also `python -m attn_ext.profile`: a program over the commands/.

Exit status: 0, or 2 with one line where the command is wrong, or what the subcommand's help says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from attn_ext.profile.case import CaseError
from attn_ext.profile.commands import COMMANDS
from attn_ext.profile.errors import InputError
from attn_ext.profile.options import Parser, option


def parser() -> Parser:
    program = Parser(prog="attn-ext", description="Makes attention readable in a profile.")
    subparsers = program.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f"attn_ext.profile.commands.{name}").add(subparsers)
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        status: int = options.handler(options)
        sys.stdout.flush()
    except InputError as error:
        message = str(error)
        if isinstance(error, CaseError) and not error.field.isupper():
            message = message.replace(error.field, option(error.field), 1)
        print(f"attn-ext {options.command}: {message}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Who reads the output has enough, as `head` does. Python would fail once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status
