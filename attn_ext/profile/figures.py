"""From a trace to the figures of a row: per step, and a single one where the steps agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from attn_ext.profile.kernel_name import decode
from attn_ext.profile.roofline import bound
from attn_ext.profile.trace import Region, Trace

#: Version of what to_dict writes. A key that is absent is unknown; 0 is a figure. The version is
#: raised where a key goes or changes its meaning, not where one is added.
SCHEMA = 1


@dataclass
class Row:
    """One variant of a run. None is unknown, never 0. Counts and gpu_us are of one step.

    Attributes:
        error: why the variant cannot run here, in one line; there are no figures then.
        kernels, memcpy, memset: device events, where all steps agree.
        gpu_us: median over the steps of the sum of their device events, in us.
        ops: operators called on the host, nested ones included.
        copies, copy_bytes: tensors that ops copied on the host, and the bytes written.
        cold_us: wall time of the variant's first call, in us: what it compiles, plans and loads.
        call_us: wall time of a call, in us, nothing profiled.
        cpu_us: time to issue a call, in us, before the device is done with it.
        peak_bytes: most bytes allocated at once in a call, on top of its inputs; in a step of a
            script, most bytes held at once.
        factor: how many times as fast as the first row that ran.
        busy: gpu_us / call_us, how much of the time the device works.
        bound: "GPU", "CPU" or "mixed", by `busy`: which of them sets the pace.
        attention_calls: forward calls of attention.
        forward_us, backward_us: time of the attention calls, in us: of the device's events on a
            GPU, else of the host while profiled. A median over the steps, as gpu_us.
        attention_share: what part of the device's time, or of the step, they are.
        ran: backends of the attention calls, as the trace has them.
        flops: of the attention calls' matrix products, as torch counts: every pair of query and
            key. useful_flops leaves out the pairs that a causal mask hides.
        least_bytes: what the attention calls must move, each operand and result once.
        tflops, gbps: useful_flops and least_bytes over the time, in 10^12 and 10^9 a second. The
            time is that of `factor`, so for a step of a script they are of all that it does.
        limit, peak_percent: the peak of the device that such work would reach first, "compute" or
            "memory", and how much of it is reached.
        longest_kernel: the name of the kernel that takes the most time.
        occupancy_percent, occupancy_limiters: of that kernel, from its launch and the device; what
            allows no more of it. theoretical_occupancy_percent leaves the size of the grid out.
        kineto_occupancy_percent: what the trace says of it, where that differs.
        tensor_cores: whether some kernel multiplies on tensor cores.
        launches, lost: launches in all steps, and those of them without a kernel in the trace.
        notes: what a reader must know before trusting the figures.
    """

    variant: str
    error: str | None = None
    trace: str | None = None
    kernels: int | None = None
    memcpy: int | None = None
    memcpy_bytes: int | None = None
    memset: int | None = None
    gpu_us: float | None = None
    ops: int | None = None
    copies: int | None = None
    copy_bytes: int | None = None
    cold_us: float | None = None
    call_us: float | None = None
    cpu_us: float | None = None
    peak_bytes: int | None = None
    factor: float | None = None
    busy: float | None = None
    bound: str | None = None
    attention_calls: int | None = None
    forward_us: float | None = None
    backward_us: float | None = None
    attention_share: float | None = None
    ran: list[str] = field(default_factory=list)
    flops: int | None = None
    useful_flops: int | None = None
    least_bytes: int | None = None
    tflops: float | None = None
    gbps: float | None = None
    limit: str | None = None
    peak_percent: float | None = None
    longest_kernel: str | None = None
    occupancy_percent: float | None = None
    theoretical_occupancy_percent: float | None = None
    occupancy_limiters: list[str] = field(default_factory=list)
    kineto_occupancy_percent: float | None = None
    tensor_cores: bool | None = None
    launches: int | None = None
    lost: int | None = None
    kernels_per_step: list[int] | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, [])}


@dataclass
class Summary:
    """A run: where and what it measured, and a row for each variant asked for."""

    facts: dict[str, Any]
    rows: list[Row]

    @property
    def on_gpu(self) -> bool:
        return bool(self.facts.get("kind") == "gpu")

    @property
    def unit(self) -> str:
        """What a row's figures are of: a call of attention, or a step of a script."""
        return str(self.facts.get("unit", "call"))

    @property
    def by_device(self) -> bool:
        """Whether `factor` compares device time: a step of a script is more than its kernels."""
        return self.on_gpu and self.unit == "call"

    @property
    def base(self) -> Row | None:
        """The row that `factor` compares with."""
        return next((row for row in self.rows if row.error is None), None)

    def to_dict(self) -> dict[str, Any]:
        """What summary.json holds."""
        rows = [row.to_dict() for row in self.rows]
        return {"schema": SCHEMA, **self.facts, "rows": rows}


def set_factors(summary: Summary) -> None:
    """Fills what compares figures: `factor`, by the device time of a call on a GPU, else by wall
    time, and which of device and host sets the pace."""

    def time(row: Row) -> float | None:
        return row.gpu_us if summary.by_device else row.call_us

    base = time(summary.base) if summary.base else None
    for row in summary.rows:
        own = time(row)
        row.factor = base / own if base and own else None
        if own and row.useful_flops:
            row.tflops = row.useful_flops / own / 1e6
        if own and row.least_bytes:
            row.gbps = row.least_bytes / own / 1e3
        if row.gpu_us and row.call_us:
            row.busy = row.gpu_us / row.call_us
        if found := bound(row.gpu_us, row.call_us):
            row.bound = found.verdict


