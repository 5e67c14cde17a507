"""Checks a report in a real browser, on a wide screen, on a narrow screen and on paper.

Playwright drives the system's Chromium. Host names are not resolved, so no request leaves the machine. Every wait has a
deadline.
"""

from __future__ import annotations

import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import ConfigError, MissingExtra, PodiumError

if TYPE_CHECKING:
    from playwright.sync_api import Page as Tab

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = (1280, 390)
"""Screen widths to check, in pixels: a laptop's and a phone's."""
DEADLINE_S = 60.0
"""For the start of the browser, and for each evaluation in a page."""

_OPTIONS = (
    "--no-sandbox",  # with the sandbox, Chromium starts neither as root nor in most containers
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
_OWN = ("data:", "blob:", "about:")
"""Addresses that cause no network request."""
_HEIGHT = 900
_LONGEST = 12_000
"""The greatest height of a screenshot, in pixels."""
PAPER = 717
"""Pixels between the margins of an A4 page."""
_MARGIN = "0.4in"
_SETTLE = (
    "await new Promise(done => setTimeout(() => requestAnimationFrame(done), "
    "document.querySelector('.js-plotly-plot') ? 250 : 30))"
)
"""Waits until scripts have redrawn after a resize: plotly waits 100 ms for another resize."""
_SHRINKS = 1.5
"""Chromium shrinks a page wider than the paper down to 1 / 1.5 of its size, and cuts off the rest."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A page at one width, or on paper."""

    width: int
    overflow_px: int
    """By how much the page is wider than its screen."""
    wide: tuple[str, ...]
    """Elements beyond the right edge, as `tag.class: text`."""
    figures: int
    empty: tuple[str, ...]
    """Captions of empty figures."""
    plots: int
    """Visible figures drawn by plotly's script."""
    drawings: int
    """Visible figures embedded as SVG."""
    cut: tuple[str, ...]
    """Labels beyond their figure's edge."""
    characters: int
    """Of visible text."""

    def problems(self, place: str) -> list[str]:
        found = [f"{place}: nothing is drawn in the figure {name!r}" for name in self.empty]
        found += [f"{place}: a label is cut: {text!r}" for text in self.cut]
        return found if self.characters else [*found, f"{place}: no text"]


@dataclass(frozen=True, kw_only=True)
class Page:
    """What the browser found on a page."""

    path: Path
    errors: tuple[str, ...]
    """Console messages of level error, and uncaught exceptions."""
    requests: tuple[str, ...]
    """Addresses that the page requested, other than its own."""
    screens: Mapping[int, View]
    """By width."""
    paper: View
    pdf_pages: int
    pdf_has_text: bool

    def problems(self) -> list[str]:
        """What is wrong with the page, one line each; empty if nothing."""
        found = [f"console: {text}" for text in self.errors]
        found += [f"requests {address}" for address in self.requests]
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
    """What is wrong with a page in a browser; empty if nothing. Takes some seconds.

    Raises ConfigError if playwright, a browser or the file is missing.
    """
    return check_page(path).problems()


def check_page(path: str | Path, *, pictures: Path | None = None) -> Page:
    """Open a local HTML file in a new browser; see `Browser.open`."""

    def look() -> Page:
        with Browser() as browser:
            return browser.open(path, pictures=pictures)

    with ThreadPoolExecutor(1) as thread:  # Playwright refuses a thread with a running event loop, such as Jupyter's
        return thread.submit(look).result()


def find_browser() -> str | None:
    """The path of a Chromium, or None."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Browser:
    """A headless Chromium; as a context manager it closes at the end."""

    def __init__(self, program: str | None = None, *, deadline_s: float = DEADLINE_S) -> None:
        try:
            from playwright.sync_api import Error, sync_playwright
        except ImportError:
            raise MissingExtra("playwright", "check", "looking at a page in a browser") from None
        program = program or find_browser()
        if program is None:
            raise ConfigError(f"browser: one of {', '.join(PROGRAMS)} must be installed to look at a page, got none")
        self._deadline_ms, self._error = deadline_s * 1e3, Error
        self._playwright = sync_playwright().start()
        try:
            with self._told("it must start"):
                self._browser = self._playwright.chromium.launch(
                    executable_path=program, args=_OPTIONS, timeout=self._deadline_ms
                )
        except BaseException:
            self._playwright.stop()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser with its child processes and temporary files."""
        with suppress(self._error):  # it may have ended already
            self._browser.close()
        self._playwright.stop()

    def open(self, path: str | Path, *, widths: Sequence[int] = WIDTHS, pictures: Path | None = None) -> Page:
        """Load a local HTML file and check it at these widths and on paper.

        `pictures`: a folder for screenshots: `WIDTH.png`, `WIDTH-dark.png` and `paper.pdf`.
        """
        path = Path(path).resolve()
        if not path.is_file():
            raise ConfigError(f"browser: the page must be an existing HTML file, got {path}")
        with self._told(f"{path} must open"), self._browser.new_context() as context:
            tab = context.new_page()
            tab.set_default_timeout(self._deadline_ms)
            return _look(tab, path, widths, pictures)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Turn Playwright's errors into ours, with the browser's own error output."""
        try:
            yield
        except self._error as error:
            said = re.findall(r"\[err\] (.*)", error.message)
            raise PodiumError(f"browser: {what}, got {' '.join(said[-3:]) or error.message.splitlines()[0]}") from error


def _look(tab: Tab, path: Path, widths: Sequence[int], pictures: Path | None) -> Page:
    errors, asked = _listen(tab)
    tab.set_viewport_size({"width": widths[0], "height": _HEIGHT})
    tab.goto(path.as_uri())
    screens = {width: _screen(tab, width, pictures) for width in widths}
    tab.emulate_media(media="print")
    paper = _view(tab, PAPER)
    tab.emulate_media(media="null")
    margin = dict.fromkeys(("top", "right", "bottom", "left"), _MARGIN)
    pdf = tab.pdf(print_background=True, format="A4", margin=margin)  # type: ignore[arg-type]  # a TypedDict of these
    if pictures is not None:
        (pictures / "paper.pdf").write_bytes(pdf)
    own = path.as_uri()
    foreign = (url for url in asked if url.partition("#")[0] != own and not url.startswith(_OWN))
    return Page(
        path=path,
        errors=tuple(dict.fromkeys(errors)),
        requests=tuple(dict.fromkeys(foreign)),
        screens=screens,
        paper=paper,
        pdf_pages=len(re.findall(rb"/Type\s*/Page\b", pdf)),
        pdf_has_text=_has_text(pdf),
    )


def _listen(tab: Tab) -> tuple[list[str], list[str]]:
    """Two lists that fill while the page runs: errors in the console, and requested addresses."""
    errors: list[str] = []
    asked: list[str] = []
    tab.on("pageerror", lambda error: errors.append(f"{error.name}: {error.message}".splitlines()[0]))
    tab.on("console", lambda said: errors.append(said.text) if said.type in ("error", "assert") else None)
    tab.on("request", lambda request: asked.append(request.url))
    return errors, asked


def _screen(tab: Tab, width: int, pictures: Path | None) -> View:
    view = _view(tab, width)
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        for scheme, name in (("light", f"{width}.png"), ("dark", f"{width}-dark.png")):
            tab.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]  # one of its literals
            height = min(int(_ask(tab, "document.documentElement.scrollHeight")), _LONGEST)
            clip: Any = {"x": 0, "y": 0, "width": width, "height": height}
            tab.screenshot(path=pictures / name, full_page=True, clip=clip)
        tab.emulate_media(color_scheme="light")
    return view


def _view(tab: Tab, width: int) -> View:
    tab.set_viewport_size({"width": width, "height": _HEIGHT})
    seen = _ask(tab, _SEEN)
    seen |= {name: tuple(seen[name]) for name in ("wide", "empty", "cut")}
    return View(width=width, **seen)


def _ask(tab: Tab, script: str) -> Any:
    """A script's value once the page has settled. `Page.evaluate` has no deadline, so a page that hangs would block it.

    The wait uses the page's own timer, so the page's other scripts have run before, even on a busy machine.
    """
    return tab.wait_for_function(f"async () => {{ {_SETTLE}; return {{value: {script}}}; }}").json_value()["value"]


def _has_text(pdf: bytes) -> bool:
    """Whether any page shows glyphs, not just lines."""
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
