"""Reports: what they read, what they say, and that a page is safe and bounded."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import traces
from report_pages import cpu_trace, gpu_trace, run_folder
from traces import kernel, launch, naive_step, op, step

from attn_ext.profile import Case, TraceError, cli, figures, report
from attn_ext.profile.occupancy import occupancy_of
from attn_ext.profile.report.classes import class_of

H200 = Path(__file__).parent / "data" / "h200"
VOID = {"meta", "link", "br", "hr", "input", "img"}


class Page(HTMLParser):
    """A page as its tags and the text outside of style and script; tags must be closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self._open) and data.strip():
            self.texts.append(" ".join(data.split()))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(*paths: Path) -> Page:
    return Page(report.html(report.load(paths)))


def test_a_run_is_reported_with_its_summary(tmp_path: Path) -> None:
    found = report.load([run_folder(tmp_path / "run")])
    (group,) = found.groups
    assert [row.variant for row in group.summary.rows] == ["naive", "flash", "sdpa_cudnn"]
    assert [source.row.variant for source in group.sources] == ["naive", "flash"]
    assert group.case == Case() and group.title == f"Attention of {Case()}"
    page = Page(report.html(found))
    for text in ("5", "618.9", "62.0", "528.0", "16.5", "1.00x", "9.98x", "naive", "flash"):
        assert text in page.texts
    assert "cannot run: cuDNN <attention> has been disabled." in page.texts
    assert "256.0 MiB" in page.texts and "1 copy in naive" in page.texts


def test_a_sweep_is_a_group_for_each_length(tmp_path: Path) -> None:
    summaries = []
    for seq in (512, 1024, 2048):
        folder = run_folder(tmp_path / str(seq), seq, gpu_us=float(seq))
        summary = json.loads((folder / "summary.json").read_text())
        summary["rows"][0]["trace"] = f"naive_{seq}.json.gz"
        (folder / "naive.json.gz").rename(tmp_path / f"naive_{seq}.json.gz")
        summaries.append(summary)
    sweep = {"schema": 1, "lengths": [512, 1024, 2048], "growth": {}, "summaries": summaries}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    found = report.load([tmp_path])
    assert [group.case.seq for group in found.groups if group.case] == [512, 1024, 2048]
    assert [source.path.name for group in found.groups for source in group.sources] == [
        f"naive_{seq}.json.gz" for seq in (512, 1024, 2048)
    ]
    assert "naive ~ n^1.00" in page_of(tmp_path / "sweep.json").texts
    (group,) = report.load([tmp_path / "naive_1024.json.gz"]).groups
    assert group.case == Case(seq=1024) and group.summary.rows[0].gpu_us == 1024.0


def test_a_single_trace_of_a_run_takes_its_row_from_the_summary(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (group,) = report.load([folder / "flash.json.gz"]).groups
    assert [(row.variant, row.call_us, row.factor) for row in group.summary.rows] == [
        ("flash", 72.4, 1.0)
    ]
    assert group.summary.facts["torch"] == "2.11.0"


def test_any_trace_of_torch_is_reported(tmp_path: Path) -> None:
    """One that nothing marked as steps is a region of its own."""
    marked = gpu_trace(tmp_path / "marked.json", 3, deviceProperties=[{"name": "NVIDIA A100"}])
    bare = traces.write(tmp_path / "bare.pt.trace.json", op("aten::mm", 0.0, 9.0),
                        launch(1, 2.0), kernel(1, 20.0, 30.0), launch(2, 5.0))  # fmt: skip
    first, second = report.load([marked, bare]).groups
    assert first.summary.facts == {"kind": "gpu", "device": "NVIDIA A100"}
    assert (first.summary.rows[0].variant, first.summary.rows[0].kernels) == ("marked", 3)
    (row,) = second.summary.rows
    assert (row.variant, row.lost, row.kernels) == ("bare", 1, None)
    step = second.sources[0].step
    assert (step.name, step.span.start_us, step.span.end_us) == ("whole trace", 0.0, 50.0)
    texts = page_of(marked, bare).texts
    assert "Launches lost" in texts and "2 runs of attention" in texts


def test_the_step_that_stands_for_the_others(tmp_path: Path) -> None:
    entries = []
    for number, length in enumerate((5.0, 40.0, 20.0), 1):
        at = 1000.0 * number
        entries += [step(at), launch(number, at + 1), kernel(number, at + 50, length)]
    entries += [step(9000.0), launch(9, 9001.0)]  # its kernel was lost
    (group,) = report.load([traces.write(tmp_path / "t.json", *entries)]).groups
    assert group.sources[0].step.gpu_us == 20.0


def test_a_range_by_name(tmp_path: Path) -> None:
    path = traces.write(
        tmp_path / "t.json", step(0.0), traces.span("block.0", 10.0, 20.0),
        traces.span("block.1", 40.0, 20.0), op("aten::mm", 11.0), op("aten::mm", 41.0),
        op("aten::add", 80.0),
    )  # fmt: skip
    (group,) = report.load([path], region="block.*").groups
    assert group.summary.rows[0].ops == 1 and len(group.sources[0].steps) == 2
    with pytest.raises(TraceError, match=r"range that matches x\*, got attn_ext.step, block.0, b"):
        report.load([path], region="x*")


def test_a_cpu_trace_has_no_device_figures(tmp_path: Path) -> None:
    page = page_of(cpu_trace(tmp_path / "cpu.json"))
    for word in ("kernels", "memcpy", "memset", "GPU us", "Kernels per call", "-"):
        assert word not in page.texts
    assert "ops" in page.texts and "Hidden copies" in page.texts and "1 copy in cpu" in page.texts
    assert page.texts.count("0") == 0


def test_a_figure_that_is_not_known_is_a_dash(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path / "run", kernels=None, call_us=None))
    assert page.texts.count("-") == 3  # the bound needs the time of a call


