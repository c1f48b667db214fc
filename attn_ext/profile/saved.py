"""Reads back what `attn-ext run` and its like left: figures beside traces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from os import PathLike
from pathlib import Path

from attn_ext.profile.figures import SCHEMA, Row, Summary, set_factors
from attn_ext.profile.trace import Trace, TraceError
from attn_ext.profile.verdicts import Subject

_SUMMARY = "summary.json"


def read_summaries(path: Path) -> list[Summary]:
    """The summary of a run, or those of a sweep, one for each length.

    Raises:
        TraceError: a file that cannot be read, or is not what a run or a sweep wrote.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        schema = document["schema"]
        found = document.get("summaries", [document])
        pairs = [(facts, facts.pop("rows")) for facts in found]
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}: damaged, or not the summary of a run: {error}") from error
    if schema != SCHEMA:
        raise TraceError(f"{path}: expected schema {SCHEMA}, got {schema}")
    known = {name.name for name in fields(Row)}
    try:
        return [
            Summary(facts, [Row(**{k: row[k] for k in row if k in known}) for row in rows])
            for facts, rows in pairs
        ]
    except (TypeError, AttributeError) as error:
        raise TraceError(f"{path}: damaged rows: {error}") from error


def subjects(paths: Iterable[str | PathLike[str]]) -> list[Subject]:
    """What guesses can be checked on: traces, and folders of a run with what it measured.

    A trace is named by the variant that it is of, where it says so, else by its file.

    Raises:
        TraceError: a file that cannot be read, or a folder without traces.
    """
    found: list[Subject] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(load(path))
            continue
        rows = _rows(path)
        traces = sorted([*path.glob("*.json.gz"), *path.glob("*.json")])
        inside = [_subject(one, rows) for one in traces if one.name in rows or not rows]
        inside += [Subject(row.variant, Trace({}), row) for row in rows.values() if row.error]
        if not inside:
            raise TraceError(f"{path}: expected a folder with traces, got none in it")
        found += inside
    return found


def load(path: str | PathLike[str]) -> Subject:
    """One trace, and what its run measured of it, where that is beside it.

    Raises:
        TraceError: a file that cannot be read or is damaged.
    """
    return _subject(Path(path), _rows(Path(path).parent))


def _rows(folder: Path) -> dict[str, Row]:
    """The rows of a folder's summary, by the name of the trace, else of the variant."""
    path = folder / _SUMMARY
    summaries = read_summaries(path) if path.is_file() else []
    for summary in summaries:
        set_factors(summary)
    return {row.trace or row.variant: row for summary in summaries for row in summary.rows}


def _subject(path: Path, rows: dict[str, Row]) -> Subject:
    trace, row = Trace.load(path), rows.get(path.name)
    ours = trace.metadata.get("attn_ext")
    name = ours.get("variant") if isinstance(ours, dict) else None
    stem = path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".pt.trace")
    return Subject(row.variant if row else str(name or stem), trace, row)
