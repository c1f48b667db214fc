"""The trace reader: which event belongs to which step, what is lost, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import traces
from torch.profiler import ProfilerActivity, profile, record_function
from traces import (
    AUTOGRAD,
    MAIN,
    allocation,
    kernel,
    launch,
    memset,
    naive_step,
    op,
    span,
    step,
    trace,
)

from attn_ext.profile import Trace, TraceError


def test_device_events_belong_to_the_step_that_launched_them() -> None:
    first, second = trace(*naive_step(1, 0.0), *naive_step(2, 110.0)).steps
    for region in (first, second):
        assert (len(region.kernels), len(region.memcpy), len(region.memset)) == (5, 1, 1)
        assert region.gpu_us == pytest.approx(61.0)
        assert len(region.launches) == 5 and region.lost == []
    assert [event.correlation for event in first.kernels] == [100, 101, 102, 103, 104]
    assert first.kernels[0].start_us > second.span.start_us, "the device was meant to be behind"
    assert first.memcpy[0].bytes == 4096


def test_operators_are_told_from_marks() -> None:
    names = ["aten::mul", "attn_ext::softmax", "aten::add.Tensor", "Torch-Compiled Region: 0/0",
             "MulBackward0", "autograd::engine::evaluate_function: MulBackward0",
             "torch::autograd::AccumulateGrad"]  # fmt: skip
    region = trace(step(0.0), *(op(name, 5.0) for name in names)).steps[0]
    assert [found.name for found in region.operators] == names[:3]
    assert len(region.ops) == 7


def test_mirrored_ranges_and_overhead_are_no_device_events() -> None:
    mirrored = step(120.0) | {"cat": "gpu_user_annotation", "pid": 0}
    overhead = kernel(100, 5.0, 50.0, "Lazy Function Loading") | {"cat": "overhead"}
    region = trace(*naive_step(1, 0.0), mirrored, overhead).steps[0]
    assert len(region.device_events) == 7
    assert region.gpu_us == pytest.approx(61.0)


@pytest.mark.parametrize(
    "name",
    ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx",
     "cudaLaunchCooperativeKernel", "cudaGraphLaunch"],
)  # fmt: skip
def test_a_launch_without_a_kernel_is_lost(name: str) -> None:
    region = trace(step(0.0), launch(1, 5.0), kernel(1, 9.0, 3.0), launch(2, 20.0, name)).steps[0]
    assert [call.correlation for call in region.lost] == [2]
    assert len(region.kernels) == 1


@pytest.mark.parametrize("name", ["cudaStreamSynchronize", "cudaMemsetAsync", "cudaFuncGetAttr"])
def test_other_calls_need_no_kernel(name: str) -> None:
    assert trace(step(0.0), launch(2, 20.0, name)).steps[0].lost == []


def test_a_runtime_launch_round_the_drivers_is_not_lost() -> None:
    outer = launch(1, 5.0, "cudaLaunchKernelExC", duration=10.0)
    inner = launch(2, 6.0, "cuLaunchKernelEx", duration=4.0)
    region = trace(step(0.0), outer, inner, kernel(2, 30.0, 3.0)).steps[0]
    assert region.lost == [] and len(region.kernels) == 1
    elsewhere = inner | {"tid": AUTOGRAD}
    region = trace(step(0.0), outer, elsewhere, kernel(2, 30.0, 3.0)).steps[0]
    assert [call.correlation for call in region.lost] == [1]


def test_a_graph_launch_owns_all_its_kernels() -> None:
    kernels = [kernel(1, 10.0 * i, 4.0) for i in range(3)]
    region = trace(step(0.0), launch(1, 5.0, "cudaGraphLaunch"), *kernels).steps[0]
    assert len(region.kernels) == 3 and region.lost == []


def test_work_of_autograds_thread_belongs_to_the_step_that_waits() -> None:
    steps = trace(
        step(0.0), step(200.0), launch(1, 250.0, tid=AUTOGRAD), kernel(1, 260.0, 5.0)
    ).steps
    assert [len(region.kernels) for region in steps] == [0, 1]
    # Where steps of two threads wait, the last one to begin.
    steps = trace(
        step(0.0), step(50.0, tid=MAIN + 5), launch(1, 60.0, tid=AUTOGRAD), kernel(1, 70.0, 5.0)
    ).steps
    assert [len(region.kernels) for region in steps] == [0, 1]


def test_overlapping_steps_keep_to_their_threads() -> None:
    other = AUTOGRAD
    steps = trace(
        step(0.0, 100.0), step(50.0, 100.0, tid=other),
        launch(1, 60.0), launch(2, 61.0, tid=other), launch(3, 62.0, tid=other),
        kernel(1, 70.0, 1.0), kernel(2, 71.0, 1.0), kernel(3, 72.0, 1.0),
    ).steps  # fmt: skip
    assert [[event.correlation for event in region.kernels] for region in steps] == [[1], [2, 3]]


def test_a_step_of_another_process_owns_nothing_here() -> None:
    foreign = step(0.0) | {"pid": 2}
    assert trace(foreign, launch(1, 5.0), kernel(1, 9.0, 1.0)).steps[0].kernels == []


def test_a_long_step_that_began_before_a_short_one_is_found() -> None:
    short = span("attn_ext.step", 10.0, 5.0)
    regions = trace(step(0.0, 100.0), short, op("aten::a", 12.0), op("aten::b", 50.0)).steps
    assert [[o.name for o in region.ops] for region in regions] == [["aten::b"], ["aten::a"]]


def test_steps_of_torchs_profiler_serve_foreign_traces() -> None:
    found = trace(span("ProfilerStep#3", 0.0, 50.0), span("other", 0.0, 50.0), op("aten::a", 5.0))
    assert [region.name for region in found.steps] == ["ProfilerStep#3"]
    assert [region.name for region in found.regions("oth*")] == ["other"]


def test_events_outside_the_steps_are_told() -> None:
    found = trace(*naive_step(1, 0.0), launch(90, 900.0), kernel(90, 910.0, 1.0), memset(91, 1, 1))
    assert sorted(event.correlation or 0 for event in found.outside(found.steps)) == [90, 91]


def test_what_was_not_recorded_is_unknown_not_zero() -> None:
    on_cpu = trace(step(0.0), op("aten::mul", 5.0))
    assert not on_cpu.saw_device
    assert on_cpu.steps[0].peak_bytes is None
    assert trace(step(0.0), launch(1, 5.0)).saw_device


def test_peak_counts_from_the_beginning_of_the_step() -> None:
    region = trace(
        step(10.0), allocation(5.0, 1000), allocation(11.0, 64), allocation(12.0, 32),
        allocation(13.0, -64), allocation(14.0, 16), allocation(15.0, -1000),
    ).steps[0]  # fmt: skip
    assert region.peak_bytes == 96


def test_copies_have_the_bytes_of_their_destination() -> None:
    def copy(shape: list[int], dtype: str) -> dict[str, object]:
        return op(
            "aten::copy_", 5.0, **{"Input Dims": [shape, [2]], "Input type": [dtype, "float"]}
        )

    region = trace(step(0.0), copy([3, 5], "c10::BFloat16"), copy([], "float")).steps[0]
    assert [c.bytes for c in region.copies] == [30], "a copy of one number is no copy of a tensor"
    region = trace(step(0.0), copy([3], "some new type"), op("aten::copy_", 6.0)).steps[0]
    assert [c.bytes for c in region.copies] == [None, None]


def test_a_real_trace_shows_the_hidden_copy(tmp_path: Path) -> None:
    """masked_fill clones the scores, masked_fill_ does not; peak memory by hand."""
    scores = torch.randn(4, 64, 64)
    mask = torch.ones(64, 64, dtype=torch.bool).triu(1)
    path = tmp_path / "real.json.gz"
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True
    ) as profiler:
        with record_function("out of place"):
            torch.softmax(scores.masked_fill(mask, -torch.inf), -1)
        with record_function("in place"):
            torch.softmax(scores.masked_fill_(mask, -torch.inf), -1)
    profiler.export_chrome_trace(str(path))
    found = Trace.load(path)
    (out_of_place,), (in_place,) = found.regions("out of place"), found.regions("in place")
    size = scores.numel() * 4
    assert [copy.bytes for copy in out_of_place.copies] == [size]
    assert in_place.copies == []
    assert (out_of_place.peak_bytes, in_place.peak_bytes) == (2 * size, size)
    assert "aten::clone" in [o.name for o in out_of_place.ops]
    assert found.metadata["schemaVersion"] == 1 and "traceEvents" not in found.metadata


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_plain_and_gzip_files_read_alike(tmp_path: Path, name: str) -> None:
    path = traces.write(tmp_path / name, *naive_step(1, 0.0))
    assert len(Trace.load(str(path)).steps[0].kernels) == 5


def test_bare_arrays_and_odd_entries_are_read(tmp_path: Path) -> None:
    entries = [*naive_step(1, 0.0), "text", {"ph": "X"}, {"ph": "X", "ts": "soon"}, {"ph": "M"}]
    path = tmp_path / "t.json"
    path.write_text(json.dumps([*entries, {"ph": "X", "ts": 1, "cat": "kernel", "args": None}]))
    assert len(Trace.load(path).steps[0].kernels) == 5


def test_control_characters_and_broken_utf8_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    text = json.dumps({"traceEvents": [span("odd NAME", 0.0, 5.0)]}).encode()
    path.write_bytes(text.replace(b"NAME", b"\x01\n\xff"))
    assert Trace.load(path).regions("odd*")[0].name == "odd \x01\n\ufffd"


def test_a_trace_without_events_has_no_steps(tmp_path: Path) -> None:
    assert Trace.load(traces.write(tmp_path / "t.json")).steps == []


@pytest.mark.parametrize("keep", [1, 5, 30, 200, -1])
@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_truncated_files_are_refused(tmp_path: Path, name: str, keep: int) -> None:
    path = traces.write(tmp_path / name, *naive_step(1, 0.0))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TraceError, match=rf"{name}: (damaged or truncated)"):
        Trace.load(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "got an empty file"),
        (b" \n", "got an empty file"),
        (b"hello", "damaged or truncated JSON"),
        (b"{}", "JSON without traceEvents"),
        (b"3", "JSON without traceEvents"),
        (b'{"traceEvents": 3}', "JSON without traceEvents"),
    ],
)
def test_files_that_are_no_traces_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=reason):
        Trace.load(path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"gone\.json: No such file"):
        Trace.load(tmp_path / "gone.json")
    with pytest.raises(TraceError, match="Is a directory"):
        Trace.load(tmp_path)


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    path = traces.write(tmp_path / "t.json.gz", *naive_step(1, 0.0))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(TraceError, match="damaged or truncated"):
        Trace.load(path)


def test_reading_a_trace_needs_the_standard_library_alone(run_python, tmp_path: Path) -> None:
    path = traces.write(tmp_path / "t.json.gz", *naive_step(1, 0.0))
    package = Path(__file__).parent.parent / "attn_ext"
    # The package itself imports torch; what reads, checks and compares traces must not.
    code = f"""
import sys, types
package = types.ModuleType("attn_ext")
package.__path__ = [{str(package)!r}]
sys.modules["attn_ext"] = package
before = set(sys.modules)
from attn_ext.profile import Row, Trace, check, cli, diff, figures, guess, saved, table
from attn_ext.testing import assert_trace
trace = assert_trace({str(path)!r}, "kernels=5 memcpy=1")
row = Row("naive")
figures.read_trace(row, trace, on_gpu=True)
assert row.kernels == 5, row
assert diff(trace, trace) and trace.attention() == [] and trace.steps[0].roofline is None
assert check(guess.parse("memcpy=0"), saved.subjects([{str(path)!r}]))[0].verdict == "MISS"
assert cli.main(["check", {str(path)!r}, "--guess", "kernels=5"]) == 0
assert cli.main(["diff", {str(path)!r}, {str(path)!r}]) == 0
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(loaded - set(sys.stdlib_module_names) - {{"attn_ext"}}), file=sys.stderr)
"""
    result = run_python(code)
    assert (result.returncode, result.stderr) == (0, "[]\n")
