"""A server of one trace on 127.0.0.1, with a page that shows it in Perfetto.

Perfetto's own page fetches from other origins only what its security policy lists. So a page from
here holds it in a frame and posts the trace to it, by the protocol that Perfetto documents for
dashboards: PING until it answers PONG, then the bytes. Origins on 127.0.0.1 it trusts unasked.
"""

from __future__ import annotations

import html
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

from attn_ext.profile.trace import Trace

PERFETTO = "https://ui.perfetto.dev"

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>html, body, iframe {{ margin: 0; border: 0; width: 100%; height: 100%; }}
body {{ overflow: hidden; }}</style>
<iframe src="{perfetto}" title="Perfetto"></iframe>
<script>
"use strict";
const trace = fetch({path}).then((answer) => answer.arrayBuffer());
const frame = document.querySelector("iframe");
const ping = setInterval(() => frame.contentWindow.postMessage("PING", "*"), 100);
addEventListener("message", async (event) => {{
  if (event.origin !== "{perfetto}" || event.data !== "PONG") return;
  clearInterval(ping);
  if (frame.dataset.done) return;
  frame.dataset.done = "yes";
  const perfetto = {{ buffer: await trace, title: {name}, fileName: {name} }};
  frame.contentWindow.postMessage({{ perfetto }}, "{perfetto}");
}});
</script>
</html>
"""


class Viewer(ThreadingHTTPServer):
    """Serves the page at / and the trace under its name, both to this machine alone.

    Raises:
        TraceError: not a trace.
        OSError: the port is taken or may not be used.
    """

    daemon_threads = True

    def __init__(self, path: Path, port: int = 9001) -> None:
        Trace.load(path)
        self.trace = path
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    @property
    def path(self) -> str:
        """Where the trace is."""
        return "/" + quote(self.trace.name)

    @property
    def page(self) -> bytes:
        text = _PAGE.format(
            title=html.escape(f"{self.trace.name} in Perfetto"),
            perfetto=PERFETTO,
            path=_script(self.path),
            name=_script(self.trace.name),
        )
        return text.encode()


class _Handler(BaseHTTPRequestHandler):
    server: Viewer

    def do_GET(self) -> None:
        # A name that someone points at 127.0.0.1 would make this server part of their site.
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if host not in ("127.0.0.1", "localhost"):
            self.send_error(403, "Expected a request to 127.0.0.1")
        elif self.path == "/":
            self._send(self.server.page, "text/html; charset=utf-8")
        elif self.path == self.server.path:
            self._send(self.server.trace.read_bytes(), "application/octet-stream")
        else:
            self.send_error(404)

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        # For Perfetto's own ?url=, which its policy allows on port 9001.
        self.send_header("Access-Control-Allow-Origin", PERFETTO)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the terminal has the address."""


def _script(text: str) -> str:
    """A string of JavaScript that cannot end the element it stands in."""
    return json.dumps(text).replace("<", "\\u003c")
