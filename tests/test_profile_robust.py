"""Traces of any size and origin: read in pieces, refused in words, never miscounted in silence."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import traces
from traces import STREAM, kernel, launch, memset, naive_step, op, span, step, trace

from attn_ext.profile import Trace, TraceError, cli, stream
from attn_ext.profile.guess import parse
from attn_ext.profile.verdicts import Subject, check

ODD: dict[str, Any] = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": 'a "quoted" \\ name', "list": [[], {}, [1.5e-3, -2]]}],
    "traceEvents": [
        span("odd \x01\n\t {[, ]}", 0.0, 5.0), "text", 12345, None, {"ph": "X"}, [],
        *naive_step(1, 0.0),
    ],
    "number at the end": 1234567890,
}  # fmt: skip


def read(path: Path) -> tuple[dict[str, Any], list[Any]]:
    pairs = list(stream.read(path))
    return {k: v for k, v in pairs if k is not None}, [v for k, v in pairs if k is None]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_pieces_of_any_size_read_as_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | None, name: str
) -> None:
    monkeypatch.setattr(stream, "_CHUNK", chunk)
    text = json.dumps(ODD, indent=indent, ensure_ascii=False).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    metadata, events = read(path)
    assert events == ODD["traceEvents"]
    assert metadata == {key: value for key, value in ODD.items() if key != "traceEvents"}


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [op("aten::é", 1.0)], "x": [1, 2]}, ensure_ascii=False)
    raw = text.encode()
    path = tmp_path / "t.json"
    for keep in range(1, len(raw)):
        path.write_bytes(raw[:keep])
        with pytest.raises(
            TraceError, match=r"t\.json: (damaged or truncated JSON|expected a Chr)"
        ):
            Trace.load(path)
    path.write_bytes(raw + b" \n")
    assert len(Trace.load(path).ops) == 1


def test_a_file_damaged_anywhere_is_read_or_refused(tmp_path: Path) -> None:
    """Whatever byte is another one: a trace, or one line that names the file."""
    draw = random.Random(0)
    for name in ("t.json", "t.json.gz"):
        raw = traces.write(tmp_path / name, *naive_step(1, 0.0)).read_bytes()
        for _ in range(300):
            damaged = bytearray(raw)
            damaged[draw.randrange(len(raw))] = draw.randrange(256)
            (tmp_path / name).write_bytes(damaged)
            try:
                found = Trace.load(tmp_path / name)
            except TraceError as error:
                assert name in str(error) and "\n" not in str(error)
            else:
                assert all(region.gpu_us >= 0 for region in found.regions("*") + found.attention())


@pytest.mark.parametrize(
    "text", ['{"traceEvents": []} x', '{"a": 1 "b": 2}', '{"traceEvents": [1 2 3}', "[1, 2", "nul",
             '{"traceEvents" [] }', "{,}", '{"traceEvents": [{]}'],
)  # fmt: skip
def test_what_is_nearly_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"t\.json: damaged or truncated JSON|got JSON without"):
        Trace.load(path)


def test_memory_is_that_of_the_events_that_are_kept(tmp_path: Path) -> None:
    """Python's stack, the bulk of a big trace, is read past: a tenth of the file is enough."""
    path = tmp_path / "big.json"
    stack = span("torch/nn/modules/module.py(1751): _call_impl", 1.0, 2.0) | {
        "cat": "python_function", "args": {"Python id": 1, "Python parent id": 0, "Ev Idx": 7},
    }  # fmt: skip
    lines = ",\n".join([json.dumps(stack)] * 500)
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        for number in range(100):
            file.write(
                lines + ",\n" + ",\n".join(map(json.dumps, naive_step(number, 300.0 * number)))
            )
            file.write(",\n" if number < 99 else "]}")
    size = path.stat().st_size
    assert size > 10_000_000
    tracemalloc.start()
    found = Trace.load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.steps) == 100 and {len(region.kernels) for region in found.steps} == {5}
    assert peak < size / 2, f"{peak} bytes for a file of {size}"


