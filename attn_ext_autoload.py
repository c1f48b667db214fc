"""Loads attn_ext with torch where ATTN_EXT_ACTIVATE=1, for scripts that cannot be edited.

torch calls `load` at the end of `import torch` (entry point group "torch.backends"), in every
process of the environment that attn_ext is installed in: so this is a module of its own, which
costs nothing where the variable is not set.
"""

from __future__ import annotations

import os


def load() -> None:
    if os.environ.get("ATTN_EXT_ACTIVATE", "0") not in ("", "0"):
        import attn_ext  # noqa: F401  activates itself
