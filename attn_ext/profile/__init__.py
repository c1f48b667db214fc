"""The profiler of attn_ext: runs attention in all its forms, and reads what torch recorded.

    from attn_ext.profile import Case, Trace, run

    summary = run(["naive", "flash"], Case(seq=256, dtype="fp32"), out="profile")
    step = Trace.load("profile/8_16_256_64_naive_eager.json.gz").steps[0]
    [kernel.name for kernel in step.kernels], len(step.memcpy), step.gpu_us

`attn-ext run`, or `python -m attn_ext.profile run`, is the same from a shell. Times are in
microseconds, sizes in bytes. `run` needs torch; reading a trace needs the standard library alone.

    case     what is profiled           trace       a trace as regions and their events
    calls    a call of each variant     figures     regions as the figures of a row
    collect  runs and measures          columns     which figures a table shows; layers, its depth
    sweep    lengths; growth, plot      table       rows as text
    record   a user's script; script    cli         the command; options, what its parts share
    choice   which backend a call gets  commands    the subcommands, a module each
    story    guess by guess, as a page  environment versions and devices; machine, for a summary
    event    one event of a trace       kernel_name what a kernel's name says
    region   what happened in a range   occupancy   how busy a kernel keeps the GPU, and why no more
    attention finds attention calls     roofline    host or GPU, compute or memory: what limits
    shape    shapes, FLOPs and bytes    guess       the language of guesses; fields, what it knows
    verdicts checks guesses             findings    explains those that missed
    compare  what changed in a trace    saved       reads back what a run left
    stream   a file, piece by piece

    for call in Trace.load("any.pt.trace.json.gz").attention():  # forward and backward apart
        call.name, len(call.kernels), call.gpu_us, call.cpu_us, call.tflops, call.bound
        call.occupancy, call.roofline, call.tensor_cores, call.calls[0].shape
    for verdict in check(guess.parse("naive: memcpy=1"), saved.subjects(["profile"])):
        verdict.verdict, verdict.seen, verdict.findings  # attn_ext.testing has this for pytest
    diff(Trace.load("a.json"), Trace.load("b.json"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attn_ext.profile.attention import Call
from attn_ext.profile.case import DTYPES, VARIANTS, Case, CaseError, default_case
from attn_ext.profile.compare import Difference, diff
from attn_ext.profile.errors import InputError
from attn_ext.profile.figures import SCHEMA, Row, Summary
from attn_ext.profile.findings import Finding
from attn_ext.profile.guess import Check, Guess, GuessError
from attn_ext.profile.kernel_name import Kernel, decode
from attn_ext.profile.occupancy import Device, Occupancy, occupancy_of
from attn_ext.profile.roofline import Bound, Peaks, Roofline, bound, peaks
from attn_ext.profile.shape import Shape
from attn_ext.profile.trace import Copy, Event, Region, Trace, TraceError
from attn_ext.profile.verdicts import Subject, Verdict, check

if TYPE_CHECKING:
    from attn_ext.profile.collect import run

__all__ = [
    "DTYPES",
    "SCHEMA",
    "VARIANTS",
    "Bound",
    "Call",
    "Case",
    "CaseError",
    "Check",
    "Copy",
    "Device",
    "Difference",
    "Event",
    "Finding",
    "Guess",
    "GuessError",
    "InputError",
    "Kernel",
    "Occupancy",
    "Peaks",
    "Region",
    "Roofline",
    "Row",
    "Shape",
    "Subject",
    "Summary",
    "Trace",
    "TraceError",
    "Verdict",
    "bound",
    "check",
    "decode",
    "default_case",
    "diff",
    "occupancy_of",
    "peaks",
    "run",
]


def __getattr__(name: str) -> Any:
    # collect imports torch, which reading a trace does not need.
    if name == "run":
        from attn_ext.profile.collect import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
