"""Frameworks that tests run against; where `make test` installed them, none may be missing."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest


def framework(name: str, least: str | None = None) -> Any:
    """The module of that name, at least of that version."""
    if os.environ.get("ATTN_EXT_NEEDS_FRAMEWORKS"):
        return importlib.import_module(name)
    wanted = f"{name}>={least}" if least else name
    return pytest.importorskip(
        name, minversion=least, reason=f"no {wanted}: pip install --group frameworks"
    )
