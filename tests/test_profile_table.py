"""From traces to rows, and from rows to the table that is printed."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import traces
from traces import kernel, launch, naive_step, op, step, trace

from attn_ext.profile import VARIANTS, Case, Row, Summary, Trace, figures, layers, table

GPU = {"kind": "gpu", "device": "NVIDIA H200", "torch": "2.11.0+cu130", "cuda": "13.0",
       "cudnn": 91900, "threads": 8}  # fmt: skip
CPU = {"kind": "cpu", "device": "Some CPU", "torch": "2.13.0+cpu", "threads": 2}


def row_of(*entries: traces.Entry, on_gpu: bool = True) -> Row:
    row = Row("naive")
    figures.read_trace(row, trace(*entries), on_gpu)
    return row


def without_kernels(entries: list[traces.Entry], lost: int) -> list[traces.Entry]:
    """As if the profiler had dropped the first kernels."""
    kernels = [entry for entry in entries if entry["cat"] == "kernel"][:lost]
    return [entry for entry in entries if entry not in kernels]


def test_figures_of_steps_that_agree() -> None:
    row = row_of(*naive_step(1, 0.0), *naive_step(2, 110.0))
    assert row.to_dict() == {
        "variant": "naive", "kernels": 5, "memcpy": 1, "memcpy_bytes": 4096, "memset": 1,
        "gpu_us": pytest.approx(61.0), "launches": 10, "lost": 0, "kernels_per_step": [5, 5],
        "longest_kernel": "kernel_x",
    }  # fmt: skip


def test_steps_that_disagree_have_no_count_but_a_note() -> None:
    more = [launch(777, 150.0), kernel(777, 300.0, 1.0)]
    row = row_of(*naive_step(1, 0.0), *naive_step(2, 110.0), *more)
    assert row.kernels is None and "kernels" not in row.to_dict()
    assert row.kernels_per_step == [5, 6]
    assert row.notes == ["kernels differ between the steps: 5, 6"]


def test_lost_launches_are_told_and_their_steps_left_out() -> None:
    row = row_of(*without_kernels(naive_step(1, 0.0), 2), *naive_step(2, 110.0))
    assert (row.kernels, row.lost, row.launches) == (5, 2, 10)
    assert row.gpu_us == pytest.approx(61.0)
    assert row.notes == [
        "the profiler lost 2 of 10 launches, in 1 of 2 steps; the figures are of the others"
    ]


def test_losses_in_every_step_leave_no_figure() -> None:
    row = row_of(*without_kernels(naive_step(1, 0.0), 1), *without_kernels(naive_step(2, 110.0), 5))
    assert (row.kernels, row.memcpy, row.gpu_us) == (None, None, None)
    assert (row.lost, row.kernels_per_step) == (6, [4, 0])
    assert "device figures are unknown" in row.notes[0]


def test_a_trace_that_recorded_nothing_is_unknown_not_zero() -> None:
    row = row_of(step(0.0), op("aten::mul", 5.0))
    assert set(row.to_dict()) == {"variant", "notes"}
    assert "recorded no CUDA event" in row.notes[0]
    assert row_of().notes == ["the trace has no step"]


def test_device_work_outside_the_steps_is_told() -> None:
    row = row_of(*naive_step(1, 0.0), launch(90, 900.0), kernel(90, 910.0, 1.0))
    assert row.kernels == 5
    assert row.notes == ["1 device events belong to no step and are not counted"]


def test_host_figures() -> None:
    shapes = {"Input Dims": [[8, 4], [8, 4]], "Input type": ["double", "double"]}
    entries = [
        step(0.0), op("aten::clone", 1.0), op("aten::copy_", 2.0, **shapes),
        traces.allocation(3.0, 256),
    ]  # fmt: skip
    row = row_of(*entries, on_gpu=False)
    assert row.to_dict() == {
        "variant": "naive", "ops": 2, "copies": 1, "copy_bytes": 256, "peak_bytes": 256,
    }  # fmt: skip


def test_factors_compare_with_the_first_row_that_ran() -> None:
    rows = [Row("flash", error="no"), Row("naive", gpu_us=90.0), Row("math", gpu_us=30.0)]
    summary = Summary(GPU, [*rows, Row("inplace")])
    figures.set_factors(summary)
    assert [row.factor for row in summary.rows] == [None, 1.0, 3.0, None]
    summary = Summary(CPU, [Row("naive", call_us=10.0, gpu_us=1.0), Row("math", call_us=40.0)])
    figures.set_factors(summary)
    assert [row.factor for row in summary.rows] == [1.0, 0.25]


H200 = {"id": 0, "name": "NVIDIA H200", "computeMajor": 9, "computeMinor": 0, "numSms": 132,
        "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048, "regsPerBlock": 65536,
        "regsPerMultiprocessor": 65536, "sharedMemPerBlock": 49152,
        "sharedMemPerBlockOptin": 232448, "sharedMemPerMultiprocessor": 233472}  # fmt: skip


def test_the_longest_kernel_has_the_occupancy_and_any_kernel_the_tensor_cores() -> None:
    """168 registers x 384 threads fill an SM with one block: 12 of 64 warps, whatever Kineto says
    of its shared memory."""
    gemm = kernel(1, 130.0, 50.0, "nvjet_tst_192x192_64x4_1x1_h_bz_coopB_TNN")
    gemm["args"] |= {"registers per thread": 168, "shared memory": 213188, "block": [384, 1, 1],
                     "grid": [1000, 1, 1], "device": 0, "est. achieved occupancy %": 0}  # fmt: skip
    softmax = kernel(2, 190.0, 10.0, "attn_softmax_cuda_bf16_row")
    entries = [step(0.0), launch(1, 1.0), launch(2, 5.0), gemm, softmax]
    row = Row("naive")
    figures.read_trace(row, Trace({"traceEvents": entries, "deviceProperties": [H200]}), True)
    assert row.longest_kernel == gemm["name"]
    assert row.occupancy_percent == row.theoretical_occupancy_percent == 18.75
    assert row.kineto_occupancy_percent == 0
    assert row.occupancy_limiters == ["registers", "shared memory"]
    assert row.tensor_cores is True
    assert row_of(step(0.0), launch(2, 5.0), softmax).tensor_cores is False
    assert row_of(step(0.0), launch(2, 5.0), kernel(2, 9.0, 1.0)).tensor_cores is None


H200_RUN = Path(__file__).parent / "data" / "h200" / "forward"


@pytest.mark.parametrize("variant", VARIANTS)
def test_work_and_rates_of_a_run_on_an_h200(variant: str) -> None:
    row = Row(variant, call_us=100.0)
    figures.read_trace(row, Trace.load(H200_RUN / f"{Case().tag(variant)}.json.gz"), True)
    figures.set_factors(Summary(GPU, [row]))
    heads, seq, size = 8 * 16, 1024, 64
    assert row.ran == [variant]
    assert row.flops == 4 * heads * seq * seq * size
    assert row.useful_flops == 4 * heads * seq * (seq + 1) // 2 * size
    assert row.least_bytes == 4 * heads * seq * size * 2
    assert row.gpu_us is not None and row.tflops is not None
    assert row.tflops == pytest.approx(row.useful_flops / row.gpu_us / 1e6)
    assert row.gbps == pytest.approx(row.least_bytes / row.gpu_us / 1e3)
    assert row.limit == "compute" and row.peak_percent == pytest.approx(row.tflops / 9.894)
    assert row.tensor_cores is (variant != "math")


def test_forward_and_backward_are_told_apart() -> None:
    """Together they are all of the device's time, since a step of a run is a call of attention."""
    folder = H200_RUN.parent / "backward"
    row = Row("sdpa_flash")
    trace = Trace.load(folder / f"{Case(backward=True).tag('sdpa_flash')}.json.gz")
    figures.read_trace(row, trace, True)
    assert row.forward_us and row.backward_us and row.gpu_us and row.attention_calls == 1
    assert row.backward_us > 2 * row.forward_us
    assert row.forward_us + row.backward_us == pytest.approx(row.gpu_us, rel=0.01)
    assert row.attention_share == pytest.approx(1, abs=0.01)
    heads = line_of(text_of(Summary(GPU, [row])), "variant")
    assert "GPU us fwd us bwd us" in heads and "attn %" not in heads


