"""Explains a guess that missed, with what the trace shows for it: the op path, the kernel, bytes.

Each rule looks at one step and yields what it finds; several may. A rule that concludes more than
the trace proves says "likely".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from attn_ext.profile.event import Event
from attn_ext.profile.figures import Row
from attn_ext.profile.kernel_name import decode
from attn_ext.profile.region import Region

_MIB = 2**20
_CLONES = ("aten::clone", "aten::contiguous", "aten::reshape", "aten::transpose")
#: A fill of no more than this is a counter of a library, not a tensor.
_COUNTER_BYTES = 1024
#: Python round the ops of a step for longer than this, in us and as a share of the step.
_OUTSIDE_US, _OUTSIDE_SHARE = 50.0, 0.4
_COMPILED = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")


class Finding(NamedTuple):
    """`text` explains, `evidence` is where in the trace that is seen."""

    text: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.text} [{self.evidence}]"


class Missed(NamedTuple):
    """What missed: the field, the scope and the check in one text, and where."""

    field: str
    text: str
    step: Region
    row: Row | None


def explain(field: str, text: str, step: Region, row: Row | None = None) -> list[Finding]:
    """What explains a MISS of `field` in a step; where no rule does, the kernels that ran.

    Args:
        field: the name of the field that missed.
        text: the guess as it was written, with its scope: what was hoped for.
        step: a region that shows it.
        row: what a run measured of it.
    """
    missed = Missed(field, text, step, row)
    by_text: dict[str, list[Finding]] = {}
    for fields, rule in _RULES:
        for one in rule(missed) if field in fields else ():
            by_text.setdefault(one.text, []).append(one)
    found = [
        Finding(text, same[0].evidence + (f"; {len(same) - 1} more" if len(same) > 1 else ""))
        for text, same in by_text.items()
    ]
    return found or list(_kernels(missed))


def _event(event: Event) -> str:
    size = "" if event.bytes is None else f", {_size(event.bytes)}"
    name = event.name if len(event.name) <= 60 else f"{event.name[:57]}..."
    return f"{name}{size}, {event.duration_us:.1f} us"


def _size(size: int) -> str:
    return f"{size / _MIB:.1f} MiB" if size >= _MIB else f"{size} bytes"


def _seen(step: Region, event: Event) -> str:
    path = [name for name in step.path(event) if "::" in name]
    return " > ".join([*path, _event(event)])


def _copies(missed: Missed) -> Iterator[Finding]:
    """Whole tensors that are copied: on the device, or where none was recorded on the host."""
    step = missed.step
    events = step.memcpy or ([copy.op for copy in step.copies] if not step.kernels else [])
    for event in events:
        path = step.path(event)
        inner = [name for name in path if name.startswith(("aten::", "attn_ext::"))]
        if any(name.endswith("::masked_fill") for name in inner):
            text = "the out-of-place masked_fill copies the scores first; masked_fill_ does not"
        elif any(name.startswith(_COMPILED) for name in path) and "aten::clone" in inner:
            text = "likely torch.compile made an op that works in place into one that copies"
        elif any(name in _CLONES for name in inner):
            text = "a tensor is copied into another layout"
        elif "HtoD" in event.name or "DtoH" in event.name:
            text = "data moves between host and device"
        else:
            text = "a tensor is copied"
        yield Finding(text, _seen(step, event))


def _copy_kernels(missed: Missed) -> Iterator[Finding]:
    for kernel in missed.step.kernels:
        if decode(kernel.name).family != "copy":
            continue
        path = missed.step.path(kernel)
        cast = any(name in ("aten::to", "aten::_to_copy") for name in path)
        text = "a kernel casts to another dtype" if cast else "a kernel copies to another layout"
        yield Finding(text, _seen(missed.step, kernel))


def _counters(missed: Missed) -> Iterator[Finding]:
    """The small fills that libraries make before a kernel of theirs."""
    after = sorted(missed.step.kernels, key=lambda kernel: kernel.start_us)
    for fill in missed.step.memset:
        follows = next((k for k in after if k.start_us >= fill.start_us), None)
        if follows is None or (fill.bytes or 0) > _COUNTER_BYTES:
            yield Finding("the device fills memory", _seen(missed.step, fill))
            continue
        kernel = decode(follows.name)
        whose = "cuDNN" if kernel.family == "cudnn" else "the library of the matrix product"
        if kernel.family in ("gemm", "cudnn"):
            yield Finding(
                f"{whose} clears a counter before its kernel: not a tensor of yours",
                f"{_event(fill)}, then {_event(follows)}",
            )


def _math(missed: Missed) -> Iterator[Finding]:
    step = missed.step
    if "math" not in {call.backend for call in step.calls}:
        return
    products = [k for k in step.kernels if decode(k.name).family == "gemm"]
    slow = [k for k in products if decode(k.name).tensor_cores is False]
    casts = [k for k in step.kernels if "aten::to" in step.path(k)]
    masks = [k for k in step.kernels if {"aten::tril", "aten::ones"} & set(step.path(k))]
    parts = ["SDPA ran its math backend"]
    parts += [f"{len(casts)} casts to fp32 and back"] if casts else []
    parts += ["the causal mask is built in each call"] if masks else []
    parts += ["fp32 products without tensor cores"] if slow else []
    evidence = "; ".join(_event(kernel) for kernel in slow) or f"{len(step.ops)} ops"
    yield Finding(", ".join(parts), evidence)


def _cudnn_first(missed: Missed) -> Iterator[Finding]:
    if "flash" not in missed.text:
        return
    for kernel in missed.step.kernels:
        if decode(kernel.name).family == "cudnn":
            yield Finding(
                "SDPA chose cuDNN, which torch 2.11 and later put before flash on this GPU; pin it "
                "with sdpa_kernel([SDPBackend.FLASH_ATTENTION])",
                _seen(missed.step, kernel),
            )


def _override(missed: Missed) -> Iterator[Finding]:
    if "attn_" not in missed.text and "aten" not in missed.text:
        return
    for kernel in missed.step.kernels:
        if decode(kernel.name).attention and decode(kernel.name).family != "attn_ext":
            yield Finding(
                "torch's own kernel ran: attn_ext.activate() was not called, was undone, or the "
                "call is one that it does not take",
                _seen(missed.step, kernel),
            )


def _fills(missed: Missed) -> Iterator[Finding]:
    """Tensors of zeros beside a fused kernel, such as its rng_state."""
    step = missed.step
    if any(decode(kernel.name).attention for kernel in step.kernels):
        for kernel in step.kernels:
            if decode(kernel.name).family == "fill":
                yield Finding("a kernel fills a tensor beside the attention", _seen(step, kernel))


def _steps_around(missed: Missed) -> Iterator[Finding]:
    parts = [k for k in missed.step.kernels if decode(k.name).attention]
    if len(parts) > 1:
        yield Finding(
            "a fused attention of several kernels: the backward has steps before and after it",
            "; ".join(f"{decode(k.name).reading}, {k.duration_us:.1f} us" for k in parts),
        )


def _issuing(missed: Missed) -> Iterator[Finding]:
    step, row = missed.step, missed.row
    measured = row is not None and row.cpu_us is not None and row.gpu_us is not None
    gpu, cpu = (row.gpu_us, row.cpu_us) if row and measured else (step.gpu_us, step.cpu_us)
    if gpu is None or cpu is None or cpu <= gpu:
        return
    how = "" if measured else " under the profiler"
    yield Finding(
        "the host is slower than the GPU: a CUDA graph or a larger shape would hide it",
        f"{cpu:.1f} us to issue{how} {len(step.operators)} ops and {len(step.launches)} launches, "
        f"{gpu:.1f} us on the GPU",
    )


def _pin_inside(missed: Missed) -> Iterator[Finding]:
    """Python between the range and its ops, such as a context manager entered in each call."""
    step = missed.step
    ops = [op for op in step.ops if op.tid == step.span.tid]
    if not ops or not step.calls or step.cpu_us is None:
        return
    outside = step.cpu_us - (max(op.end_us for op in ops) - min(op.start_us for op in ops))
    if outside >= max(_OUTSIDE_US, _OUTSIDE_SHARE * step.span.duration_us):
        yield Finding(
            "likely Python is timed beside the attention, such as sdpa_kernel() entered in each "
            "call: enter it once, outside of what is timed",
            f"{outside:.1f} of {step.span.duration_us:.1f} us before the first op and after the "
            "last one",
        )


def _occupancy(missed: Missed) -> Iterator[Finding]:
    step = missed.step
    if step.occupancy is None or step.longest is None:
        return
    yield Finding(str(step.occupancy), _event(step.longest))
    place = step.roofline
    if place and step.occupancy.waves >= 1 and place.percent >= 20:
        yield Finding(
            "few and heavy blocks, as fused attention has them by design: it holds its tiles in "
            "registers and shared memory",
            str(place),
        )


def _kernels(missed: Missed) -> Iterator[Finding]:
    counts = Counter(decode(kernel.name).title for kernel in missed.step.kernels)
    if counts:
        yield Finding(
            f"what ran: {', '.join(f'{n} x {title}' for title, n in counts.most_common())}",
            "; ".join(_event(kernel) for kernel in missed.step.kernels[:6])
            + ("; ..." if len(missed.step.kernels) > 6 else ""),
        )


_TIMES = frozenset({"gpu_us", "tflops", "gbps", "peak"})
_RULES: tuple[tuple[frozenset[str], Callable[[Missed], Iterator[Finding]]], ...] = (
    (_TIMES | {"memcpy", "memcpy_bytes", "copies", "copy_bytes", "peak_bytes"}, _copies),
    (_TIMES | {"kernels", "launches"}, _copy_kernels),
    (frozenset({"memset"}), _counters),
    (_TIMES | {"kernels", "tensor_cores", "backend", "kernel", "peak_bytes", "dtype"}, _math),
    (_TIMES | {"kernels", "memset", "backend", "kernel", "op"}, _cudnn_first),
    (_TIMES | {"kernels", "backend", "kernel"}, _override),
    (frozenset({"kernels", "launches"}), _fills),
    (frozenset({"kernels", "launches"}), _steps_around),
    (frozenset({"bound", "call_us", "cpu_us"}), _issuing),
    (frozenset({"bound", "call_us", "cpu_us"}), _pin_inside),
    (frozenset({"occupancy"}), _occupancy),
)
