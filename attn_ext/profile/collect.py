"""Runs the variants and measures them.

Each variant goes through four passes, the unprofiled ones before any profiler has run (CUPTI slows
launches down from then on):

1. warm-up, where a variant that cannot run says so; its first call is the cold one
2. time per call and CPU time per call, nothing profiled; variants take turns in each round
3. peak memory on a GPU, from the allocator's statistics of one call
4. the profiler: warm-up steps inside its session, since CUPTI of CUDA 12.6u2 to 13.0 drops kernels
   at the start of one; then the steps that are kept, each in a range of its own

The trace of pass 4 is written, and read back with trace.py: one reader for our traces and others'.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from attn_ext.profile import machine
from attn_ext.profile.calls import (
    NEEDS_CUDA,
    Call,
    CannotRunError,
    on_device,
    pick_device,
    pinned,
    prepare,
    synchronize,
)  # fmt: skip
from attn_ext.profile.case import VARIANTS, Case, CaseError, check_variants, default_case
from attn_ext.profile.figures import Row, Summary, read_trace, set_factors
from attn_ext.profile.output import writable, write_json
from attn_ext.profile.progress import Progress
from attn_ext.profile.trace import STEP, Trace, TraceError

_ROUNDS = 5
#: A round of timing runs a variant for about this long, but for no more calls than this: their
#: launches fit into the device's queue, so that issuing one never waits for room.
_ROUND_SECONDS = 0.05
_MAX_CALLS = 10


@dataclass
class _Session:
    """A variant of a case on its way through the passes."""

    call: Call
    row: Row
    case: Case
    calls_per_round: int = 1
    wall_us: list[float] = field(default_factory=list)
    issue_us: list[float] = field(default_factory=list)


def run(
    variants: Sequence[str] = VARIANTS,
    case: Case | None = None,
    *,
    out: str | os.PathLike[str] = "profile",
    device: str | None = None,
    steps: int = 5,
    warmup: int = 3,
    progress: Progress | None = None,
) -> Summary:
    """Profiles the variants of an attention call and writes what was seen.

    Args:
        variants: names of VARIANTS, in the order of the rows.
        case: the call; None is default_case of the device.
        out: folder for a Chrome trace per variant (<case.tag>.json.gz) and summary.json.
        device: "cpu", "cuda" or "cuda:N"; None is CUDA where there is one.
        steps: steps kept by the profiler, each one call.
        warmup: calls before anything is measured, and steps at the start of a profiler's session.
        progress: called before each piece of work, with pieces done, pieces in all, and a text.

    Returns:
        The Summary that summary.json holds: a Row per variant. Times in microseconds, sizes in
        bytes. A variant that cannot run here has a row whose `error` says why.

    Raises:
        CaseError: an unknown variant or device, fewer than one step, or a folder that cannot be
            written.
    """
    where = pick_device(device)
    case = case or default_case(where.type)
    (summary,) = measure(
        variants, [case], out=out, device=where, steps=steps, warmup=warmup, progress=progress
    )
    write_json(Path(out) / "summary.json", summary.to_dict())
    return summary


def measure(
    variants: Sequence[str],
    cases: Sequence[Case],
    *,
    out: str | os.PathLike[str],
    device: torch.device,
    steps: int,
    warmup: int,
    limit_s: float | None = None,
    progress: Progress | None = None,
) -> list[Summary]:
    """As run, over several cases from the smallest to the largest, without summary.json.

    Every unprofiled pass of every case comes before the first profile. A variant of which one call
    took longer than `limit_s` seconds is left out of the cases after that one.
    """
    check_variants(variants)
    for name, count in (("steps", steps), ("warmup", warmup)):
        if count < 1:
            raise CaseError(name, "at least 1", count)
    # Kineto of torch 2.13 prints a line at each start and stop; what it loses, the rows say.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    folder = writable(out)

    report = _Progress(progress, total=len(cases) * len(variants) * (_ROUNDS + 3))
    sessions: dict[Case, list[_Session]] = {}
    slow: dict[str, str] = {}
    with on_device(device):
        _wake(device)
        for case in cases:
            calls = prepare(variants, case, device)
            sessions[case] = [_Session(call, Row(call.variant), case) for call in calls]
            for session in sessions[case]:
                report.next(session, "warming up")
                session.row.error = slow.get(session.call.variant)
                _warm_up(session, warmup, device)
                if limit_s and (session.row.cold_us or 0) > limit_s * 1e6:
                    slow[session.call.variant] = f"a call took over {limit_s:g} s at seq {case.seq}"
            for _ in range(_ROUNDS):
                for session in sessions[case]:
                    report.next(session, "timing")
                    _time(session, device)
            for session in sessions[case]:
                report.next(session, "measuring memory")
                _measure_peak(session, device)
        for case in cases:
            for session in sessions[case]:
                report.next(session, "profiling")
                _profile(session, folder, steps, warmup, device)
    facts = machine.facts(device)
    summaries = []
    for case, measured in sessions.items():
        about = facts | {"case": asdict(case), "steps": steps, "warmup": warmup}
        summaries.append(Summary(about, [session.row for session in measured]))
        set_factors(summaries[-1])
    return summaries


def _wake(device: torch.device) -> None:
    """Loads what every variant shares, or the first one would pay for it in its cold call."""
    square = torch.ones(16, 16, device=device)
    square @ square
    synchronize(device)


class _Progress:
    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._done, self._total = 0, total

    def next(self, session: _Session, what: str) -> None:
        if self._progress:
            what = f"{session.call.variant}, seq {session.case.seq}: {what}"
            self._progress(self._done, self._total, what)
        self._done += 1


@contextmanager
def _pass(session: _Session) -> Iterator[None]:
    """A pass of a variant with its backend pinned; a failure ends up in its row."""
    try:
        with pinned(session.call):
            yield
    except (CannotRunError, TraceError) as error:
        session.row = Row(session.call.variant, error=str(error))


def _warm_up(session: _Session, warmup: int, device: torch.device) -> None:
    if session.row.error:
        return
    if device.type == "cpu" and session.call.variant in NEEDS_CUDA:
        session.row.error = "torch has this backend on CUDA only"
        return
    if device.type == "cpu" and (shortage := _shortage(session)):
        session.row.error = shortage
        return
    # The pinned backend is no part of the key of torch.compile's cache on disk either.
    with (
        _pass(session),
        torch.compiler.config.patch(  # type: ignore[attr-defined]
            force_disable_caches=True
        ),
    ):
        for _ in range(warmup):
            synchronize(device)
            start = time.perf_counter()
            session.call.make()
            synchronize(device)
            seconds = time.perf_counter() - start
            if session.row.cold_us is None:
                session.row.cold_us = seconds * 1e6
        session.calls_per_round = max(1, min(_MAX_CALLS, int(_ROUND_SECONDS / seconds)))


def _shortage(session: _Session) -> str | None:
    """Why the host's memory is too small: there, unlike on a GPU, asking for too much ends us."""
    case = session.case
    if session.call.variant not in ("naive", "inplace", "math"):
        return None
    needed = 2 * case.batch * case.heads * case.seq**2 * int(case.dtype[2:]) // 8
    available = machine.available_bytes()
    if available is None or needed <= available:
        return None
    gib = 2**30
    return f"its S x S matrices need {needed / gib:,.1f} GiB, {available / gib:,.1f} are free"


