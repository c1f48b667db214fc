"""Groups as one HTML file: the templates filled in, and a policy that forbids all else.

The page's style and script stand in it, named by their hashes in its Content-Security-Policy: so it
loads nothing, and text from a trace can never run.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any

from attn_ext.profile import table
from attn_ext.profile.columns import columns
from attn_ext.profile.report.cards import cards
from attn_ext.profile.report.growth import growth
from attn_ext.profile.report.model import Group, Report
from attn_ext.profile.report.sections import sections
from attn_ext.profile.report.steps import steps

if TYPE_CHECKING:
    from jinja2 import Environment


def html(report: Report) -> str:
    """The report as one self-contained page."""
    environment = _environment()
    style, script = (_source(name) for name in ("style.css", "script.js"))
    sources = sum(len(group.sources) for group in report.groups)
    groups = [_view(group, f"group-{at}", sources) for at, group in enumerate(report.groups, 1)]
    titles = [group.title for group in report.groups]
    return environment.get_template("report.html.jinja").render(
        title=titles[0] if len(titles) == 1 else f"{len(titles)} runs of attention",
        groups=groups,
        growth=list(growth(report.groups)),
        style=style,
        script=script,
        policy=f"default-src 'none'; img-src data:; style-src {_hash(style)}; "
        f"script-src {_hash(script)}; base-uri 'none'; form-action 'none'",
    )


def _view(group: Group, name: str, sources: int) -> dict[str, Any]:
    """What the templates show of a group."""
    summary = group.summary
    shown = columns(summary)
    return {
        "id": name,
        "first": name == "group-1",
        "title": group.title,
        "where": table.where(summary),
        "date": summary.facts.get("date"),
        "cards": cards(summary),
        "columns": shown,
        "rows": [
            {"row": row, "cells": [column.cell(row) or table.UNKNOWN for column in shown]}
            for row in summary.rows
        ],
        "sections": sections(group),
        "on_device": any(source.step.device_events for source in group.sources),
        "steps": steps(group, sources),
        "notes": [(row.variant, note) for row in summary.rows for note in row.notes],
    }


@cache
def _environment() -> Environment:
    # Not for --help, nor for a table: only a page needs it.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("attn_ext.profile.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _source(name: str) -> str:
    """A file of templates/ as it is."""
    environment = _environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