def test_attention_is_a_part_of_a_step() -> None:
    entries = [
        step(0.0), op("aten::mm", 1.0, 9.0), op("attn_ext::flash_attention_forward", 20.0, 9.0),
        launch(1, 2.0), kernel(1, 30.0, 30.0), launch(2, 22.0), kernel(2, 60.0, 10.0),
    ]  # fmt: skip
    row = row_of(*entries)
    assert (row.attention_calls, row.forward_us, row.backward_us) == (1, 10.0, None)
    assert row.attention_share == 0.25
    text = text_of(Summary(GPU | {"unit": "step"}, [row]))
    assert "attn  fwd us  attn %" in text and line_of(text, "naive").startswith("naive 2 0 0 40.0")


def test_our_kernels_under_torchs_op_are_named() -> None:
    sdpa = op("aten::_scaled_dot_product_flash_attention", 1.0, 9.0)
    ours = kernel(1, 20.0, 5.0, "attn_flash_fwd_sm90_d64_bf16_causal")
    assert row_of(step(0.0), sdpa, launch(1, 2.0), ours).ran == ["sdpa_flash on attn_ext"]
    theirs = kernel(1, 20.0, 5.0, "void pytorch_flash::flash_fwd_kernel<x>(y)")
    assert row_of(step(0.0), sdpa, launch(1, 2.0), theirs).ran == ["sdpa_flash"]


