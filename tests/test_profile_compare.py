"""What changed between two traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import traces
from traces import kernel, launch, op, span, step, trace

from attn_ext.profile import Trace, cli
from attn_ext.profile.compare import Difference, diff

H200 = Path(__file__).parent / "data" / "h200"


def h200(run: str, variant: str) -> Path:
    (path,) = (H200 / run).glob(f"*_64_{variant}_*.json.gz")
    return path


def figures(one: Difference) -> dict[str, tuple[object, object]]:
    return {figure.name: (figure.before, figure.after) for figure in one.figures}


def kinds(one: Difference) -> dict[str, str]:
    return {change.name: change.kind for change in one.changes}


def test_in_place_against_out_of_place_on_an_h200() -> None:
    before, after = (Trace.load(h200("forward", name)) for name in ("naive", "inplace"))
    (one,) = diff(before, after)
    assert one.name == "step" and figures(one)["memcpy"] == (1, 0)
    assert figures(one)["kernels"] == (5, 5) and figures(one)["memcpy_bytes"] == (2**28, 0)
    changed = {name: kind for name, kind in kinds(one).items() if kind != "same"}
    assert changed == {"Memcpy DtoD (Device -> Device)": "gone"}
    (back,) = diff(after, before)
    assert kinds(back)["Memcpy DtoD (Device -> Device)"] == "added"


def test_by_class_compares_different_makers() -> None:
    before, after = (Trace.load(h200("forward", name)) for name in ("math", "naive"))
    by_name, by_class = (diff(before, after, by=by)[0] for by in ("name", "class"))
    assert set(kinds(by_name).values()) == {"gone", "added"}
    assert kinds(by_class)["gemm"] == "faster" and kinds(by_class)["memcpy"] == "added"


def test_directions_are_regions_of_their_own() -> None:
    """Without steps, as in a foreign trace: calls of one op and shape stand for each other."""
    documents = []
    for variant in ("sdpa_flash", "sdpa_cudnn"):
        found = Trace.load(h200("backward", variant))
        found.__dict__["steps"] = []
        documents.append(found)
    names = [one.name for one in diff(*documents)]
    shape = "batch 8, heads 16, seq 1024, head size 64, bf16, causal"
    assert names == [
        f"aten::scaled_dot_product_attention ({shape})",
        f"aten::scaled_dot_product_attention backward ({shape})",
    ]
    assert figures(diff(*documents)[1])["kernels"] == (5, 3)


def run(*durations: float, name: str = "k", start: float = 0.0) -> list[traces.Entry]:
    entries = [step(start)]
    for number, duration in enumerate(durations):
        at = int(start) + number + 1
        entries += [launch(at, start + number), kernel(at, start + 200 + 50 * number, duration,
                                                       name)]  # fmt: skip
    return entries


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [((10.0,), (10.4,), "same"), ((10.0,), (12.0,), "slower"), ((10.0,), (8.0,), "faster"),
     ((0.5,), (1.0,), "same"), ((5.0, 5.0), (10.0,), "count")],
)  # fmt: skip
def test_what_counts_as_a_change(
    before: tuple[float, ...], after: tuple[float, ...], kind: str
) -> None:
    (one,) = diff(trace(*run(*before)), trace(*run(*after)))
    assert kinds(one) == {"k": kind}


def test_the_step_in_the_middle_stands_for_all() -> None:
    before = trace(*run(30.0), *run(10.0, start=1000.0), *run(20.0, start=2000.0))
    lost = trace(*run(11.0), *run(start=1000.0), launch(9, 1010.0))
    (one,) = diff(before, lost)
    assert figures(one)["gpu_us"] == (20.0, 11.0)


def test_what_is_unknown_is_not_compared_as_zero() -> None:
    cpu = trace(step(0.0), op("aten::mul", 5.0))
    (one,) = diff(cpu, trace(*run(10.0)))
    assert figures(one)["kernels"] == (None, 1) and figures(one)["gpu_us"] == (None, 10.0)
    (lost,) = diff(trace(*run(10.0)), trace(step(0.0), launch(1, 1.0)))
    assert figures(lost)["kernels"] == (1, None)


def test_ranges_on_one_side_alone() -> None:
    before = trace(span("a", 0.0, 10.0), span("b", 20.0, 10.0))
    found = diff(before, trace(span("b", 0.0, 10.0), span("c", 20.0, 10.0)), "*")
    assert [(one.name, one.before is None, one.after is None) for one in found] == [
        ("a", False, True), ("b", False, False), ("c", True, False),
    ]  # fmt: skip


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(h200("forward", name)) for name in ("naive", "inplace")]
    assert cli.main(["diff", *paths]) == 0
    out = capsys.readouterr().out
    assert "gone" in out and "Memcpy DtoD" in out and "same" not in out
    assert "peak_bytes" in out, "measured by the run, beside the trace"
    assert cli.main(["diff", *paths, "--all"]) == 0 and "same" in capsys.readouterr().out
    assert cli.main(["diff", *paths, "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert one["figures"]["memcpy"] == {"before": 1, "after": 0}
    assert {change["kind"] for change in one["changes"]} == {"same", "gone"}
    bare = str(traces.write(tmp_path / "t.json", op("aten::mm", 0.0)))
    assert cli.main(["diff", bare, bare]) == 2
    assert "expected attention in" in capsys.readouterr().err
    assert cli.main(["diff", bare, bare, "--region", "x"]) == 2
    assert "expected a range that matches x in" in capsys.readouterr().err
    assert cli.main(["diff", bare, "gone.json"]) == 2
    assert capsys.readouterr().err == "attn-ext diff: gone.json: No such file or directory\n"
