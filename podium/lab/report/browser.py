"""A report as a reader sees it: opened in a real browser, on a wide and on a narrow screen and on paper.

Chromium is started without a window and spoken to over two pipes (its DevTools protocol: JSON objects that end in a
zero byte), so nothing listens on a port and no driver is needed. Names of hosts are not resolved, so whatever a page
asks for, nothing leaves the machine. Every wait ends at a deadline.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.errors import ConfigError, PodiumError

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = (1280, 390)
"""Of the screens that a page is looked at, in pixels: a laptop's and a telephone's."""
DEADLINE_S = 60.0
"""For the browser to start, and for one page with all its views."""

_OPTIONS = (
    "--headless",
    "--no-sandbox",  # without it, it starts neither as root nor in most containers
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--no-default-browser-check",
    "--no-first-run",
    "--remote-debugging-pipe",
)
_ONTO_PIPES = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""Chromium reads commands from descriptor 3 and answers on 4."""
_OWN = ("data:", "blob:", "about:")
"""Addresses that ask nobody."""
_CLOSING_S = 5.0
_HEIGHT = 900
_LONGEST = 12_000
"""A picture's height in pixels, at most."""
PAPER = 717
"""Pixels between the margins of an A4 page."""
_SHRINKS = 1.5
"""A page that is wider than paper is printed smaller, down to one part in so many; what is wider still is cut off."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A page at one width, or on paper."""

    width: int
    overflow_px: int
    """By how much the page is wider than its screen, so that it has to be pushed to and fro."""
    wide: tuple[str, ...]
    """What sticks out, as `tag.class: text`."""
    figures: int
    empty: tuple[str, ...]
    """Captions of figures in which nothing is drawn."""
    plots: int
    """Figures that a script has drawn and that can be seen."""
    drawings: int
    """Figures that were drawn beforehand and can be seen."""
    cut: tuple[str, ...]
    """Labels that reach beyond their figure's edge."""
    characters: int
    """Of text that can be seen."""

    def problems(self, place: str) -> list[str]:
        found = [f"{place}: nothing is drawn in the figure {name!r}" for name in self.empty]
        found += [f"{place}: a label is cut: {text!r}" for text in self.cut]
        return found if self.characters else [*found, f"{place}: no text"]


@dataclass(frozen=True, kw_only=True)
class Page:
    """What came of opening a page."""

    path: Path
    errors: tuple[str, ...]
    """Messages of level error in the console, and exceptions that nobody caught."""
    requests: tuple[str, ...]
    """Addresses that the page asked for, other than its own."""
    screens: Mapping[int, View]
    """By width."""
    paper: View
    pdf_pages: int
    pdf_has_text: bool

    def problems(self) -> list[str]:
        """What a reader would stumble over; empty when nothing."""
        found = [f"console: {text}" for text in self.errors]
        found += [f"asks for {address}" for address in self.requests]
        for width, view in self.screens.items():
            if view.overflow_px > 0:
                found.append(f"{width} px: {view.overflow_px} px too wide: {'; '.join(view.wide) or 'unknown'}")
            found += view.problems(f"{width} px")
        if self.paper.width + self.paper.overflow_px > _SHRINKS * self.paper.width:
            found.append(f"paper: cut off at the right: {'; '.join(self.paper.wide) or 'unknown'}")
        found += self.paper.problems("paper")
        if not self.pdf_pages or not self.pdf_has_text:
            found.append(f"PDF: {self.pdf_pages} pages, {'with' if self.pdf_has_text else 'without'} text")
        return found


def check_report(path: str | Path) -> list[str]:
    """What is wrong with a page in a browser; empty when nothing. Takes some seconds.

    Raises ConfigError where no browser is installed or no such file is.
    """
    return check_page(path).problems()


def check_page(path: str | Path, *, pictures: Path | None = None) -> Page:
    """Open a local HTML file in a browser of its own; see `Browser.open`."""
    with Browser() as browser:
        return browser.open(path, pictures=pictures)