@pytest.mark.parametrize(
    ("gpu_us", "bound"), [(90.0, "GPU"), (89.9, "mixed"), (70.1, "mixed"), (70.0, "CPU")]
)
def test_what_sets_the_pace(gpu_us: float, bound: str) -> None:
    summary = Summary(GPU, [Row("flash", gpu_us=gpu_us, call_us=100.0)])
    figures.set_factors(summary)
    assert summary.rows[0].bound == bound and summary.rows[0].busy == gpu_us / 100


def test_a_step_of_a_script_is_compared_by_its_wall_time() -> None:
    rows = [Row("as_is", gpu_us=50.0, call_us=100.0), Row("aten", gpu_us=10.0, call_us=80.0)]
    summary = Summary(GPU | {"unit": "step"}, rows)
    figures.set_factors(summary)
    assert [row.factor for row in rows] == [1.0, 1.25]
    text = text_of(summary)
    assert "step us" in text and "how many times as fast, by step us" in text


def gpu_summary(**changes: Any) -> Summary:
    naive = Row("naive", kernels=5, memcpy=1, memset=1, gpu_us=1820.4, call_us=1835.1, cpu_us=98.2,
                peak_bytes=802 << 20, lost=0)  # fmt: skip
    vars(naive).update(changes)
    flash = Row("flash", kernels=1, memcpy=0, memset=0, gpu_us=94.0, call_us=97.0, cpu_us=17.0,
                peak_bytes=16 << 20, lost=0)  # fmt: skip
    cudnn = Row("sdpa_cudnn", error="No available kernel. " * 10)
    summary = Summary(GPU, [naive, flash, cudnn])
    figures.set_factors(summary)
    return summary


def text_of(summary: Summary) -> str:
    return table.plain(table.render(summary, "attention"))


def line_of(text: str, name: str) -> str:
    """The line that begins with this name, its columns one blank apart."""
    return next(" ".join(line.split()) for line in text.splitlines() if line.startswith(name))


def test_the_table() -> None:
    text = text_of(gpu_summary())
    assert line_of(text, "variant") == (
        "variant kernels memcpy memset GPU us call us CPU us bound peak MiB vs naive"
    )
    assert line_of(text, "naive") == "naive 5 1 1 1,820.4 1,835.1 98.2 GPU 99% 802.0 1.00x"
    assert line_of(text, "flash") == "flash 1 0 0 94.0 97.0 17.0 GPU 97% 16.0 19.37x"
    assert line_of(text, "sdpa_cudnn").startswith("sdpa_cudnn cannot run: No available")
    assert "NVIDIA H200, torch 2.11.0+cu130, cuda 13.0, cudnn 91900\n" in text
    assert max(map(len, text.splitlines())) <= table.WIDTH


def test_columns_line_up() -> None:
    lines = text_of(gpu_summary()).splitlines()
    heads = next(line for line in lines if line.startswith("variant"))
    naive = next(line for line in lines if line.startswith("naive"))
    assert len(heads) == len(naive)
    assert naive[heads.index("memcpy") + len("memcpy") - 1] == "1"