def test_two_processes_in_one_file_are_refused(tmp_path: Path) -> None:
    """Their launches have the same numbers, and a kernel does not say whose it is."""
    other = [entry | {"pid": 2} for entry in naive_step(1, 0.0) if entry["pid"] == 1]
    path = traces.write(tmp_path / "t.json", *naive_step(1, 0.0), *other)
    with pytest.raises(TraceError, match=r"t\.json: expected the trace of one process, got several "
                       r"\(such as 1 and 2\)"):  # fmt: skip
        Trace.load(path)
    apart = [entry | {"pid": 2} for entry in naive_step(2, 0.0) if entry["pid"] == 1]
    devices = [entry for entry in naive_step(2, 0.0) if entry["pid"] == 0]
    found = Trace.load(traces.write(tmp_path / "t.json", *naive_step(1, 0.0), *apart, *devices))
    assert [len(region.kernels) for region in found.steps] == [5, 5]


FLASH = "attn_flash_bwd_sm80_d64_bf16_kernel"


def replayed(*names: str) -> list[traces.Entry]:
    kernels = [kernel(1, 50.0 + 10 * at, 5.0, name) for at, name in enumerate(names)]
    return [step(0.0), launch(1, 5.0, "cudaGraphLaunch"), *kernels]


def test_attention_in_a_replayed_graph_is_found_by_its_kernels() -> None:
    """No op is recorded: two layers forward, one of them backward in three kernels."""
    forward = "attn_flash_fwd_sm90_d64_bf16_kernel"
    found = trace(*replayed(forward, "ampere_sgemm_128x64_tn", forward, f"{FLASH}_before", FLASH,
                            f"{FLASH}_after", "ampere_sgemm_128x64_tn"))  # fmt: skip
    regions = found.attention()
    assert [len(region.kernels) for region in regions] == [1, 1, 3]
    assert [region.calls[0].backward for region in regions] == [False, False, True]
    for region in regions:
        assert (region.cpu_us, region.bound, region.flops, region.tflops) == (None,) * 4
        assert region.gpu_us and region.tensor_cores
    assert len(found.steps[0].kernels) == 7
    (verdict, other) = check(parse("attn_ext: tensor_cores=yes cpu_us<9"), [Subject("t", found)])
    assert (verdict.verdict, other.verdict) == ("PASS", "UNKNOWN")


def test_streams_that_overlap_are_counted_once() -> None:
    second = kernel(2, 21.0, 10.0) | {"tid": STREAM + 1}
    found = trace(step(0.0), launch(1, 5.0), launch(2, 6.0), kernel(1, 20.0, 10.0), second)
    assert len(found.steps[0].kernels) == 2 and found.steps[0].gpu_us == 20.0


def test_device_events_without_a_number_are_nobodys() -> None:
    bare = memset(3, 30.0, 1.0)
    del bare["args"]["correlation"]
    found = trace(step(0.0), launch(1, 5.0), kernel(1, 20.0, 1.0), bare)
    assert len(found.outside(found.steps)) == 1 and found.steps[0].path(found.memset[0]) == []


COMMANDS = (["check", "t.json", "--guess", "kernels=0"], ["diff", "t.json", "t.json"],
            ["report", "t.json"])  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("content", ["", "{}", '{"traceEvents": [', "[]", '{"traceEvents": []}'])
def test_no_command_takes_an_unreadable_trace_for_an_empty_one(
    command: list[str], content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.json").write_text(content)
    readable = content.endswith(("]", "]}"))
    status = cli.main(command)
    captured = capsys.readouterr()
    if command[0] == "check" and readable:
        assert status == 3 and "UNKNOWN" in captured.out
    else:
        assert status == 2 and captured.err.count("\n") == 1 and captured.out == ""