def test_the_kernels_of_a_step(tmp_path: Path) -> None:
    """Named, counted, and with the occupancy that the trace gets wrong."""
    page = page_of(run_folder(tmp_path / "run"))
    texts = page.texts
    at = texts.index(
        "attn_flash_fwd_sm90_d64_bf16_kernel", texts.index("flash", texts.index("share"))
    )
    assert "fused attention" in texts[at : at + 20] and "yes" in texts[at : at + 20]
    tips = [cell.get("title") or "" for cell in page.all("td")]
    assert any("12.5 % theoretical" in tip and "Kineto allows 48 KiB" in tip for tip in tips)
    readings = [head["title"] or "" for head in page.all("th") if head.get("scope") == "row"
                and "title" in head]  # fmt: skip
    assert any("matrix product of cuBLAS" in reading for reading in readings)


RUNS = sorted(path.name for path in H200.iterdir() if (path / "summary.json").is_file())


@pytest.mark.parametrize("run", RUNS)
def test_runs_of_an_h200(run: str) -> None:
    """Every row has its trace, every event of its step a known kind, every kernel an occupancy."""
    found = report.load([H200 / run])
    (group,) = found.groups
    ran = [row.variant for row in group.summary.rows if row.error is None]
    assert [source.row.variant for source in group.sources] == ran and "flash" in ran
    for source in group.sources:
        step = source.step
        assert len(step.kernels) == source.row.kernels, source.row.variant
        assert not [event.name for event in step.device_events if class_of(event).key == "other"]
        assert all(occupancy_of(kernel, source.devices) for kernel in step.kernels)
    page = Page(report.html(found))
    for source in group.sources:
        assert all(kernel.name in page.texts for kernel in source.step.kernels)
    assert len(page.html) < 1_000_000


def test_every_figure_has_its_definition(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path / "run"))
    cells = [cell for cell in page.all("td") if cell.get("class") != "error"]
    assert len(cells) >= 2 * 8 and all(cell["title"] for cell in cells)
    heads = [button for button in page.all("button") if "title" in button]
    assert len(heads) >= 8 and all(head["title"] for head in heads)
    cards = [item for item in page.all("li") if "title" in item]
    assert len(cards) == 4 and all(card["title"] for card in cards)