def test_a_missing_cell_is_a_dash_and_a_missing_column_absent() -> None:
    summary = gpu_summary()
    naive, flash, _ = summary.rows
    flash.kernels = flash.gpu_us = flash.factor = flash.busy = None
    text = text_of(summary)
    assert line_of(text, "flash") == "flash - 0 0 - 97.0 17.0 - 16.0 -"
    assert line_of(text, "naive") == "naive 5 1 1 1,820.4 1,835.1 98.2 GPU 99% 802.0 1.00x"
    naive.cpu_us = flash.cpu_us = None
    assert line_of(text_of(summary), "variant") == (
        "variant kernels memcpy memset GPU us call us bound peak MiB vs naive"
    )
    assert "lost" not in text, "shown where something is lost"


def test_losses_have_a_column_and_notes_are_wrapped() -> None:
    text = text_of(gpu_summary(lost=3, notes=["the profiler lost a word " * 8]))
    assert line_of(text, "variant").startswith("variant kernels memcpy memset lost GPU us")
    assert line_of(text, "naive").startswith("naive 5 1 1 3 ")
    assert "naive: the profiler lost a word" in text
    assert max(map(len, text.splitlines())) <= table.WIDTH


def test_on_a_cpu_there_are_no_device_columns() -> None:
    row = Row("naive", ops=49, copies=1, copy_bytes=1 << 14, call_us=27859.3, peak_bytes=0)
    summary = Summary(CPU, [row])
    figures.set_factors(summary)
    text = text_of(summary)
    assert line_of(text, "variant") == ("variant ops copies copied MiB call us peak MiB vs naive")
    assert line_of(text, "naive") == "naive 49 1 0.016 27,859.3 0.0 1.00x"


def test_a_run_in_which_nothing_ran_still_has_a_table() -> None:
    text = text_of(Summary(CPU, [Row("sdpa_cudnn", error="torch has it on CUDA only")]))
    assert "sdpa_cudnn  cannot run: torch has it on CUDA only\n" in text


def test_columns_go_where_there_is_no_room() -> None:
    more = {"cold_us": 12345.6, "occupancy_percent": 18.75, "kineto_occupancy_percent": 0.0,
            "tensor_cores": True}  # fmt: skip
    summary = gpu_summary(**more)
    lines = table.plain(table.render(summary, "attention")).splitlines()
    assert max(map(len, lines)) <= table.WIDTH
    assert lines[-1] == "--wide has more: cold ms, Kineto %, tensor cores"
    wide = table.plain(table.render(summary, "attention", width=None))
    assert line_of(wide, "variant") == (
        "variant kernels memcpy memset GPU us cold ms call us CPU us bound occ % Kineto % "
        "tensor cores peak MiB vs naive"
    )
    assert line_of(wide, "naive") == (
        "naive 5 1 1 1,820.4 12.3 1,835.1 98.2 GPU 99% 18.8 0.0 yes 802.0 1.00x"
    )
    assert "--wide" not in wide


def test_a_terminal_has_the_room_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert (table.room(wide=False), table.room(wide=True)) == (140, None)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert table.room(wide=False) == table.WIDTH


def test_layers_multiply_what_a_layer_costs_and_saves() -> None:
    text = table.plain(layers.render(gpu_summary(), 48))
    assert "over 48 layers, beside naive" in text
    assert line_of(text, "naive") == "naive 336 87.38 4.71 0 0.00"
    assert line_of(text, "flash") == "flash 48 4.51 0.82 288 82.87"
    assert "sdpa_cudnn" not in text
    rows = [Row("naive", call_us=10e3), Row("flash", call_us=4e3)]
    text = table.plain(layers.render(Summary(CPU, rows), 2))
    assert line_of(text, "variant") == "variant call ms saves call ms"
    assert line_of(text, "flash") == "flash 8.00 12.00"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(monkeypatch: pytest.MonkeyPatch, rich: bool, stream: io.StringIO) -> str:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    table.write(table.render(gpu_summary(), "attention"), stream)
    return stream.getvalue()


def test_the_table_is_the_same_with_and_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    with_rich = printed(monkeypatch, True, io.StringIO())
    assert with_rich == printed(monkeypatch, False, io.StringIO())
    assert with_rich == text_of(gpu_summary())


def test_colours_are_for_terminals_and_no_color_is_respected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("rich")
    cyan = "\x1b[36m"
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert cyan in printed(monkeypatch, True, Terminal())
    assert "\x1b[" not in printed(monkeypatch, True, io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert cyan not in printed(monkeypatch, True, Terminal())
