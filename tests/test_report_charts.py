"""The charts of a report: where things are drawn, and how much of a large trace."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import traces
from markupsafe import Markup
from traces import kernel, launch, memcpy, naive_step, op, step, trace

from attn_ext.profile import Case, Row, Summary, report
from attn_ext.profile.event import Event
from attn_ext.profile.report import bars, growth, plot, scale, steps, svg, timeline
from attn_ext.profile.report.classes import CLASSES, class_of
from attn_ext.profile.trace import Region


def region_of(*entries: traces.Entry) -> Region:
    return trace(*entries).steps[0]


def boxes(picture: Markup) -> list[tuple[str, float, float, float, str]]:
    """Label, x and width in percent, y and class of each box."""
    found = []
    for box in ET.fromstring(picture).iter("svg"):
        if (box.get("class") or "").startswith("box"):
            text = box.find("text")
            assert text is not None
            x, width = (float((box.get(name) or "").rstrip("%")) for name in ("x", "width"))
            found.append(
                (text.text or "", x, width, float(box.get("y") or 0), box.get("class") or "")
            )
    return found


def test_elements_are_escaped() -> None:
    assert svg.tag("a", svg.title("<b>"), class_="x", stroke_width=0.25, none=None) == (
        '<a class="x" stroke-width="0.25"><title>&lt;b&gt;</title></a>'
    )
    assert 'x="&#34;&gt;"' in svg.tag("a", x='">')
    assert [svg.percent(share) for share in (0.0, 1 / 3, 1.0)] == ["0%", "33.333%", "100%"]


def test_ticks_are_round() -> None:
    assert scale.ticks(644.7, 6) == [0, 200, 400, 600]
    assert scale.ticks(100.0, 10) == [10.0 * number for number in range(11)]
    assert scale.ticks(0.5, 5) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert scale.decades(3.0, 200.0) == [1.0, 10.0, 100.0, 1000.0]
    assert scale.decades(10.0, 10.0) == [10.0, 100.0]


def test_a_step_is_drawn_along_its_time() -> None:
    """From the start of the host's range to the end of the device's last event."""
    drawn = timeline.timeline(
        region_of(
            step(100.0, 100.0), op("aten::clone", 110.0, 40.0), op("aten::copy_", 115.0, 20.0),
            launch(1, 120.0, "cudaMemcpyAsync", 5.0), memcpy(1, 200.0, 100.0, 4096),
        )
    )  # fmt: skip
    assert (drawn.start_us, drawn.length_us, drawn.shown, drawn.total) == (100.0, 200.0, 4, 4)
    clone, copy, call, device = boxes(drawn.picture)
    assert clone[:3] == ("aten::clone", 5.0, 20.0) and copy[:3] == ("aten::copy_", 7.5, 10.0)
    assert call[:3] == ("cudaMemcpyAsync", 10.0, 2.5)
    assert device[:3] == ("Memcpy DtoD (Device -> Device)", 50.0, 50.0)
    assert clone[3] < copy[3] < call[3] < device[3], "what is inside is below, the device lowest"
    assert [box[4] for box in (clone, call, device)] == ["box host", "box runtime", "box copy"]
    (arrow,) = ET.fromstring(drawn.picture).findall("line")
    assert arrow.get("class") == "arrow" and (arrow.get("x1"), arrow.get("x2")) == ("10%", "50%")
    assert float(arrow.get("y1") or 0) == call[3] + 20 and float(arrow.get("y2") or 0) == device[3]
    texts = [node.text for node in ET.fromstring(drawn.names).iter("text")]
    assert texts == ["CPU", "GPU stream 7"]
    assert "4,096 bytes" in drawn.picture and "100.0 us" in drawn.picture


def test_every_device_event_has_its_arrow() -> None:
    drawn = timeline.timeline(region_of(*naive_step(1, 0.0)))
    arrows = [
        node for node in ET.fromstring(drawn.picture).iter("line") if "arrow" in str(node.attrib)
    ]
    assert len(arrows) == 7


def test_threads_and_streams_have_lanes_of_their_own() -> None:
    other = kernel(2, 130.0, 5.0) | {"tid": 9, "args": {"correlation": 2, "stream": 9, "device": 1}}
    first = kernel(1, 120.0, 30.0) | {"args": {"correlation": 1, "stream": 7, "device": 0}}
    entries = [step(0.0), op("aten::mm", 5.0), launch(1, 5.0), launch(2, 9.0, tid=traces.AUTOGRAD)]
    drawn = timeline.timeline(region_of(*entries, first, other))
    texts = [node.text for node in ET.fromstring(drawn.names).iter("text")]
    assert texts == ["CPU thread 10", "CPU thread 11", "GPU 0 stream 7", "GPU 1 stream 9"]


def test_the_thread_of_the_step_comes_first() -> None:
    backward = [op(f"aten::mm{at}", 10.0 * at) | {"tid": traces.AUTOGRAD} for at in range(5)]
    drawn = timeline.timeline(region_of(step(0.0), op("aten::mm", 5.0), *backward))
    texts = [node.text for node in ET.fromstring(drawn.names).iter("text")]
    assert texts == ["CPU thread 10", "CPU thread 11"]


def test_a_cpu_step_has_the_colours_of_its_ops() -> None:
    drawn = timeline.timeline(region_of(step(0.0), op("attn_ext::softmax", 5.0)))
    assert boxes(drawn.picture)[0][4] == "box softmax"


def test_a_huge_step_is_drawn_by_its_longest_events() -> None:
    entries = [step(0.0, 1e6)]
    for number in range(4000):
        at = 100.0 * number
        entries += [
            op(f"aten::op{number}", at, 1.0 + number % 90),
            launch(number, at + 0.5, duration=0.1),
            kernel(number, 1e6 + at, 1.0 + number % 50),
        ]
    drawn = timeline.timeline(region_of(*entries))
    assert drawn.total == 12_000 and drawn.shown == timeline.LIMIT
    found = boxes(drawn.picture)
    device = [box for box in found if box[0] == "kernel_x"]
    assert len(device) == timeline.LIMIT // 3
    assert min(box[2] for box in device) >= 40.0 / drawn.length_us * 100 * 0.9
    assert drawn.picture.count('class="arrow"') == len(device), "launches come with their kernels"
    assert len(drawn.picture) < 1_000_000


def test_deep_nesting_is_cut() -> None:
    entries = [op(f"aten::op{depth}", 1.0 + depth, 90.0 - 2 * depth) for depth in range(30)]
    drawn = timeline.timeline(region_of(step(0.0), *entries))
    assert (drawn.shown, drawn.total) == (timeline.DEPTH, 30)


def test_a_page_of_a_huge_trace_says_what_it_leaves_out(tmp_path: Path) -> None:
    entries = [step(0.0, 1e6)]
    for number in range(3000):
        at = 100.0 * number
        entries += [op(f"aten::op{number}", at), launch(number, at),
                    kernel(number, 1e6 + at, 2.0, f"kernel_{number}")]  # fmt: skip
    page = report.html(report.load([traces.write(tmp_path / "t.json", *entries)]))
    assert "Shows the longest 1500 of 9000 events." in page
    assert "2960 more rows are left out." in page
    assert len(page) < 2_000_000


def test_bars_are_on_one_scale() -> None:
    parts = [bars.Part("gemm", "product", 60.0), bars.Part("copy", "copy", 40.0)]
    rows = [
        bars.Bar("naive", "100 us", parts),
        bars.Bar("flash", "25 us", [bars.Part("attention", "attention", 25.0)]),
    ]
    drawn = bars.bars(rows, "what is seen", "us")
    assert [box[:3] for box in boxes(drawn)] == [
        ("product", 0.0, 60.0), ("copy", 60.0, 40.0), ("attention", 0.0, 25.0)
    ]  # fmt: skip
    assert 'aria-label="what is seen"' in drawn and "copy: 40 us\n40.0% of naive" in drawn
    assert bars.bars([bars.Bar("none", "0 us", [bars.Part("gemm", "x", 0.0)])], "", "us")


def test_kinds_of_work() -> None:
    def kind(name: str, category: str = "kernel") -> str:
        return class_of(Event(name, category, 0.0, 1.0, 0, 0, {})).key

    assert kind("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy") == "copy"
    assert kind("Memset (Device)", "gpu_memset") == "fill"
    assert kind("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT") == "gemm"
    assert kind("attn_flash_fwd_sm90_d64_bf16") == "attention"
    assert kind("void at::native::(anonymous)::softmax_warp_forward<float>") == "softmax"
    assert kind("aten::bmm", "cpu_op") == "gemm" and kind("aten::view", "cpu_op") == "other"
    css = (Path(report.__file__).parent / "templates" / "style.css").read_text()
    for one in CLASSES:
        assert re.search(rf"\.{one.key} {{ --c: var\(--{one.key}\)", css), one.key
        assert css.count(f"--{one.key}: #") == 2, "a colour for light and one for dark"


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast(theme: int) -> None:
    """WCAG 2 AA: 4.5 for text, 3 for what a chart is made of."""
    css = (Path(report.__file__).parent / "templates" / "style.css").read_text()
    block = re.findall(r":root \{(.*?)\}", css, re.DOTALL)[theme]
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", block))

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(colours[one]), luminance(colours[other])))
        return (high + 0.05) / (low + 0.05)

    for ground in ("page", "card"):
        for text in ("text", "quiet", "accent", "alarm"):
            assert contrast(text, ground) >= 4.5, (text, ground)
    for one in CLASSES:
        assert contrast(one.key, "card") >= 3, one.key
    assert contrast("tip-text", "tip") >= 4.5


def test_busy_and_self_times() -> None:
    def event(start: float, length: float, tid: int = 1) -> Event:
        return Event("aten::x", "cpu_op", start, length, 1, tid, {})

    assert steps.busy_us([event(0, 10), event(5, 10), event(20, 5), event(21, 1)]) == 20.0
    found = steps.self_times([event(2, 3), event(0, 10), event(6, 2), event(3, 1), event(1, 5, 2)])
    assert [(op.start_us, op.tid, own) for op, own in found] == [
        (2, 1, 2.0), (0, 1, 5.0), (6, 1, 2.0), (3, 1, 1.0), (1, 2, 5.0)
    ]  # fmt: skip


def test_memory_is_drawn_under_the_ops() -> None:
    """100 bytes, then 300, then 200 that stay: stairs whose top is the peak."""
    entries = [traces.allocation(at, size) for at, size in ((10.0, 100), (20.0, 200), (60.0, -100))]
    drawn = timeline.timeline(region_of(step(0.0), op("aten::mm", 5.0), *entries))
    path = ET.fromstring(drawn.picture).find(".//path")
    assert path is not None and path.get("d") == (
        "M0 100.00H0.00V100.00H100.00V66.67H200.00V0.00H600.00V33.33H1000V100H0Z"
    )
    assert (
        "host tensors, at most 0.00029 MiB" in drawn.picture and "peak 0.00029 MiB" in drawn.names
    )
    assert "path" not in timeline.timeline(region_of(step(0.0), op("aten::mm", 5.0))).picture
    many = [traces.allocation(0.01 * number, 100) for number in range(9000)]
    drawn = timeline.timeline(region_of(step(0.0), op("aten::mm", 5.0), *many))
    assert "V0.00" in drawn.picture and drawn.picture.count("V") <= timeline.LIMIT + 1


def test_the_plot_places_points_by_their_axes() -> None:
    x = plot.Axis("length", 10.0, 1000.0, [(10.0, "10"), (1000.0, "1,000")])
    y = plot.Axis("us", 0.0, 4.0, [(0.0, "0"), (4.0, "4")], log=False)
    points = [plot.Point(10.0, 0.0, "a"), plot.Point(100.0, 2.0, "b"), plot.Point(1000.0, 4.0, "c")]
    drawn = ET.fromstring(plot.plot(x, y, [plot.Line("naive", "s0", points)], "seen"))
    dots = [
        (float((d.get("cx") or "")[:-1]), float(d.get("cy") or 0)) for d in drawn.iter("circle")
    ]
    (x0, y0), (x1, y1), (x2, y2) = dots
    assert x1 - x0 == pytest.approx(x2 - x1) and y0 - y1 == pytest.approx(y1 - y2)
    assert x0 > 0 and x2 < 100 and y2 < y0, "inside, upwards"
    assert len([line for line in drawn.iter("line") if line.get("class") == "line s0"]) == 2


def summary_group(seq: int, **changes: object) -> report.Group:
    rows = [
        Row("naive", gpu_us=2e-3 * seq**2, peak_bytes=4 * seq**2),
        Row("flash", gpu_us=1e-4 * seq**2, peak_bytes=256 * seq),
        Row("math", error="no memory") if seq > 1000 else Row("math", gpu_us=1.0, peak_bytes=1),
    ]
    facts = {"kind": "gpu", "device": "NVIDIA H200", "case": vars(Case(seq=seq))}
    return report.Group(f"length {seq}", Summary(facts | changes, rows))


def test_growth_over_the_length() -> None:
    """In the order of the lengths, not of the files, with the power of the growth."""
    time, memory = growth.growth([summary_group(seq) for seq in (4096, 512, 2048, 1024)])
    assert (time.title, memory.title) == ("Growth of time", "Growth of memory")
    assert [key.label for key in time.legend] == ["naive ~ n^2.00", "flash ~ n^2.00"]
    assert [key.label for key in memory.legend] == ["naive ~ n^2.00", "flash ~ n^1.00"]
    dots = list(ET.fromstring(time.chart).iter("circle"))
    assert len(dots) == 8, "math ran at one length alone"
    positions = [float((dot.get("cx") or "")[:-1]) for dot in dots[:4]]
    assert positions == sorted(positions)
    assert "naive, length 1,024: 2,097.2 us" in time.chart
    assert "flash, length 4,096: 1.0 MiB" in memory.chart


def test_only_runs_that_differ_in_length_alone_grow() -> None:
    alone = [summary_group(512), summary_group(512)]
    others = [summary_group(512), summary_group(1024, device="NVIDIA A100")]
    shapes = [summary_group(512), summary_group(1024, case=vars(Case(seq=1024, head_dim=128)))]
    unknown = [summary_group(512), summary_group(1024, case=None)]
    for groups in (alone, others, shapes, unknown):
        assert list(growth.growth(groups)) == []
    two = [
        summary_group(seq, case=vars(Case(seq=seq, head_dim=d))) for seq in (8, 16) for d in (64, 8)
    ]
    titles = [section.title for section in growth.growth(two)]
    assert len(set(titles)) == 4 and not any("seq" in title for title in titles)


def test_growth_is_on_the_page() -> None:
    groups = [summary_group(512), summary_group(1024)]
    page = report.html(report.Report(groups))
    assert "Growth of memory" in page and "length 512" in page
    assert "What grows with the length" not in report.html(report.Report(groups[:1]))
