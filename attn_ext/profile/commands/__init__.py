"""The subcommands of `attn-ext`: a module each, in the order of the help.

A module has `add(subparsers)`, which calls options.add_command with its help text, its examples and
its handler. The handler takes the parsed options and returns the exit status; it may raise
InputError. Only a handler imports what takes long to load: torch, matplotlib, jinja2.
"""

COMMANDS = (
    "run",
    "sweep",
    "exec",
    "story",
    "report",
    "view",
    "check",
    "diff",
    "decode",
    "explain",
    "ncu",
    "env",
)