def test_the_page_loads_nothing_and_runs_nothing_of_a_trace(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
    path = gpu_trace(tmp_path / "t.json", deviceProperties=[{"name": evil}])
    page = page_of(path)
    assert len(page.all("script")) == 1 and page.all("img") == []
    assert any(evil in text for text in page.texts)
    addresses = [
        value for _, attributes in page.tags for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "action") and not (value or "").startswith("#")
    ]  # fmt: skip
    assert addresses == ["data:,"]
    assert "url(" not in page.html and "@import" not in page.html
    handlers = [n for _, attributes in page.tags for n in attributes if n.startswith("on")]
    assert handlers == [] and not any("style" in attributes for _, attributes in page.tags)
    (policy,) = [m["content"] for m in page.all("meta") if m.get("http-equiv")]
    assert policy is not None and policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_headings_and_language(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path / "a"), run_folder(tmp_path / "b", seq=256))
    assert page.all("html") == [{"lang": "en"}] and len(page.all("h1")) == 1
    levels = [int(tag[1]) for tag, _ in page.tags if tag in ("h1", "h2", "h3", "h4")]
    assert all(b - a <= 1 for a, b in pairwise(levels)), "no level is skipped"
    assert all(head.get("scope") for head in page.all("th"))
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.json", b"", "expected a Chrome trace, got an empty file"),
        ("t.json", b'{"traceEvents": [', "damaged or truncated JSON"),
        ("t.json.gz", b"\x1f\x8b\x08", "damaged or truncated gzip"),
        ("t.json", b"[]", "got one without events"),
        ("t.json", b'{"a": 1}', "got JSON without traceEvents"),
        ("summary.json", b'{"schema": 1', "damaged, or not the summary of a run"),
        ("summary.json", b'{"schema": 1}', "damaged, or not the summary of a run: 'rows'"),
        ("summary.json", b"[]", "damaged, or not the summary of a run"),
        ("summary.json", b'{"schema": 9, "rows": []}', "expected schema 1, got 9"),
        ("other.json", b'{"schema": 1, "rows": [{}]}', "damaged rows"),
        ("other.json", b'{"schema": 1, "rows": [3]}', "damaged rows"),
        ("sweep.json", b'{"schema": 1, "summaries": 3}', "damaged, or not the summary of a run"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError) as error:
        report.load([path])
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value)
    assert "\n" not in str(error.value)


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no\.json: No such file"):
        report.load([tmp_path / "no.json"])
    with pytest.raises(TraceError, match="expected a folder with traces, got none in it"):
        report.load([tmp_path])


def test_a_folder_without_a_summary_is_its_traces(tmp_path: Path) -> None:
    for name in ("b.json", "a.json.gz"):
        traces.write(tmp_path / name, *naive_step(1, 0.0))
    (group,) = report.load([tmp_path, tmp_path / "b.json"]).groups
    assert sorted(row.variant for row in group.summary.rows) == ["a", "b"]


def test_the_json_has_the_form_of_the_summary(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    found = report.load([folder]).to_dict()
    summary = json.loads((folder / "summary.json").read_text())
    (group,) = found["groups"]
    assert found["schema"] == figures.SCHEMA and group["case"] == summary["case"]
    busy = pytest.approx(618.9 / 657.7)
    assert group["rows"][0] == summary["rows"][0] | {"factor": 1.0, "busy": busy, "bound": "GPU"}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, html = run_folder(tmp_path / "run"), tmp_path / "report.html"
    assert cli.main(["report", str(folder), "--html", str(html)]) == 0
    out = capsys.readouterr().out
    assert "sdpa_cudnn  cannot run: cuDNN" in out and f"wrote the page: {html}" in out
    assert cli.main(["report", str(folder), "--format", "html"]) == 0
    assert capsys.readouterr().out == html.read_text(encoding="utf-8")
    assert cli.main(["report", str(folder / "flash.json.gz"), "--format", "json"]) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert [row["variant"] for row in group["rows"]] == ["flash"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "attn-ext report: the following arguments are required: TRACE"),
        (["no.json"], "attn-ext report: no.json: No such file or directory"),
        (["t.json", "--region", "x"], "attn-ext report: t.json: expected a range that matches x"),
        (["t.json", "--html", "no/x"], "attn-ext report: --html: expected a file to write, got no"),
        (["t.json", "--format", "xml"], "attn-ext report: argument --format: invalid choice"),
    ],
)
def test_errors_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    gpu_trace(tmp_path / "t.json")
    try:
        status: int | str | None = cli.main(["report", *arguments])
    except SystemExit as stop:  # argparse's own
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2 and captured.out == ""
    assert captured.err.startswith(message) and captured.err.count("\n") == 1
