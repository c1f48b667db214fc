"""From files to what a report shows: groups of rows that can be compared, each with its trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from statistics import median_low
from typing import Any

from attn_ext.profile.case import Case
from attn_ext.profile.event import Event
from attn_ext.profile.figures import SCHEMA, Row, Summary, read_trace, set_factors
from attn_ext.profile.occupancy import Device, devices
from attn_ext.profile.saved import read_summaries
from attn_ext.profile.trace import Region, Trace, TraceError

#: What `attn-ext run` and `attn-ext sweep` write beside their traces.
SUMMARY, SWEEP = "summary.json", "sweep.json"


@dataclass
class Source:
    """A row and the trace behind it; `step` is the region that stands for the others."""

    row: Row
    path: Path
    steps: list[Region]
    devices: dict[int, Device]

    @cached_property
    def step(self) -> Region:
        """Of the steps that lost no launch, the one whose duration is in the middle."""
        whole = [step for step in self.steps if not step.lost] or self.steps
        middle = median_low(_length(step) for step in whole)
        return next(step for step in whole if _length(step) == middle)


@dataclass
class Group:
    """Rows that can be compared, since one device ran them on one shape."""

    title: str
    summary: Summary
    sources: list[Source] = field(default_factory=list)

    @property
    def case(self) -> Case | None:
        """The shape, where the run or the trace wrote it down."""
        return _case(self.summary.facts.get("case"))


@dataclass
class Report:
    groups: list[Group]

    def to_dict(self) -> dict[str, Any]:
        """What `--format json` prints: summary.json's form for every group."""
        groups = [{"title": group.title, **group.summary.to_dict()} for group in self.groups]
        return {"schema": SCHEMA, "groups": groups}


def load(paths: Sequence[str | PathLike[str]], region: str | None = None) -> Report:
    """Reads traces, and beside them the summary.json that `attn-ext run` wrote.

    Args:
        paths: Chrome traces of torch.profiler, folders that hold some, or summary files.
        region: a shell-style pattern of range names to report instead of the steps.

    Raises:
        TraceError: a file that cannot be read or is neither a trace nor a summary, a folder
            without any, or no range that matches `region`.
    """
    groups: dict[str, Group] = {}
    for path in _files(map(Path, paths)):
        if path.name in (SUMMARY, SWEEP) or _is_summary(path):
            _add_summaries(groups, path, region)
        else:
            _add_trace(groups, path, region)
    for group in groups.values():
        set_factors(group.summary)
    return Report(list(groups.values()))


def _files(paths: Iterable[Path]) -> list[Path]:
    """The paths with each folder replaced by its summaries, else by its traces; each once."""
    files = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
        elif written := [path / name for name in (SUMMARY, SWEEP) if (path / name).is_file()]:
            files += written
        elif inside := sorted([*path.glob("*.json"), *path.glob("*.json.gz")]):
            files += inside
        else:
            raise TraceError(f"{path}: expected a folder with traces, got none in it")
    return list(dict.fromkeys(files))


def _is_summary(path: Path) -> bool:
    """Whether a plain JSON file is a run's summary: told by its first key, not by its name."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError:
        return False  # Trace.load says what is wrong with it
    return b'"schema"' in head and head.lstrip()[:1] == b"{"


def _add_summaries(groups: dict[str, Group], path: Path, region: str | None) -> None:
    for number, summary in enumerate(read_summaries(path)):
        group = Group(_title(summary, path), summary)
        groups[f"{number} of {path.resolve()}"] = group
        for row in summary.rows:
            if row.trace and (trace := path.parent / row.trace).is_file():
                group.sources.append(_source(row, trace, *_open(trace, region)))


def _add_trace(groups: dict[str, Group], path: Path, region: str | None) -> None:
    """With what its run measured, where that is beside it; else with what it shows itself."""
    trace, steps = _open(path, region)
    measured = _measured(path) if region is None else None
    if measured:
        facts, row = measured
    else:
        facts, name = _about(trace, path)
        row = Row(name, trace=path.name)
        read_trace(row, trace, facts["kind"] == "gpu", steps)
    summary = Summary(facts, [])
    group = groups.setdefault(json.dumps(facts), Group(_title(summary, path), summary))
    group.summary.rows.append(row)
    group.sources.append(_source(row, path, trace, steps))


def _measured(path: Path) -> tuple[dict[str, Any], Row] | None:
    """The facts and the row of the run that wrote the trace."""
    for name in (SUMMARY, SWEEP):
        if (beside := path.parent / name).is_file():
            for summary in read_summaries(beside):
                for row in summary.rows:
                    if row.trace == path.name:
                        return summary.facts, row
    return None


def _about(trace: Trace, path: Path) -> tuple[dict[str, Any], str]:
    """Where a trace was taken and what of, as far as it says."""
    ours = trace.metadata.get("attn_ext")
    ours = ours if isinstance(ours, dict) else {}
    gpus = trace.metadata.get("deviceProperties")
    names = [d["name"] for d in gpus or () if isinstance(d, dict) and "name" in d]
    facts = {
        "kind": "gpu" if trace.saw_device or names else "cpu",
        "device": ours.get("device") or (names[0] if names else None),
        "case": ours.get("case"),
    }
    stem = path.name.removesuffix(".gz").removesuffix(".json")
    name = str(ours.get("variant", stem.removesuffix(".pt.trace")))
    return {key: value for key, value in facts.items() if value is not None}, name


def _source(row: Row, path: Path, trace: Trace, steps: list[Region]) -> Source:
    return Source(row, path, steps, devices(trace.metadata))


def _open(path: Path, region: str | None) -> tuple[Trace, list[Region]]:
    trace = Trace.load(path)
    steps = trace.steps if region is None else trace.regions(region)
    if region is not None and not steps:
        names = sorted({span.name for span in trace.ranges})
        seen = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise TraceError(f"{path}: expected a range that matches {region}, got {seen or 'none'}")
    return trace, steps or [whole(trace, path)]


def whole(trace: Trace, path: Path) -> Region:
    """All of a trace as one region, where nothing marks a step."""
    host = [*trace.ops, *trace.runtime]
    device = [*trace.kernels, *trace.memcpy, *trace.memset]
    events = host + device
    if not events:
        raise TraceError(f"{path}: expected a trace of torch.profiler, got one without events")
    start = min(event.start_us for event in events)
    end = max(event.end_us for event in events)
    first = (host or events)[0]
    region = Region(Event("whole trace", "", start, end - start, first.pid, first.tid, {}))
    region.ops, region.runtime, region.allocations = trace.ops, trace.runtime, trace.allocations
    region.kernels, region.memcpy, region.memset = trace.kernels, trace.memcpy, trace.memset
    region.lost = [c for c in region.launches if c.correlation not in trace.device_by_correlation]
    return region


def _length(step: Region) -> float:
    return step.gpu_us or step.span.duration_us


def _case(fields: Any) -> Case | None:
    try:
        return Case(**fields)
    except (TypeError, ValueError):
        return None


def _title(summary: Summary, path: Path) -> str:
    case = _case(summary.facts.get("case"))
    return f"Attention of {case}" if case else path.name
