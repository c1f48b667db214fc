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

import errno
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
from attn_ext.profile.progress import Progress
from attn_ext.profile.trace import STEP, Trace, TraceError

_ROUNDS = 5
#: A round of timing runs a variant for about this long, but for no more calls than this: their
#: launches fit into the device's queue, so that issuing one never waits for room.
_ROUND_SECONDS = 0.05
_MAX_CALLS = 10


@dataclass
class _Session:
    """A variant on its way through the passes."""

    call: Call
    row: Row
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
    check_variants(variants)
    for name, count in (("steps", steps), ("warmup", warmup)):
        if count < 1:
            raise CaseError(name, "at least 1", count)
    # Kineto of torch 2.13 prints a line at each start and stop; what it loses, the rows say.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    where = pick_device(device)
    case = case or default_case(where.type)
    folder = writable(out)

    report = _Progress(progress, total=len(variants) * (_ROUNDS + 3))
    with on_device(where):
        calls = prepare(variants, case, where)
        sessions = [_Session(call, Row(call.variant)) for call in calls]
        for session in sessions:
            report.next(session, "warming up")
            _warm_up(session, warmup, where)
        for _ in range(_ROUNDS):
            for session in sessions:
                report.next(session, "timing")
                _time(session, where)
        for session in sessions:
            report.next(session, "measuring memory")
            _measure_peak(session, where)
        for session in sessions:
            report.next(session, "profiling")
            _profile(session, case, folder, steps, warmup, where)
    facts = machine.facts(where) | {"case": asdict(case), "steps": steps, "warmup": warmup}
    summary = Summary(facts, [session.row for session in sessions])
    set_factors(summary)
    text = json.dumps(summary.to_dict(), indent=1)
    (folder / "summary.json").write_text(text + "\n")
    return summary


def writable(out: str | os.PathLike[str]) -> Path:
    """The folder, made where it is missing.

    Raises:
        CaseError: it cannot be written to.
    """
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise CaseError("out", "a folder to write to", f"{out} ({error.strerror})") from error
    return folder


class _Progress:
    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._done, self._total = 0, total

    def next(self, session: _Session, what: str) -> None:
        if self._progress:
            self._progress(self._done, self._total, f"{session.row.variant}: {what}")
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
    if device.type == "cpu" and session.call.variant in NEEDS_CUDA:
        session.row.error = "torch has this backend on CUDA only"
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
    session: _Session, case: Case, folder: Path, steps: int, warmup: int, device: torch.device
) -> None:
    if session.row.error:
        return
    on_gpu = device.type == "cuda"
    row = session.row
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
