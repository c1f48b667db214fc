"""A report in Chromium: quiet, offline, within its width, for every hand, and as it looked before.

    python -m pytest tests/test_report_browser.py             # needs playwright, pillow, chromium
    RENEW=1 python -m pytest tests/test_report_browser.py     # takes the screenshots anew

Look at tests/screenshots after renewing them.
"""

from __future__ import annotations

import io
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import traces
from report_pages import cpu_trace, run_folder, sweep_folder

from attn_ext.profile import report, viewer

pytestmark = pytest.mark.browser

SCREENSHOTS = Path(__file__).parent / "screenshots"
SIZES = {"desk": (1280, 860), "phone": (390, 844)}
#: Of 255: what two pictures may differ by on average in a square of 32 pixels. A bar of another
#: colour makes more, a word that is missing much more.
TOLERANCE = 16


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("needs playwright: pip install playwright pillow; or run -m 'not browser'")
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)  # None is playwright's own
    with sync_playwright() as api:
        try:
            chromium = api.chromium.launch(executable_path=program, args=["--no-sandbox"])
        except Exception as error:
            pytest.fail(f"needs Chromium: apt install chromium; or run -m 'not browser': {error}")
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports by name: of a run, of a sweep, of a trace without a device."""
    folder = tmp_path_factory.mktemp("pages")
    sources = {
        "run": run_folder(folder / "a run"),
        "sweep": sweep_folder(folder / "a sweep"),
        "cpu": cpu_trace(folder / "cpu.json"),
    }
    for name, source in sources.items():
        (folder / f"{name}.html").write_text(report.html(report.load([source])), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in sources}


class Visit:
    """A page that was opened, and everything that it said and asked for."""

    def __init__(
        self, browser: Any, address: str, size: str = "desk", theme: str = "light", **more: Any
    ) -> None:
        width, height = SIZES[size]
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme,
            reduced_motion="reduce", **more,
        )  # fmt: skip
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *error: object) -> None:
        self.context.close()

    def overflow(self) -> float:
        """Pixels by which the page is wider than the window."""
        width = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert isinstance(width, (int, float))
        return width


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["run", "sweep", "cpu"])
def test_the_page_is_quiet_offline_and_fits(
    browser: Any, pages: dict[str, Path], name: str, size: str, theme: str
) -> None:
    address = pages[name].as_uri()
    with Visit(browser, address, size, theme) as visit:
        look_the_same(visit, f"{name}-{size}-{theme}")
        assert visit.overflow() <= 0
        visit.page.evaluate("for (const one of document.querySelectorAll('details')) {"
                            "one.removeAttribute('name'); one.open = true; }")  # fmt: skip
        assert visit.overflow() <= 0, "nor with everything open"
        assert visit.asked == [address] and visit.said == []


def look_the_same(visit: Visit, name: str) -> None:
    """Compares a screenshot, a quarter of its size, with the one in the repository."""
    from PIL import Image, ImageChops

    with Image.open(io.BytesIO(visit.page.screenshot(full_page=True))) as picture:
        small = picture.convert("RGB").reduce(4)
    path = SCREENSHOTS / f"{name}.png"
    if os.environ.get("RENEW"):
        SCREENSHOTS.mkdir(exist_ok=True)
        small.quantize(64).save(path, optimize=True)
        return
    with Image.open(path) as before:
        old = before.convert("RGB")
    assert abs(old.height - small.height) <= 0.03 * old.height and old.width == small.width, (
        f"{name} was {old.size} and is {small.size}: look at it, then renew"
    )
    size = (old.width, min(old.height, small.height))
    difference = ImageChops.difference(old.crop((0, 0, *size)), small.crop((0, 0, *size)))
    worst = max(high for _, high in difference.reduce(8).getextrema())
    assert worst <= TOLERANCE, f"{name} differs by up to {worst}: look at it, then renew"


def test_a_mouse_a_finger_and_a_keyboard_reach_the_definitions(
    browser: Any, pages: dict[str, Path]
) -> None:
    meaning = "sum of a call's device events"
    with Visit(browser, pages["run"].as_uri(), has_touch=True) as visit:
        tip = visit.page.locator("#tip")
        head = visit.page.get_by_role("button", name="GPU us", exact=True)
        assert not tip.is_visible()
        head.hover()
        assert tip.is_visible() and tip.inner_text() == meaning
        visit.page.mouse.move(2, 2)
        assert not tip.is_visible()
        visit.page.locator("td").first.tap()
        assert tip.inner_text().startswith("kernels of naive: ")
        visit.page.locator("h1").tap()
        assert not tip.is_visible()
        head.focus()
        assert tip.inner_text() == meaning
        visit.page.keyboard.press("Escape")
        assert not tip.is_visible()
        assert visit.page.locator("[title]").count() == 0, "no second tooltip of the browser's"
        visit.page.locator(".timeline .box.copy rect").hover()
        assert tip.inner_text() == "Memcpy DtoD (Device -> Device)\n130.5 us\n268,435,456 bytes"


def test_the_timeline_zooms(browser: Any, pages: dict[str, Path]) -> None:
    with Visit(browser, pages["run"].as_uri(), "phone") as visit:
        picture, pan = visit.page.locator(".timeline").first, visit.page.locator(".pan").first
        whole = picture.bounding_box()["width"]
        for _ in range(3):
            visit.page.get_by_role("button", name="zoom in").first.click()
        assert picture.bounding_box()["width"] == pytest.approx(8 * whole)
        assert pan.evaluate("e => e.scrollLeft") == pytest.approx(3.5 * whole, abs=2)
        assert visit.page.locator(".timeline .fine").first.is_visible()
        assert visit.overflow() <= 0
        visit.page.get_by_role("button", name="whole step").first.click()
        assert picture.bounding_box()["width"] == pytest.approx(whole) and visit.said == []


def test_a_call_lights_up_what_it_started(browser: Any, pages: dict[str, Path]) -> None:
    with Visit(browser, pages["run"].as_uri()) as visit:
        visit.page.locator(".timeline .box.copy rect").hover()
        lit = visit.page.locator(".hot")
        assert lit.count() == 3, "the copy, its call and the line between them"


def test_without_script_everything_is_there(browser: Any, pages: dict[str, Path]) -> None:
    with Visit(browser, pages["run"].as_uri(), java_script_enabled=False) as visit:
        assert visit.page.locator("td[title]").count() >= 16
        assert visit.page.locator(".timeline title").count() >= 14
        assert visit.page.locator(".zoom").first.is_hidden()
        assert visit.page.get_by_text("618.9").first.is_visible()


def test_perfetto_gets_the_trace(browser: Any, tmp_path: Path) -> None:
    """A page in Perfetto's place answers as its documentation says and keeps what it is sent."""
    perfetto = """<script>addEventListener("message", ({data, origin, source}) => {
        if (data === "PING") source.postMessage("PONG", origin);
        else document.title = [origin, data.perfetto.title, data.perfetto.fileName,
                               new TextDecoder().decode(data.perfetto.buffer)].join("|");
    });</script>"""
    trace = traces.write(tmp_path / "a <b>'trace%\".json", *traces.naive_step(1, 0.0))
    with viewer.Viewer(trace, 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        context = browser.new_context()
        context.route(
            "https://ui.perfetto.dev/**",
            lambda route: route.fulfill(body=perfetto, content_type="text/html"),
        )
        page = context.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.goto(server.address)
        frame = next(frame for frame in page.frames if "perfetto" in frame.url)
        frame.wait_for_function("document.title !== ''")
        origin, title, name, content = frame.evaluate("document.title").split("|", 3)
        context.close()
        server.shutdown()
    assert origin == server.address.rstrip("/") and title == name == trace.name
    assert content == trace.read_text() and said == []