def find_browser() -> str | None:
    """The path of a Chromium, or None where there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Browser:
    """A running Chromium without a window; a context manager, which ends it."""

    def __init__(self, program: str | None = None, *, deadline_s: float = DEADLINE_S) -> None:
        program = program or find_browser()
        if program is None:
            raise ConfigError(f"browser: one of {', '.join(PROGRAMS)} must be installed to look at a page, got none")
        self._deadline_s = deadline_s
        self._profile = tempfile.TemporaryDirectory(prefix="podium-browser-", ignore_cleanup_errors=True)
        self._said = Path(self._profile.name) / "stderr"
        self.process, self._commands, self._answers = _start(program, self._profile.name, self._said)
        self._buffer, self._number = bytearray(), 0
        self._events: list[dict[str, Any]] = []
        self._until = time.monotonic() + deadline_s
        try:
            self._call("Browser.getVersion")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and all that it has started; what it left on disk goes, too."""
        for descriptor in (self._commands, self._answers):
            with suppress(OSError):
                os.close(descriptor)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its own group, see _start
        self.process.wait(timeout=self._deadline_s)
        self._profile.cleanup()

    def open(self, path: str | Path, *, widths: Sequence[int] = WIDTHS, pictures: Path | None = None) -> Page:
        """Load a local HTML file and look at it at these widths and on paper.

        `pictures`: a folder for what was seen: `WIDTH.png`, `WIDTH-dark.png` and `paper.pdf`.
        """
        path = Path(path).resolve()
        if not path.is_file():
            raise ConfigError(f"browser: an HTML file must be there, got {path}")
        self._until = time.monotonic() + self._deadline_s
        self._events.clear()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        try:
            tab = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            return self._look(tab, path, widths, pictures)
        finally:
            self._until = time.monotonic() + _CLOSING_S
            with suppress(PodiumError):  # what went wrong before says more
                self._call("Target.closeTarget", targetId=target)

    def _look(self, tab: str, path: Path, widths: Sequence[int], pictures: Path | None) -> Page:
        for room in ("Runtime", "Log", "Network", "Page"):
            self._call(f"{room}.enable", tab)
        self._resize(tab, widths[0])
        went = self._call("Page.navigate", tab, url=path.as_uri())
        if went.get("errorText"):
            raise PodiumError(f"browser: {path} must open, got {went['errorText']}")
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._take()
        screens = {width: self._screen(tab, width, pictures) for width in widths}
        self._call("Emulation.setEmulatedMedia", tab, media="print")
        self._resize(tab, PAPER)
        paper = self._view(tab, PAPER)
        self._call("Emulation.setEmulatedMedia", tab, media="")
        a4 = {"paperWidth": 8.27, "paperHeight": 11.69}
        pdf = base64.b64decode(self._call("Page.printToPDF", tab, printBackground=True, **a4)["data"])
        if pictures is not None:
            (pictures / "paper.pdf").write_bytes(pdf)
        return Page(
            path=path,
            errors=tuple(_errors(self._events)),
            requests=tuple(_foreign(self._events, path.as_uri())),
            screens=screens,
            paper=paper,
            pdf_pages=len(re.findall(rb"/Type\s*/Page\b", pdf)),
            pdf_has_text=_has_text(pdf),
        )

    def _screen(self, tab: str, width: int, pictures: Path | None) -> View:
        self._resize(tab, width)
        view = self._view(tab, width)
        if pictures is not None:
            pictures.mkdir(parents=True, exist_ok=True)
            self._picture(tab, width, pictures / f"{width}.png")
            dark = [{"name": "prefers-color-scheme", "value": "dark"}]
            self._call("Emulation.setEmulatedMedia", tab, features=dark)
            self._settle(tab)
            self._picture(tab, width, pictures / f"{width}-dark.png")
            self._call("Emulation.setEmulatedMedia", tab, features=[])
        return view

    def _picture(self, tab: str, width: int, path: Path) -> None:
        """All of the page, from its top to its end."""
        size = self._call("Page.getLayoutMetrics", tab)["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": width, "height": min(size["height"], _LONGEST), "scale": 1}
        data = self._call("Page.captureScreenshot", tab, captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def _resize(self, tab: str, width: int) -> None:
        size = {"width": width, "height": _HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", tab, **size)
        self._settle(tab)

    def _settle(self, tab: str) -> None:
        """Wait until scripts have drawn what they draw after a change of size; plotly waits 100 ms for the next one."""
        wait = "document.querySelector('.js-plotly-plot') ? 250 : 30"
        self._evaluate(tab, f"new Promise(done => setTimeout(() => requestAnimationFrame(() => done(0)), {wait}))")

    def _view(self, tab: str, width: int) -> View:
        seen = self._evaluate(tab, _SEEN)
        seen |= {name: tuple(seen[name]) for name in ("wide", "empty", "cut")}
        return View(width=width, **seen)

    def _evaluate(self, tab: str, script: str) -> Any:
        answer = self._call("Runtime.evaluate", tab, expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise PodiumError(f"browser: a look at the page must not fail, got {_told(answer['exceptionDetails'])}")
        return answer["result"].get("value")

    # The protocol.

    def _call(self, method: str, tab: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if tab is not None:
            message["sessionId"] = tab
        try:
            os.write(self._commands, json.dumps(message).encode() + b"\0")
        except BrokenPipeError:
            raise self._gone() from None
        while True:
            answer = self._take()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise PodiumError(f"browser: {method} must succeed, got {answer['error'].get('message')}")
                return dict(answer["result"])

    def _take(self) -> dict[str, Any]:
        """The next message; events are kept."""
        while (end := self._buffer.find(0)) < 0:
            left = self._until - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise PodiumError(f"browser: it must answer within {self._deadline_s:g} s, got nothing more")
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise self._gone()
            self._buffer += data
        message: dict[str, Any] = json.loads(self._buffer[:end])
        del self._buffer[: end + 1]
        if "method" in message:
            self._events.append(message)
        return message

    def _gone(self) -> PodiumError:
        said = (
            self._said.read_text(encoding="utf-8", errors="replace").strip().splitlines() if self._said.exists() else []
        )
        return PodiumError(f"browser: it must stay until it is closed, got its end: {' '.join(said[-3:]) or 'no word'}")


def _start(program: str, profile: str, said: Path) -> tuple[subprocess.Popen[bytes], int, int]:
    """Start it in a process group of its own; the process, and the ends of its pipes that are ours.

    It ends by itself when these are closed, so also when this process is killed.
    """
    theirs_in, commands = os.pipe()
    answers, theirs_out = os.pipe()
    given = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]  # above 3 and 4
    words = [sys.executable, "-c", _ONTO_PIPES, *map(str, given), program, *_OPTIONS, f"--user-data-dir={profile}"]
    try:
        with said.open("wb") as errors:
            process = subprocess.Popen(
                [*words, "about:blank"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=given,
                start_new_session=True,
            )
    finally:
        for descriptor in (theirs_in, theirs_out, *given):
            os.close(descriptor)
    return process, commands, answers


def _errors(events: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for event in events:
        params = event["params"]
        if event["method"] == "Runtime.exceptionThrown":
            found.append(_told(params["exceptionDetails"]))
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            found.append(" ".join(str(one.get("value", one.get("description", ""))) for one in params["args"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            found.append(params["entry"]["text"])
    return list(dict.fromkeys(found))


def _told(details: Mapping[str, Any]) -> str:
    """An exception in a line."""
    text = details.get("exception", {}).get("description") or details.get("text", "an exception")
    return str(text).splitlines()[0]


def _foreign(events: Sequence[Mapping[str, Any]], own: str) -> list[str]:
    """What was asked for, whether or not it was answered, but for the page itself."""
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return list(dict.fromkeys(url for url in asked if url.partition("#")[0] != own and not url.startswith(_OWN)))


def _has_text(pdf: bytes) -> bool:
    """Whether any page shows glyphs, not lines alone."""
    for found in re.finditer(rb"stream\r?\n", pdf):
        with suppress(zlib.error):
            if re.search(rb"\bT[jJ]\b", zlib.decompressobj().decompress(pdf[found.end() :])):
                return True
    return False


_SEEN = """(() => {
  const root = document.documentElement, edge = root.clientWidth;
  const box = element => element.getBoundingClientRect();
  const shown = element => element.checkVisibility() && box(element).width > 1 && box(element).height > 1;
  const held = element => {
    for (let one = element.parentElement; one && one !== root; one = one.parentElement)
      if (one !== document.body && getComputedStyle(one).overflowX !== "visible") return true;
    return false;
  };
  const told = element => element.tagName.toLowerCase() + [...element.classList].map(name => "." + name).join("") + ": "
    + (element.textContent || "").trim().replace(/\\s+/g, " ").slice(0, 60);
  const wide = [...document.body.querySelectorAll("*")].filter(e => shown(e) && box(e).right > edge + 1 && !held(e));
  const figures = [...document.querySelectorAll("figure")];
  const pictures = figure => [...figure.querySelectorAll("svg, canvas, img")].filter(shown);
  const isCut = text => {
    let svg = text.ownerSVGElement;
    while (svg.ownerSVGElement) svg = svg.ownerSVGElement;
    const a = box(text), b = box(svg);
    return a.left < b.left - 1.5 || a.right > b.right + 1.5 || a.top < b.top - 1.5 || a.bottom > b.bottom + 1.5;
  };
  const labels = [...document.querySelectorAll("figure svg text")].filter(text => shown(text) && isCut(text));
  const caption = figure => (figure.querySelector("figcaption") || figure).textContent.trim();
  return {
    overflow_px: Math.max(0, Math.round(root.scrollWidth - edge)),
    wide: wide.slice(0, 5).map(told),
    figures: figures.length,
    empty: figures.filter(figure => shown(figure) && !pictures(figure).length).map(caption),
    plots: [...document.querySelectorAll("figure .js-plotly-plot, figure.js-plotly-plot")].filter(
      plot => shown(plot) && plot.querySelector(".main-svg")).length,
    drawings: [...document.querySelectorAll("figure .paper svg")].filter(shown).length,
    cut: labels.slice(0, 8).map(text => text.textContent.trim()),
    characters: document.body.innerText.trim().length,
  };
})()"""
