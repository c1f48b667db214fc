"""Checks guesses against traces: a verdict for each, and for a MISS the evidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

from attn_ext.profile.figures import Row
from attn_ext.profile.findings import Finding, explain
from attn_ext.profile.guess import Check, Guess
from attn_ext.profile.region import Region
from attn_ext.profile.trace import Trace

PASS, MISS, UNKNOWN = "PASS", "MISS", "UNKNOWN"


@dataclass
class Subject:
    """What a guess can be about: a trace under the name of its variant, and what a run measured
    beside it. `regions` takes the place of the trace's steps."""

    name: str
    trace: Trace
    row: Row | None = None
    regions: list[Region] | None = None


@dataclass(frozen=True)
class Verdict:
    """Of one check on one subject.

    Attributes:
        verdict: PASS, MISS or UNKNOWN.
        subject: what it was looked for in; the scope, where that matches nothing.
        guess: the check as it was written.
        seen: the value that was found, in words; "" where there is none.
        reason: why the verdict is UNKNOWN.
        findings: what explains a MISS; several may hold.
    """

    verdict: str
    subject: str
    guess: str
    seen: str = ""
    reason: str = ""
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.verdict.ljust(7)}  {self.subject}: {self.guess}"
        text += f", {self.reason}" if self.reason else f", seen {self.seen}"
        return "\n".join([text, *(f"         {finding}" for finding in self.findings)])

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in ("", [])}


def check(guesses: Iterable[Guess], subjects: Sequence[Subject]) -> list[Verdict]:
    """Every check of every guess, on everything that its scope matches."""
    verdicts = []
    for guess in guesses:
        found = [it for subject in subjects if (it := _resolve(guess.scope, subject))]
        for name, regions, subject in found:
            for one in guess.checks:
                verdicts.append(_verdict(one, name, regions, subject))
        if not found:
            names = ", ".join(dict.fromkeys(subject.name for subject in subjects)) or "nothing"
            reason = f"no variant, range or attention call matches; there is {names}"
            verdicts += [
                Verdict(UNKNOWN, guess.scope, one.text, "", reason) for one in guess.checks
            ]
    return verdicts


def _resolve(scope: str, subject: Subject) -> tuple[str, list[Region], Subject] | None:
    """The regions that a scope means in a trace: its steps by its own name, else ranges, else
    attention calls by op or backend."""
    trace = subject.trace
    if fnmatchcase(subject.name, scope):
        steps = trace.steps if subject.regions is None else subject.regions
        return subject.name, steps or trace.attention(), subject
    bare = Subject(subject.name, trace)  # what a run measured is of the steps
    if found := trace.regions(scope):
        return f"{subject.name}, {scope}", found, bare
    found = [
        region for region in trace.attention()
        if any(fnmatchcase(name, scope) for name in (region.name, region.calls[0].backend))
    ]  # fmt: skip
    return (f"{subject.name}, {scope}", found, bare) if found else None


def _verdict(one: Check, name: str, regions: list[Region], subject: Subject) -> Verdict:
    value, reason = _value(one, regions, subject)
    if value is None:
        return Verdict(UNKNOWN, name, one.text, "", reason)
    seen = _words(one.field.kind, value)
    if one.holds(value):
        return Verdict(PASS, name, one.text, seen)
    whole = [region for region in regions if not region.lost] or regions
    findings = explain(one.field.name, f"{name} {one.text}", whole[0], subject.row) if whole else []
    return Verdict(MISS, name, one.text, seen, "", findings)


def _value(one: Check, regions: list[Region], subject: Subject) -> tuple[Any, str]:
    """What was seen, or None and why it is not known."""
    of_step, of_row = one.field.of_step, one.field.of_row
    if subject.row and subject.row.error:
        return None, f"the variant did not run: {subject.row.error}"
    if of_row and subject.row and (value := of_row(subject.row)) is not None:
        return value, ""
    if of_step is None:
        return None, f"only the summary.json of a run has {one.field.name}"
    if not regions:
        return None, "the trace has neither steps nor attention calls"
    if one.field.device:
        if not subject.trace.saw_device:
            return None, "the trace recorded nothing of a GPU"
        if not any(region.runtime or region.device_events for region in regions):
            return None, "no call of the CUDA runtime was recorded in it"
        lost = sum(len(region.lost) for region in regions)
        regions = [region for region in regions if not region.lost]
        if not regions:
            return None, f"the profiler lost the kernels of {lost} launches"
    values = [of_step(region) for region in regions]
    if any(value is None for value in values):
        why = "the trace does not tell"
        if one.field.name == "bound":
            why += ": a profiled host is slower than it is; a run's summary.json has the true time"
        return None, why
    if one.field.kind == "names":
        # A name counts where every step has it; with !~ and != where some step has it.
        return _names(one, values), ""
    if one.field.kind in ("us", "rate", "percent"):
        return median(values), ""
    if len(set(values)) > 1:
        return None, f"the steps disagree: {', '.join(_words(one.field.kind, v) for v in values)}"
    return values[0], ""


def _names(one: Check, steps: list[list[str]]) -> list[str]:
    seen = list(dict.fromkeys(name for names in steps for name in names))
    if one.operator.startswith("!"):
        return seen
    hits = [[name for name in names if one.holds([name])] for names in steps]
    return seen if all(hits) else [name for name in seen if not one.holds([name])]


def _words(kind: str, value: Any) -> str:
    if kind == "yes":
        return "yes" if value else "no"
    if kind == "names":
        return ", ".join(value) or "none"
    if kind == "bytes" and value >= 1024:
        return f"{value / 2**20:,.2f} MiB"
    if isinstance(value, float):
        unit = {"us": " us", "percent": " %"}.get(kind, "")
        return f"{value:,.1f}{unit}"
    return str(value)
