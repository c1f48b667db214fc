"""Attention operators for PyTorch in C and CUDA C, from naive to flash, made to be profiled."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"


def _is_the_command() -> bool:
    """Whether this process is `attn-ext`, also as `python -m attn_ext.profile`.

    argv[0] is "-m" while Python looks for the module, which is when this package is imported.
    """
    program = Path(*sys.argv[:1]).name
    return program == "attn-ext" or (program == "-m" and "attn_ext.profile" in sys.orig_argv)


if TYPE_CHECKING or not _is_the_command():
    from attn_ext.public import *  # noqa: F403
    from attn_ext.public import __all__ as __all__
else:
    # The command reads traces, and prints its help, without the seconds that torch takes to load.
    def __getattr__(name: str) -> Any:
        from importlib import import_module

        public = import_module("attn_ext.public")
        # All at once: a name such as `use` is also the name of a module, which import has put here.
        globals().update((each, getattr(public, each)) for each in public.__all__)
        return getattr(public, name)
