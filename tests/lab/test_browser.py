"""Reports in a real browser: on a wide and a narrow screen and on paper."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from podium.errors import ConfigError, MissingExtra, PodiumError
from podium.lab.report.browser import PAPER, WIDTHS, Browser, check_report, find_browser
from podium.lab.report.report import write_report
from podium.lab.sweeps import sweep
from tests.lab.synthetic import failed_row, make_rows, phased, stale, write_study

needs_browser = pytest.mark.skipif(
    find_browser() is None or find_spec("playwright") is None, reason="needs Chromium and playwright (podium[check])"
)

TIMES = {"solo": [2.0, 2.1, 2.2], "all-reduce": [1.0, 1.1, 1.05], "parameter-server:mode=async": [0.8, 0.9, 0.85]}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def page(folder: Path, body: str, name: str = "page.html") -> Path:
    path = folder / name
    path.write_text(f"<!doctype html><meta charset=utf-8><body style='margin:0'>{body}", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a comparison with a switch, staleness and a failed run."""
    rows = make_rows(TIMES)
    for row in rows:
        if "async" in row["cell"]:
            row |= {"staleness_by": stale(), **phased(0.5, 0.3, 0.05)}
    folder = tmp_path_factory.mktemp("compared")
    return write_report(write_study(folder, [*rows, failed_row("solo", 3)]).folder)


@needs_browser
class TestReports:
    def test_a_comparison_is_in_order_on_screens_and_on_paper(self, browser: Browser, report: Path) -> None:
        found = browser.open(report)
        assert found.errors == () and found.requests == ()
        for width in WIDTHS:
            view = found.screens[width]
            assert view.overflow_px == 0, view.wide
            assert view.figures > 5 and view.empty == ()
            assert view.plots == view.figures and view.drawings == 0
            assert view.characters > 1000
        assert found.screens[1280].cut == () and found.paper.cut == ()
        assert found.paper.drawings == found.paper.figures == found.screens[1280].figures and found.paper.plots == 0
        assert found.pdf_pages >= 1 and found.pdf_has_text

    def test_a_reader_without_scripts_sees_the_drawings(self, browser: Browser, report: Path, tmp_path: Path) -> None:
        text = report.read_text(encoding="utf-8")
        (tmp_path / "plain.html").write_text(re.sub(r"<script>.*?</script>", "", text, flags=re.S), encoding="utf-8")
        found = browser.open(tmp_path / "plain.html")
        view = found.screens[1280]
        assert (view.plots, view.empty, found.errors) == (0, (), ())
        assert view.drawings == view.figures > 5

    def test_a_sweep_is_in_order_on_screens_and_on_paper(self, browser: Browser, tmp_path: Path) -> None:
        swept = sweep(
            "digits-mlp",
            grid={"lr": [0.1, 0.05]},
            seeds=2,
            steps=20,
            executor="sequential",
            device="cpu",
            out=tmp_path / "a",
        )
        found = browser.open(swept.report)
        assert found.problems() == []
        assert found.paper.drawings == found.paper.figures > 0


