"""attn-ext view: what is served, to whom, and how Perfetto gets it."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path

import pytest
import traces

from attn_ext.profile import cli, viewer


@pytest.fixture
def served(tmp_path: Path) -> Iterator[viewer.Viewer]:
    """A trace with an awkward name, served on a free port."""
    name = "a trace </script><b>%\"'.json.gz".replace("/", "_")
    path = traces.write(tmp_path / name, *traces.naive_step(1, 0.0))
    (tmp_path / "secret").write_text("secret")
    with viewer.Viewer(path, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


def get(server: viewer.Viewer, path: str, **headers: str) -> HTTPResponse:
    request = urllib.request.Request(server.address.rstrip("/") + path, headers=headers)
    answer = urllib.request.urlopen(request, timeout=10)
    assert isinstance(answer, HTTPResponse)
    return answer


def test_the_trace_is_served_to_perfetto_alone(served: viewer.Viewer) -> None:
    answer = get(served, served.path)
    assert answer.read() == served.trace.read_bytes()
    assert answer.headers["Access-Control-Allow-Origin"] == "https://ui.perfetto.dev"
    assert answer.headers["Cache-Control"] == "no-store"
    assert served.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "path", ["/secret", "/../secret", "//secret", "/etc/passwd", "/?url=x", "/%2e%2e/"]
)
def test_nothing_else_is_served(served: viewer.Viewer, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        get(served, path)
    assert error.value.code == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9001", "", "127.0.0.1.evil.example:80"]
)
def test_another_name_for_this_machine_is_refused(served: viewer.Viewer, host: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        get(served, served.path, Host=host)
    assert error.value.code in (400, 403)


def test_the_page_names_the_trace_and_is_not_broken_by_it(served: viewer.Viewer) -> None:
    page = get(served, "/").read().decode()
    assert page.count("</script>") == 1 and "<b>" not in page
    assert '<iframe src="https://ui.perfetto.dev"' in page


def test_the_command_opens_the_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(server: viewer.Viewer) -> None:
        raise KeyboardInterrupt

    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr(viewer.Viewer, "serve_forever", stop)
    path = str(traces.write(tmp_path / "t.json", *traces.naive_step(1, 0.0)))
    assert cli.main(["view", path, "--port", "0"]) == 0
    out = capsys.readouterr().out
    assert len(opened) == 1 and opened[0] in out and opened[0].startswith("http://127.0.0.1:")
    assert cli.main(["view", path, "--port", "0", "--no-browser"]) == 0 and len(opened) == 1


def test_errors_are_one_line(
    tmp_path: Path, served: viewer.Viewer, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{")
    trace = str(served.trace)
    for arguments, message in (
        ([str(tmp_path / "no.json")], "No such file or directory"),
        ([str(damaged)], "damaged or truncated JSON"),
        ([trace, "--port", str(served.server_port)], "--port: expected a free port, got "),
        ([trace, "--port", "99999"], "--port: expected a free port, got 99999"),
    ):
        assert cli.main(["view", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err
