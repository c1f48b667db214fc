"""Runs the variants and measures them. The only module of the profiler that uses torch.

Each variant goes through four passes, the unprofiled ones before any profiler has run (CUPTI slows
launches down from then on):

1. warm-up, where a variant that cannot run says so
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
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import attn_ext
from attn_ext.profile.case import DTYPES, VARIANTS, Case, CaseError, check_variants, default_case
from attn_ext.profile.figures import Row, Summary, read_trace, set_factors
from attn_ext.profile.progress import Progress
from attn_ext.profile.trace import STEP, Trace, TraceError
from attn_ext.sdpa import TORCH_BACKENDS

_ROUNDS = 5
#: A round of timing runs a variant for about this long, but for no more calls than this: their
#: launches fit into the device's queue, so that issuing one never waits for room.
_ROUND_SECONDS = 0.05
_MAX_CALLS = 10
_NEEDS_CUDA = ("sdpa_efficient", "sdpa_cudnn")


@dataclass
class _Session:
    """A variant on its way through the passes."""

    row: Row
    call: Callable[[], Any]
    pin: Callable[[], AbstractContextManager[Any]]
    calls_per_round: int = 1
    wall_us: list[float] = field(default_factory=list)
    issue_us: list[float] = field(default_factory=list)


def pick_device(asked: str | None) -> torch.device:
    """The device named, or CUDA where there is one.

    Raises:
        CaseError: neither cpu nor cuda, or CUDA where there is none.
    """
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = asked.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise CaseError("device", "cpu, cuda or cuda:N", asked)
    if kind == "cuda" and torch.version.cuda is None:
        raise CaseError("device", f"cpu, since torch {torch.__version__} has no CUDA", asked)
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise CaseError("device", f"one of {torch.cuda.device_count()} CUDA devices", asked)
    return torch.device(asked)


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
    folder = _writable(out)

    report = _Progress(progress, total=len(variants) * (_ROUNDS + 3))
    with torch.cuda.device(where) if where.type == "cuda" else nullcontext():
        sessions = _sessions(variants, case, where)
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
    summary = Summary(_facts(case, where, steps, warmup), [session.row for session in sessions])
    set_factors(summary)
    text = json.dumps(summary.to_dict(), indent=1)
    (folder / "summary.json").write_text(text + "\n")
    return summary


def _writable(out: str | os.PathLike[str]) -> Path:
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


def _sessions(variants: Sequence[str], case: Case, device: torch.device) -> list[_Session]:
    """All variants on the same random tensors."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn(
            (case.batch, heads, case.seq, case.head_dim),
            generator=generator,
            dtype=getattr(torch, DTYPES[case.dtype]),
            device=device,
        )

    query, key, value = (normal(n) for n in (case.heads, case.kv_heads, case.kv_heads))
    grad_out = normal(case.heads) if case.backward else None
    for tensor in (query, key, value):
        tensor.requires_grad_(case.backward)
    sessions = []
    for variant in variants:
        attention = _attention(variant, case)

        def call(attention: Callable[..., Tensor] = attention) -> Any:
            out = attention(query, key, value)
            if grad_out is None:
                return out
            return torch.autograd.grad(out, (query, key, value), grad_out)

        backend = TORCH_BACKENDS.get(variant)
        # The pin costs more CPU time than a fused call: it is entered round a pass, never in one.
        pin = nullcontext if backend is None else lambda backend=backend: sdpa_kernel(backend)
        sessions.append(_Session(Row(variant), call, pin))
    return sessions


def _attention(variant: str, case: Case) -> Callable[..., Tensor]:
    grouped = case.kv_heads != case.heads

    def own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attn_ext.scaled_dot_product_attention(
            query, key, value, is_causal=case.causal, enable_gqa=grouped, backend=variant
        )

    def torchs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=case.causal, enable_gqa=grouped
        )

    function = torchs if variant in TORCH_BACKENDS else own
    if not case.compile:
        return function
    # Dynamo caches by code object and does not guard on the backend that is pinned: without a
    # code object of its own, a variant would run what was compiled for the one before it.
    alone = FunctionType(
        function.__code__.replace(), function.__globals__, variant, None, function.__closure__
    )
    compiled: Callable[..., Tensor] = torch.compile(alone, fullgraph=True, dynamic=False)
    return compiled


@contextmanager
def _pass(session: _Session) -> Iterator[None]:
    """A pass of a variant with its backend pinned; a failure ends up in its row."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with session.pin():
                yield
        except (RuntimeError, TraceError) as error:
            texts = [str(warning.message) for warning in caught]
            variant = session.row.variant
            session.row = Row(variant, error=_reason(variant, error, texts))


def _reason(variant: str, error: Exception, warned: Sequence[str]) -> str:
    """One line. SDPA's error names no cause: that is in the warnings before it."""
    family = variant.removeprefix("sdpa_")
    causes, ours = [], False
    for text in warned:
        line = text.split(" (Triggered internally")[0].strip()
        if "not used because" in line:
            ours = line.lower().replace("memory efficient", "efficient").startswith(family)
        elif ours:
            causes.append(line)
    text = " ".join(causes) if variant in TORCH_BACKENDS and causes else str(error)
    return " ".join(text.strip().split("\n")[0].split()) or type(error).__name__


def _warm_up(session: _Session, warmup: int, device: torch.device) -> None:
    variant = session.row.variant
    if device.type == "cpu" and variant in _NEEDS_CUDA:
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
            _synchronize(device)
            start = time.perf_counter()
            session.call()
            _synchronize(device)
            seconds = time.perf_counter() - start
        session.calls_per_round = max(1, min(_MAX_CALLS, int(_ROUND_SECONDS / seconds)))


def _time(session: _Session, device: torch.device) -> None:
    if session.row.error:
        return
    with _pass(session):
        calls = session.calls_per_round
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            session.call()
        issued = time.perf_counter()
        _synchronize(device)
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
        _synchronize(device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        session.call()
        _synchronize(device)
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
            about = {"variant": row.variant, "case": asdict(case), "device": _device_name(device)}
            profiler.add_metadata_json("attn_ext", json.dumps(about))
            for _ in range(warmup + steps):
                with record_function(STEP):
                    session.call()
                # No step's work may still run when the session ends or the next step begins.
                _synchronize(device)
                profiler.step()
        row.trace = path.name
        read_trace(row, Trace.load(path), on_gpu)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _cudnn_version() -> int | None:
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return version


def _facts(case: Case, device: torch.device, steps: int, warmup: int) -> dict[str, Any]:
    """What summary.json says of the run besides its rows; what is not known here is absent."""
    on_gpu = device.type == "cuda"
    facts = {
        "kind": "gpu" if on_gpu else "cpu",
        "device": _device_name(device),
        "attn_ext": attn_ext.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": _cudnn_version() if on_gpu else None,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "case": asdict(case),
        "steps": steps,
        "warmup": warmup,
    }
    return {key: value for key, value in facts.items() if value is not None}
