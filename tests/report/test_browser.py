"""The page in a browser: nothing in its console, a table sorted by a click, no part wider than a phone."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.report.runs import HOSTILE, optimized, trained
from twofour import measure, report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECONDS = 60.0
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Runs a program whose descriptors 3 and 4 are the ends of two pipes."""


class Browser:
    """Chromium, driven by its own protocol over two pipes: messages of JSON that end in NUL."""

    def __init__(self, folder: Path) -> None:
        (theirs_in, self.write), (self.read, theirs_out) = os.pipe(), os.pipe()
        words = [CHROMIUM or "", *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        started = [sys.executable, "-c", START, str(theirs_in), str(theirs_out), *words]
        environment = {**os.environ, "HOME": str(folder)}
        self.process = subprocess.Popen(
            started, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL, env=environment
        )
        os.close(theirs_in), os.close(theirs_out)
        self.numbers, self.left, self.events = itertools.count(1), b"", list[dict[str, Any]]()
        self.session: str | None = None

    def begin(self) -> None:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **given: Any) -> dict[str, Any]:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": given}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            found = self.next()
            if found.get("id") == number:
                assert "error" not in found, found
                return found["result"]
            self.events.append(found)

    def next(self) -> dict[str, Any]:
        while b"\0" not in self.left:
            assert select.select([self.read], [], [], SECONDS)[0], "the browser does not answer"
            part = os.read(self.read, 1 << 20)
            assert part, "the browser ended"
            self.left += part
        message, _, self.left = self.left.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, width: int, *, dark: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self.ask("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.next())

    def value(self, script: str) -> Any:
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        script = f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
        script += " e.scrollIntoView({block: 'center', behavior: 'instant'}); const r = e.getBoundingClientRect();"
        x, y = self.value(f"{script} return [r.x + r.width / 2, r.y + r.height / 2]; }})()")
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def complaints(self) -> list[Any]:
        """What the console and the log say, and every request but that for the page."""
        self.value("1")
        methods = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        said = [event for event in self.events if event.get("method") in methods]
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return said + [url for url in asked if not url.startswith(("file:", "data:"))]

    def printed(self) -> Any:
        """Print the page, and return what `window.told` is then."""
        self.ask("Page.printToPDF")
        return self.value("window.told")

    def picture(self, path: Path) -> None:
        found = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.write), os.close(self.read)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with closing(Browser(tmp_path_factory.mktemp("browser"))) as found:
        found.begin()
        yield found


SORTED = "[...document.querySelectorAll('#layers tbody tr')].map(row => row.cells[0].textContent)"


def test_the_page_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    page = report.write(report.read(optimized(tmp_path / "run", HOSTILE)), tmp_path / "report.html")
    for width, dark in ((1200, False), (390, True)):
        browser.open(page, width, dark=dark)
        assert browser.complaints() == []
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert browser.value("getComputedStyle(document.body).backgroundColor") == (
            "rgb(16, 20, 18)" if dark else "rgb(246, 246, 242)"
        )
        before = browser.value(SORTED)
        browser.click("#layers th:nth-child(6) button")  # sparse ms: as the layers stand
        assert browser.value(SORTED) == before and browser.value(head(6)) == "ascending"
        browser.click("#layers th:nth-child(6) button")
        assert browser.value(SORTED) == before[::-1] and browser.value(head(6)) == "descending"
        browser.click("#layers th:nth-child(1) button")
        after = browser.value(SORTED)
        assert after != before[::-1] and sorted(after) == sorted(before)
        assert (browser.value(head(1)), browser.value(head(6))) == ("ascending", "none")
        assert browser.complaints() == []
        browser.picture(tmp_path / f"{width}.png")
        assert (tmp_path / f"{width}.png").read_bytes()[:4] == b"\x89PNG"


A4 = 718
"""Pixels of CSS between the margins of a sheet, 1 cm each."""
SHOWN = "[...document.querySelectorAll('details table')].map(table => table.checkVisibility())"
TOLD = """addEventListener("beforeprint", () => {
  window.told = document.querySelectorAll("details:not([open])").length;
})"""


def test_what_is_folded_is_open_on_paper_and_folded_again(browser: Browser, tmp_path: Path) -> None:
    measure.write_json(tmp_path / "training.json", trained())
    curves = report.read(tmp_path / "training.json").curves
    page = report.write(replace(report.read(optimized(tmp_path / "run")), curves=curves), tmp_path / "report.html")
    for width in (1200, 390):
        browser.open(page, width)
        assert not any(browser.value(SHOWN))
        browser.ask("Emulation.setEmulatedMedia", media="print")
        shown = browser.value(SHOWN)
        assert len(shown) > 2 and all(shown)
        browser.picture(tmp_path / f"print-{width}.png")
        browser.ask("Emulation.setDeviceMetricsOverride", width=A4, height=1123, deviceScaleFactor=1, mobile=False)
        assert browser.value("document.documentElement.scrollWidth") <= A4, "a table is wider than the paper"
        browser.ask("Emulation.setEmulatedMedia", media="")
        browser.value(TOLD)
        assert browser.printed() == 0  # closed parts, once the page's own script has heard of it
        assert not any(browser.value(SHOWN)) and browser.complaints() == []


def head(column: int) -> str:
    return f"document.querySelector('#layers th:nth-child({column})').getAttribute('aria-sort')"
