"""Guesses: what can be written, what is seen, and that nothing unknown passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import traces
from torch.profiler import ProfilerActivity, profile
from traces import kernel, launch, memcpy, naive_step, op, span, step, trace

from attn_ext.profile import Trace, cli
from attn_ext.profile.fields import FIELDS
from attn_ext.profile.figures import Row
from attn_ext.profile.guess import GuessError, load, parse
from attn_ext.profile.saved import subjects
from attn_ext.profile.verdicts import Subject, check
from attn_ext.testing import assert_trace, record

H200 = Path(__file__).parent / "data" / "h200"
ARTICLE = """
    naive: kernels=5 memcpy=1 memcpy_bytes=256MiB tensor_cores=yes;
    inplace: kernels=5 memcpy=0;
    math: kernels=20 memcpy=0 tensor_cores=no;
    flash: kernels=1 memcpy=0 gpu_us<150 occupancy>=10% kernel~attn_flash_fwd_sm90 bound!=CPU;
    sdpa_*: kernels=1 memcpy=0 tensor_cores=yes;
    sdpa_cudnn: memset=1 kernel~cudnn occupancy in 18..19 backend=sdpa_cudnn dtype=bf16
"""


def verdicts(guess: str, *of: Subject) -> list[tuple[str, str, str]]:
    return [(v.verdict, v.subject, v.guess) for v in check(parse(guess), of)]


def one(guess: str, found: Trace, row: Row | None = None) -> Any:
    (verdict,) = check(parse(guess), [Subject("trace", found, row)])
    return verdict


def test_the_findings_of_the_article_hold_on_an_h200() -> None:
    found = check(parse(ARTICLE), subjects([H200 / "forward"]))
    assert len(found) == 2 + 2 + 3 + 6 + 3 * 3 + 5 + 2
    assert [str(verdict) for verdict in found if verdict.verdict != "PASS"] == []


def test_how_a_guess_is_read() -> None:
    (first, second) = parse("a b*: kernels=1, gpu_us < 1.5ms ; kernel !~ 'x;y: z' ops in 3..5")
    assert (first.scope, str(first)) == ("a b*", "a b*: kernels=1 gpu_us<1.5ms")
    assert first.checks[1].value == 1500.0
    assert second.scope == "*" and second.checks[0].value == "x;y: z"
    assert second.checks[1].value == (3.0, 5.0)
    (ops,) = parse("aten::bmm: kernels==2;")
    assert (ops.scope, ops.checks[0].operator) == ("aten::bmm", "=")
    sizes = parse("peak_bytes<2GiB memcpy_bytes=3 copy_bytes>=1.5KiB tensor_cores=no")[0].checks
    assert [check.value for check in sizes] == [2**31, 3, 1536, 0.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected SCOPE: FIELD=VALUE ..., got ''"),
        (" ; ", "expected a check"),
        ("flash:", "expected a check after 'flash', got none"),
        ("flash: kernels", "expected FIELD=VALUE or another operator, got 'kernels'"),
        ("flash: kernels=1 and", "got 'and'"),
        ("kernels=", "got 'kernels='"),
        ("kernel=1 speed>3", "expected a field out of kernels, memcpy, .*, got 'speed'"),
        ("kernels~3", "kernels is a number"),
        ("kernels=three", "kernels: expected a number, got 'three'"),
        ("gpu_us<3%", "gpu_us: expected a number, with us or ms or s or nothing after it"),
        ("bound<GPU", "bound has no order"),
        ("kernel~'('", "is no regular expression"),
        ("ops in 3", "expected ops in LOW..HIGH"),
        ("tensor_cores=maybe", "expected yes or no"),
        ("tensor_cores=1", "expected yes or no"),
    ],
)
def test_errors_name_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(GuessError, match=message) as error:
        parse(text)
    assert "\n" not in str(error.value)


def test_guesses_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "guesses.toml"
    path.write_text(
        "[guess.flash]\nkernels = 1\ngpu_us = '<150'\noccupancy = '10..30'\nbound = 'gpu'\n"
        "tensor_cores = true\nkernel = \"~attn_flash\"\n[guess.'aten::*']\nmemcpy = 0\n"
    )
    first, second = load(path)
    assert str(first) == (
        "flash: kernels=1 gpu_us<150 occupancy in 10..30 bound=gpu tensor_cores=yes "
        "kernel~attn_flash"
    )
    assert second.scope == "aten::*"


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"x = 1", "expected tables .guess.SCOPE., got none"), (b"[guess", "expected TOML, got"),
     (b"\xff", "expected TOML"), (b"[guess]\na = 1", "guess.a: expected fields, got 1"),
     (b"[guess.a]\nspeed = 1", "expected a field")],
)  # fmt: skip
def test_errors_of_a_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "guesses.toml"
    path.write_bytes(content)
    with pytest.raises(GuessError, match=message):
        load(path)
    with pytest.raises(GuessError, match="No such file"):
        load(tmp_path / "gone.toml")


@pytest.mark.parametrize(
    ("guess", "holds"),
    [("kernels=5", True), ("kernels!=5", False), ("kernels<6", True), ("kernels<=4", False),
     ("kernels>4", True), ("kernels>=6", False), ("kernels in 4..5", True),
     ("gpu_us in 60.5..61.5", True), ("gpu_us<61us", False), ("kernel=kernel_x", True),
     ("kernel~^kern", True), ("kernel!~gemm", True), ("kernel!~kernel", False),
     ("memcpy_bytes=4KiB", True), ("launches=5", True)],
)  # fmt: skip
def test_operators(guess: str, holds: bool) -> None:
    found = trace(*naive_step(1, 0.0), *naive_step(2, 300.0))
    assert one(guess, found).verdict == ("PASS" if holds else "MISS")


def test_a_name_must_be_in_every_step() -> None:
    def kernels(at: float, *names: str) -> list[traces.Entry]:
        entries = [step(at)]
        for number, name in enumerate(names):
            correlation = int(at) + number + 1
            entries += [launch(correlation, at + 1), kernel(correlation, at + 20, 5.0, name)]
        return entries

    found = trace(*kernels(0.0, "a", "b"), *kernels(1000.0, "a", "c"))
    expected = {"kernel=a": "PASS", "kernel=b": "MISS", "kernel~b|c": "PASS", "kernel!~b": "MISS",
                "kernel!=d": "PASS"}  # fmt: skip
    assert {guess: one(guess, found).verdict for guess in expected} == expected


@pytest.mark.parametrize("field", [name for name, field in FIELDS.items() if field.device])
def test_nothing_recorded_of_the_device_never_passes(field: str) -> None:
    """C31: memcpy=0 on a trace without a GPU is no proof of anything."""
    value = {"yes": "no", "text": "GPU", "names": "k"}.get(FIELDS[field].kind, "0")
    operator = "!=" if FIELDS[field].kind in ("text", "names") else "="
    for found in (trace(step(0.0), op("aten::mul", 5.0)), trace(step(0.0)), trace()):
        assert one(f"{field}{operator}{value}", found).verdict == "UNKNOWN"
    elsewhere = trace(step(0.0), launch(1, 900.0), kernel(1, 910.0, 1.0))
    verdict = one(f"{field}{operator}{value}", elsewhere)
    assert verdict.verdict == "UNKNOWN" and verdict.reason


def test_launches_without_kernels_are_unknown() -> None:
    lost = [step(0.0), launch(1, 5.0), launch(2, 6.0), kernel(1, 20.0, 1.0)]
    verdict = one("kernels=1", trace(*lost))
    assert (verdict.verdict, verdict.reason) == (
        "UNKNOWN", "the profiler lost the kernels of 1 launches",
    )  # fmt: skip
    assert one("kernels=5", trace(*lost, *naive_step(1, 500.0))).verdict == "PASS", "by the others"


def test_steps_that_disagree_are_unknown() -> None:
    found = trace(*naive_step(1, 0.0), step(500.0), launch(9, 510.0), kernel(9, 520.0, 1.0))
    verdict = one("kernels<=5", found)
    assert (verdict.verdict, verdict.reason) == ("UNKNOWN", "the steps disagree: 5, 1")
    assert one("gpu_us<70", found).verdict == "PASS", "a time is the median of the steps"


def test_a_scope_names_variants_ranges_and_calls() -> None:
    found = trace(
        *naive_step(1, 0.0), span("block.0", 11.0, 6.0),
        op("aten::_scaled_dot_product_flash_attention", 14.0, 5.0),
    )  # fmt: skip
    subject = Subject("mine", found)
    assert verdicts("mine: kernels=5", subject) == [("PASS", "mine", "kernels=5")]
    assert verdicts("m*: kernels=5; kernels=5", subject)[1][:2] == ("PASS", "mine")
    assert verdicts("block.*: kernels=1", subject) == [("PASS", "mine, block.*", "kernels=1")]
    for scope in ("sdpa_flash", "aten::_scaled*"):
        assert verdicts(f"{scope}: kernels=1", subject)[0][:2] == ("PASS", f"mine, {scope}")
    (verdict,) = check(parse("other: kernels=0"), [subject])
    assert verdict.verdict == "UNKNOWN" and "there is mine" in verdict.reason
    assert verdicts("x: kernels=0") == [("UNKNOWN", "x", "kernels=0")]


def test_a_run_knows_more_than_its_trace(tmp_path: Path) -> None:
    found = trace(*naive_step(1, 0.0))
    row = Row("naive", call_us=70.0, cpu_us=20.0, bound="mixed", peak_bytes=5)
    for guess in ("call_us=70", "cpu_us=20", "bound=mixed", "peak_bytes=5"):
        assert one(guess, found, row).verdict == "PASS"
    assert "only the summary.json" in one("call_us=70", found).reason
    assert "a profiled host is slower" in one("bound!=GPU", found).reason
    failed = one("kernels=0", trace(), Row("naive", error="no such kernel"))
    assert failed.verdict == "UNKNOWN" and "no such kernel" in failed.reason


def test_a_bound_by_the_device_is_sure_under_the_profiler() -> None:
    found = trace(step(0.0, 20.0), launch(1, 5.0), kernel(1, 20.0, 60.0))
    assert one("bound=gpu", found).verdict == "PASS" and one("bound=cpu", found).verdict == "MISS"


@pytest.mark.parametrize(
    ("variant", "guess", "text", "evidence"),
    [
        ("naive", "memcpy=0", "out-of-place masked_fill copies the scores first",
         "masked_fill > aten::clone > aten::copy_ > Memcpy DtoD (Device -> Device), 256.0 MiB"),
        ("naive", "gpu_us<500", "out-of-place masked_fill", "256.0 MiB"),
        ("naive", "memset=0", "clears a counter before its kernel", "4 bytes, 0.7 us, then nvjet"),
        ("sdpa_cudnn", "memset=0", "cuDNN clears a counter", "4 bytes"),
        ("math", "kernels=5", "SDPA ran its math backend, 5 casts to fp32 and back, the causal "
         "mask is built in each call, fp32 products without tensor cores", "f32f32_f32f32"),
        ("math", "tensor_cores=yes", "without tensor cores", "sm80_xmma_gemm_f32f32"),
        ("math", "launches=1", "a kernel casts to another dtype", "4 more"),
        ("sdpa_cudnn", "kernel~pytorch_flash", "put before flash on this GPU", "cudnn_generated"),
        ("sdpa_flash", "kernel~attn_flash", "attn_ext.activate() was not called", "pytorch_flash"),
        ("sdpa_flash", "backend=aten", "torch's own kernel ran", "_flash_attention_forward"),
        ("flash", "occupancy>=50", "Kineto allows 48 KiB", "attn_flash_fwd_sm90_d64_bf16"),
        ("flash", "occupancy>=50", "few and heavy blocks", "TFLOP/s"),
        ("inplace", "kernels=1", "what ran: 2 x matrix product of cuBLAS, 1 x attn_ext's scale",
         "nvjet"),
    ],
)  # fmt: skip
def test_a_miss_is_explained(variant: str, guess: str, text: str, evidence: str) -> None:
    (path,) = (H200 / "forward").glob(f"*_64_{variant}_eager.json.gz")
    (verdict,) = check(parse(guess), [Subject(variant, Trace.load(path))])
    assert verdict.verdict == "MISS"
    found = [finding for finding in verdict.findings if text in finding.text + finding.evidence]
    assert found and evidence in f"{found[0]}", str(verdict)


def test_a_backward_of_several_kernels_is_explained() -> None:
    (path,) = (H200 / "backward").glob("*_64_flash_*.json.gz")
    (verdict,) = check(parse("*backward: kernels=1"), [Subject("flash", Trace.load(path))])
    assert verdict.verdict == "MISS" and verdict.seen == "3"
    assert "steps before and after it" in str(verdict) and "a step around it" in str(verdict)


def test_a_host_that_is_slower_is_explained() -> None:
    small = H200 / "forward_small"
    found = check(parse("flash: bound=gpu cpu_us<1"), subjects([small]))
    assert [verdict.verdict for verdict in found] == ["MISS", "MISS"]
    assert "the host is slower than the GPU" in str(found[0]) and "under the profiler" not in str(
        found[0]
    )


def test_a_context_entered_in_each_step_is_likely_the_cause() -> None:
    found = trace(
        step(0.0, 200.0), op("aten::_scaled_dot_product_flash_attention", 120.0, 60.0),
        launch(1, 130.0), kernel(1, 140.0, 20.0),
    )  # fmt: skip
    verdict = one("cpu_us<50", found)
    assert "likely Python is timed beside the attention" in str(verdict)
    assert "140.0 of 200.0 us before the first op and after the last one" in str(verdict)


def test_copies_under_compile_and_into_another_layout() -> None:
    def copying(*names: str) -> Trace:
        around = [op(name, float(at), 50.0 - 2 * at) for at, name in enumerate(names)]
        return trace(step(0.0), *around, launch(1, 20.0, "cudaMemcpyAsync"),
                     memcpy(1, 120.0, 9.0, 2**21))  # fmt: skip

    compiled = one("memcpy=0", copying("Torch-Compiled Region: 0/0", "aten::clone"))
    assert "likely torch.compile made an op that works in place" in str(compiled)
    layout = one("memcpy=0", copying("aten::contiguous", "aten::clone"))
    assert "copied into another layout [aten::contiguous > aten::clone > Memcpy" in str(layout)
    assert "2.0 MiB" in str(layout)
    assert "a tensor is copied [Memcpy" in str(one("memcpy=0", copying()))


def test_assert_trace_of_a_call() -> None:
    query = torch.randn(1, 2, 16, 8)
    seen = assert_trace(
        lambda: F.scaled_dot_product_attention(query, query, query),
        "copies=0 backend=sdpa_flash dtype=fp32 op~attention",
    )
    assert len(seen.steps) == 3 and len(record(lambda: query + 1, steps=2, warmup=0).steps) == 2
    with pytest.raises(AssertionError) as error:
        assert_trace(lambda: query.masked_fill(query > 0, 0.0), "copies=0 ops<99")
    assert str(error.value).startswith("the trace is not as guessed\nMISS     trace: copies=0, see")
    assert "masked_fill_ does not" in str(error.value) and "PASS     trace: ops<99" in str(
        error.value
    )


def test_assert_trace_of_what_was_recorded(tmp_path: Path) -> None:
    path = traces.write(tmp_path / "t.json", *naive_step(1, 0.0))
    for what in (path, str(path), Trace.load(path)):
        assert_trace(what, "kernels=5 memcpy=1")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(3).add(1)
    with pytest.raises(AssertionError, match="UNKNOWN  trace: memcpy=0"):
        assert_trace(profiler, "memcpy=0")
    with pytest.raises(TypeError, match="got 3"):
        assert_trace(3, "memcpy=0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps >= 1"):
        record(lambda: None, steps=0)


@pytest.mark.parametrize(
    ("guess", "status"),
    [("kernels=5", 0), ("kernels=5; kernels=4", 1), ("kernels=5; x: kernels=5", 3),
     ("kernels=4; x: kernels=5", 1), ("speed=3", 2)],
)  # fmt: skip
def test_the_command(
    guess: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = traces.write(tmp_path / "t.json", *naive_step(1, 0.0))
    assert cli.main(["check", str(path), "--guess", guess]) == status
    captured = capsys.readouterr()
    if status == 2:
        assert captured.err.startswith("attn-ext check: guess: expected a field out of")
        assert captured.err.count("\n") == 1 and captured.out == ""
    else:
        assert "t: kernels=5, seen 5" in captured.out or status == 1


def test_the_command_with_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guesses = tmp_path / "g.toml"
    guesses.write_text("[guess.naive]\nmemcpy = 0\n")
    arguments = ["check", str(H200 / "forward"), "--guesses", str(guesses), "--json"]
    assert cli.main(arguments) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["seen"]) == ("MISS", "1")
    assert "masked_fill" in found["findings"][0][0]
    assert cli.main(["check", str(tmp_path), "--guess", "kernels=1"]) == 2
    assert "expected a folder with traces, got none in it" in capsys.readouterr().err
    assert cli.main(["check", str(H200 / "forward")]) == 2
    assert "expected at least one guess" in capsys.readouterr().err
