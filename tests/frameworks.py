"""Frameworks that tests run against: needed where .ci/run says so, else a test's reason to skip."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest


def framework(name: str, least: str | None = None) -> Any:
    """The module of that name, at least of that version."""
    if os.environ.get("ATTN_EXT_NEEDS_FRAMEWORKS"):
        return importlib.import_module(name)
    return pytest.importorskip(
        name, reason=f"{name} is not installed: pip install --group frameworks"
    )