def _time(session: _Session, device: torch.device) -> None:
    if session.row.error:
        return
    with _pass(session):
        calls = session.calls_per_round
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            session.call.make()
        issued = time.perf_counter()
        synchronize(device)
        session.wall_us.append((time.perf_counter() - start) / calls * 1e6)
        session.issue_us.append((issued - start) / calls * 1e6)
        session.row.call_us = median(session.wall_us)
        if device.type == "cuda":
            session.row.cpu_us = median(session.issue_us)


def _measure_peak(session: _Session, device: torch.device) -> None:
    """On a CPU the trace has the allocations instead, see Region.peak_bytes."""
    if session.row.error or device.type != "cuda":
        return
    with _pass(session):
        synchronize(device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        session.call.make()
        synchronize(device)
        session.row.peak_bytes = torch.cuda.max_memory_allocated() - before


def _profile(
    session: _Session, folder: Path, steps: int, warmup: int, device: torch.device
) -> None:
    if session.row.error:
        return
    on_gpu = device.type == "cuda"
    row, case = session.row, session.case
    path = folder / f"{case.tag(row.variant)}.json.gz"
    with _pass(session):
        with profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu,
            schedule=schedule(wait=0, warmup=warmup, active=steps, repeat=1),
            record_shapes=True,
            profile_memory=not on_gpu,
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        ) as profiler:
            about = {"variant": row.variant, "case": asdict(case)}
            about["device"] = machine.device_name(device)
            profiler.add_metadata_json("attn_ext", json.dumps(about))
            for _ in range(warmup + steps):
                with record_function(STEP):
                    session.call.make()
                # No step's work may still run when the session ends or the next step begins.
                synchronize(device)
                profiler.step()
        row.trace = path.name
        read_trace(row, Trace.load(path), on_gpu)