def read_trace(row: Row, trace: Trace, on_gpu: bool, steps: Sequence[Region] | None = None) -> None:
    """Fills the figures of `row` that come from `steps`, by default the steps of its trace."""
    steps = trace.steps if steps is None else steps
    if not steps:
        row.notes.append("the trace has no step")
        return
    _read_attention(row, trace, steps, on_gpu)
    if on_gpu:
        _read_device(row, trace, steps)
    else:
        _read_host(row, steps)


def _read_host(row: Row, steps: Sequence[Region]) -> None:
    row.ops = _agreed(row, "ops", steps, lambda step: len(step.operators))
    row.copies = _agreed(row, "copies", steps, lambda step: len(step.copies))
    sizes = [copy.bytes for copy in steps[0].copies]
    if row.copies is not None and None not in sizes:
        row.copy_bytes = sum(size or 0 for size in sizes)
    peaks = [step.peak_bytes for step in steps]
    if None not in peaks:
        row.peak_bytes = max(peak or 0 for peak in peaks)


def _read_device(row: Row, trace: Trace, steps: Sequence[Region]) -> None:
    if not trace.saw_device:
        row.notes.append(
            "the profiler recorded no CUDA event, so device figures are unknown; "
            "KINETO_LOG_LEVEL=4 may show why"
        )
        return
    row.launches = sum(len(step.launches) for step in steps)
    row.lost = sum(len(step.lost) for step in steps)
    row.kernels_per_step = [len(step.kernels) for step in steps]
    whole = [step for step in steps if not step.lost]
    if row.lost:
        row.notes.append(
            f"the profiler lost {row.lost} of {row.launches} launches, in "
            f"{len(steps) - len(whole)} of {len(steps)} steps; "
            + ("the figures are of the others" if whole else "device figures are unknown")
        )
    stray = len(trace.outside(steps))
    if stray:
        row.notes.append(f"{stray} device events belong to no step and are not counted")
    if not whole:
        return
    row.kernels = _agreed(row, "kernels", whole, lambda step: len(step.kernels))
    row.memcpy = _agreed(row, "memcpy", whole, lambda step: len(step.memcpy))
    row.memset = _agreed(row, "memset", whole, lambda step: len(step.memset))
    row.gpu_us = median(step.gpu_us for step in whole)
    sizes = [copy.bytes for copy in whole[0].memcpy]
    if row.memcpy is not None and None not in sizes:
        row.memcpy_bytes = sum(size or 0 for size in sizes)
    _read_kernels(row, whole)


def _read_kernels(row: Row, steps: Sequence[Region]) -> None:
    """What the kernels of a step are, and how near to the device's peaks they come."""
    step = steps[0]
    row.tensor_cores = step.tensor_cores
    row.longest_kernel = step.longest.name if step.longest else None
    if found := step.occupancy:
        row.occupancy_percent = found.achieved_percent
        row.theoretical_occupancy_percent = found.theoretical_percent
        row.occupancy_limiters = list(found.limiters)
        if found.kineto_why:
            row.kineto_occupancy_percent = found.kineto_percent
    places = [place for step in steps if (place := step.roofline)]
    if len(places) == len(steps):
        row.limit = places[0].limit
        row.peak_percent = median(place.percent for place in places)


def _read_attention(row: Row, trace: Trace, steps: Sequence[Region], on_gpu: bool) -> None:
    """Its attention calls: what ran, the least work that they ask for, and their time."""
    first = steps[0]
    row.ran = list(dict.fromkeys(_ran(first, call.backend) for call in first.calls))
    row.flops, row.useful_flops, row.least_bytes = first.flops, first.useful_flops, first.bytes
    calls = trace.attention()
    inside = [
        [call for call in calls if step.span.start_us <= call.span.start_us <= step.span.end_us]
        for step in steps
    ]

    def time(backward: bool) -> float | None:
        """Median over the steps in which nothing was lost."""
        sums = [
            sum((call.gpu_us if on_gpu else call.cpu_us) or 0.0 for call in of_step)
            for step, all_calls in zip(steps, inside, strict=True)
            if (of_step := [c for c in all_calls if c.calls[0].backward is backward])
            and not step.lost
        ]
        return median(sums) if sums and (trace.saw_device or not on_gpu) else None

    row.attention_calls = sum(not call.backward for call in first.calls) or None
    row.forward_us, row.backward_us = time(backward=False), time(backward=True)
    whole = [step.gpu_us if on_gpu else step.span.duration_us for step in steps if not step.lost]
    if row.forward_us is not None and (total := median(whole)):
        row.attention_share = (row.forward_us + (row.backward_us or 0.0)) / total


def _ran(step: Region, backend: str) -> str:
    """The backend's name, and whose kernels are under it where attn_ext.activate() put ours."""
    ours = any(decode(k.name).family == "attn_ext" for k in step.kernels)
    return f"{backend} on attn_ext" if ours and backend == "sdpa_flash" else backend


def _agreed(
    row: Row, what: str, steps: Sequence[Region], count: Callable[[Region], int]
) -> int | None:
    """The count that all steps have; None and a note where they differ."""
    counts = [count(step) for step in steps]
    if len(set(counts)) == 1:
        return counts[0]
    row.notes.append(f"{what} differ between the steps: {', '.join(map(str, counts))}")
    return None