@needs_browser
class TestFaults:
    """Each planted fault is found, and a page without any has none."""

    def test_a_plain_page_has_no_problems(self, browser: Browser, tmp_path: Path) -> None:
        drawn = "<figure><figcaption>f</figcaption><svg width=90 height=40><text x=5 y=20>label</text></svg></figure>"
        inner = f"<p>Text.</p>{drawn}<img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='><a href='http://a.invalid/'>a</a>"
        found = browser.open(page(tmp_path, inner + "<script>console.warn('mind'); console.log('hi')</script>"))
        assert found.problems() == []
        assert found.screens[390].figures == 1 and found.pdf_pages == 1

    def test_exceptions_and_messages_of_level_error_are_found(self, browser: Browser, tmp_path: Path) -> None:
        scripts = "<p>Text.</p><script>undefinedName()</script><script>console.error('went', 'wrong')</script>"
        late = "<script>setTimeout(() => { throw new Error('late') }, 20); Promise.reject(new Error('alone'))</script>"
        errors = browser.open(page(tmp_path, scripts + late)).errors
        assert "ReferenceError: undefinedName is not defined" in errors
        assert "went wrong" in errors and "Error: late" in errors and "Error: alone" in errors

    def test_whatever_a_page_asks_for_is_found(self, browser: Browser, tmp_path: Path) -> None:
        (tmp_path / "beside.css").write_text("p { color: red }", encoding="utf-8")
        asks = "<p>Text.</p><img src='http://pictures.invalid/a.png'><link rel=stylesheet href='beside.css'>"
        found = browser.open(page(tmp_path, asks + "<script>fetch('https://data.invalid/x').catch(() => 0)</script>"))
        asked = {address.rpartition("/")[2] for address in found.requests}
        assert asked == {"a.png", "beside.css", "x"}
        assert "requests http://pictures.invalid/a.png" in found.problems()

    def test_a_request_that_the_page_itself_forbids_is_found(self, browser: Browser, tmp_path: Path) -> None:
        rule = "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'\">"
        found = browser.open(page(tmp_path, f"{rule}<p>Text.</p><img src='http://pictures.invalid/a.png'>"))
        assert any("Content Security Policy" in text for text in found.errors)

    def test_what_is_too_wide_cut_or_empty_is_found(self, browser: Browser, tmp_path: Path) -> None:
        wide = f"<table><tr><td style='min-width:{2 * PAPER}px'>wide</table>"
        label = "<svg width=50 height=40><text x=30 y=20>a long label</text></svg>"
        figures = f"<figure><figcaption>nothing</figcaption></figure><figure>{label}</figure>"
        held = f"<div style='overflow-x:auto'><p style='width:{3 * PAPER}px'>held</div>"
        found = browser.open(page(tmp_path, f"{wide}{figures}{held}"))
        assert found.screens[390].overflow_px > 1000
        said = "\n".join(found.problems())
        assert "390 px: " in said and "too wide: table: wide" in said and "held" not in said
        assert "paper: cut off at the right: table: wide" in said
        assert "1280 px: nothing is drawn in the figure 'nothing'" in said
        assert "paper: a label is cut: 'a long label'" in said

    def test_a_page_without_text_is_found(self, browser: Browser, tmp_path: Path) -> None:
        said = browser.open(page(tmp_path, "<svg width=50 height=40><path d='M0 0L9 9' stroke=red /></svg>")).problems()
        assert "1280 px: no text" in said and "PDF: 1 pages, without text" in said

    def test_faults_of_one_page_are_not_told_of_the_next(self, browser: Browser, tmp_path: Path) -> None:
        assert browser.open(page(tmp_path, "<p>Text.</p><script>undefinedName()</script>")).problems()
        assert browser.open(page(tmp_path, "<p>Text.</p>", "next.html")).problems() == []

    def test_pictures_are_left_where_asked_for(self, browser: Browser, tmp_path: Path) -> None:
        browser.open(page(tmp_path, "<p>Text.</p>"), pictures=tmp_path / "seen")
        assert {path.name for path in (tmp_path / "seen").iterdir()} == {
            "1280.png", "1280-dark.png", "390.png", "390-dark.png", "paper.pdf"
        }  # fmt: skip
        assert (tmp_path / "seen" / "390.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / "seen" / "paper.pdf").read_bytes().startswith(b"%PDF")

    def test_a_file_that_is_not_there_is_refused(self, browser: Browser, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="must be an existing HTML file"):
            browser.open(tmp_path / "none.html")


def start(program: Path, deadline_s: float) -> None:
    """In a thread of its own: Playwright allows one session per thread, and the other tests share theirs."""
    pytest.importorskip("playwright")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(Browser, str(program), deadline_s=deadline_s).result()


class TestStarting:
    def test_without_a_browser_the_error_says_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        pytest.importorskip("playwright")
        with pytest.raises(ConfigError, match=r"one of chromium, .* must be installed"):
            check_report(tmp_path / "report.html")

    def test_without_playwright_the_error_names_the_extra(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "playwright.sync_api", None)  # as if it were not installed
        with pytest.raises(MissingExtra, match=r"podium\[check\]"):
            check_report(tmp_path / "report.html")

    def test_a_page_can_be_checked_where_an_event_loop_runs(self, tmp_path: Path) -> None:
        """As in a notebook."""
        if find_browser() is None:
            pytest.skip("needs Chromium")

        async def check() -> list[str]:
            return check_report(page(tmp_path, "<p>Text.</p>"))

        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(lambda: asyncio.run(check())).result() == []

    def test_a_program_that_ends_at_once_is_told_with_its_words(self, tmp_path: Path) -> None:
        program = tmp_path / "browser"
        program.write_text("#!/bin/sh\necho no display >&2\nexit 1\n", encoding="utf-8")
        program.chmod(0o755)
        with pytest.raises(PodiumError, match=r"must start, got .*no display"):
            start(program, 20.0)

    def test_a_program_that_never_answers_is_ended_at_the_deadline(self, tmp_path: Path) -> None:
        program = tmp_path / "browser"
        program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 100\n", encoding="utf-8")
        program.chmod(0o755)
        began = time.monotonic()
        with pytest.raises(PodiumError, match=r"must start, got .*Timeout 1000ms exceeded"):
            start(program, 1.0)
        assert time.monotonic() - began < 10
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)
