from __future__ import annotations

import re
import shlex
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from podium.lab.report.report import write_report
from podium.lab.study.parts import Replications
from podium.lab.study.reproduce import command, python_call
from podium.lab.study.store import Row
from podium.lab.study.study import Study
from tests.lab.synthetic import STRATEGIES, failed_row, make_row, make_rows, phased, stale, write_study

TIMES = dict(zip(STRATEGIES, ([1.0, 1.1, 1.2], [0.8, 0.9, 0.85], [0.5, 0.6, 0.55]), strict=True))
SECTIONS = ["answer", "design", "convergence", "cost", "views", "staleness", "statistics", "runs", "reproduce"]
EMPTY = [name for name in SECTIONS if name != "views"]


class Page(HTMLParser):
    """What a browser without JavaScript would make of the page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.sections: list[str] = []
        self.text = ""
        self._silent = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._silent = tag in ("script", "style")
        named = dict(attrs)
        if tag == "h2":
            self.sections.append(named["id"] or "")
        self.loads += [named[name] or "" for name in ("src", "href", "srcset", "data") if name in named]

    def handle_endtag(self, tag: str) -> None:
        self._silent = False

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.text += data


def without_history(rows: list[Row]) -> list[Row]:
    """Rows that give fewer figures, for tests that look at none."""
    return [{**row, "history": []} for row in rows]


def one_seed() -> list[Row]:
    return without_history([make_row(cell, 0) for cell in STRATEGIES])


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at words and tables only: drawing is most of a report's time."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def page_of(folder: Path, *, include_plotly: bool = False) -> Page:
    return Page(write_report(folder, include_plotly=include_plotly).read_text(encoding="utf-8"))


@pytest.mark.slow
def test_it_reads_without_javascript(tmp_path: Path) -> None:
    write_study(tmp_path, make_rows(TIMES))
    page = page_of(tmp_path)
    assert page.sections == SECTIONS
    assert page.tags.count("table") >= 4 and page.tags.count("svg") >= 10
    assert "Fastest to 0.92" in page.text and "accuracy: parameter-server:mode=async" in page.text
    assert "says nothing about other hardware" in page.text


@pytest.mark.slow
def test_nothing_is_fetched_from_anywhere(tmp_path: Path) -> None:
    write_study(tmp_path, make_rows(TIMES))
    page = page_of(tmp_path, include_plotly=True)
    assert page.loads and all(load.startswith(("#", "results.jsonl")) for load in page.loads)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    own = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert "http://" not in own and "https://" not in own and "@import" not in own and "url(http" not in own
    assert "default-src 'none'" in html


@pytest.mark.slow
def test_plotly_is_put_in_once_and_can_be_left_out(tmp_path: Path) -> None:
    write_study(tmp_path, make_rows(TIMES))
    full = write_report(tmp_path).read_text(encoding="utf-8")
    assert full.count("Plotly.newPlot(screen") == 1 and len(full) > 3_000_000
    small = write_report(tmp_path, include_plotly=False).read_text(encoding="utf-8")
    assert "<script" not in small and len(small) < 1_000_000


@pytest.mark.slow
def test_the_same_study_gives_the_same_bytes_wherever_it_lies(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    rows = [{**row, "run_dir": str(folder / "runs" / f"{i}")} for i, row in enumerate(make_rows(TIMES))]
    store = write_study(folder, rows)
    first = write_report(folder).read_bytes()
    assert first == write_report(folder).read_bytes()
    assert str(folder).encode() not in first
    other = tmp_path / "two"
    other.mkdir()
    for path in (store.study, store.results):
        shutil.copy(path, other)
    moved = other / "results.jsonl"
    moved.write_text(moved.read_text().replace(str(folder), str(other)))
    assert write_report(other).read_bytes() == first


def test_failed_runs_are_visible_with_error_and_folder_and_cannot_inject_markup(tmp_path: Path) -> None:
    error = "RankFailed: rank 1\nValueError: <script>alert(1)</script>"
    write_study(tmp_path, [*without_history(make_rows(TIMES)[:-1]), failed_row(STRATEGIES[-1], 2, error)])
    page = page_of(tmp_path)
    assert "ValueError: <script>alert(1)</script>" in page.text  # as text
    assert "script" not in page.tags
    assert "1 failed" in page.text and "runs/parameter-server:mode=async-2" in page.text


def test_a_study_where_everything_failed_still_has_a_report(tmp_path: Path) -> None:
    write_study(tmp_path, [failed_row(cell, 0) for cell in STRATEGIES], seeds=1)
    page = page_of(tmp_path)
    assert page.sections == EMPTY and "No run finished: 3 failed" in page.text


def test_a_study_without_rows_has_a_report_that_says_so(tmp_path: Path) -> None:
    write_study(tmp_path, [])
    assert "No run has finished yet" in page_of(tmp_path).text


def test_one_seed_is_said_to_have_no_interval(tmp_path: Path) -> None:
    write_study(tmp_path, without_history([make_row(cell, 0) for cell in STRATEGIES]), seeds=1)
    page = page_of(tmp_path)
    assert "there is no interval" in page.text and "one pair: not tested" in page.text


def test_a_regression_is_judged_by_its_error(tmp_path: Path) -> None:
    rows = [make_row(c, s, final=0.1 + 0.01 * s, metric="mae") for c in STRATEGIES for s in range(3)]
    write_study(tmp_path, without_history(rows))
    assert "Final mae: the same for all." in page_of(tmp_path).text


@pytest.mark.slow
def test_values_that_are_not_finite_do_not_break_it(tmp_path: Path) -> None:
    rows = make_rows(TIMES)
    rows[0] |= {"loss": float("nan"), "metrics": {"accuracy": float("nan")}, "history": [{"loss": float("inf")}]}
    write_study(tmp_path, rows)
    assert "nan" in page_of(tmp_path).text


def test_without_drawing_packages_the_tables_remain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    write_study(tmp_path, make_rows(TIMES))
    page = page_of(tmp_path, include_plotly=True)
    assert page.sections == SECTIONS and page.tags.count("table") >= 4 and "svg" not in page.tags


def test_it_says_how_to_run_the_study_again(tmp_path: Path) -> None:
    study = Study.from_dict(write_study(tmp_path, without_history(make_rows(TIMES))).read_study())
    words = shlex.split(command(study) or "")
    assert words[:3] == ["podium", "compare", "digits-mlp"]
    assert [words[i + 1] for i, word in enumerate(words) if word == "--strategy"] == STRATEGIES
    assert words[words.index("--seeds") + 1] == "3" and "epochs=8" in words
    compile(python_call(study), "call", "exec")
    assert "podium compare digits-mlp" in page_of(tmp_path).text


def test_what_the_command_line_cannot_say_is_said_in_python_only(tmp_path: Path) -> None:
    study = Study.from_dict(write_study(tmp_path, []).read_study())
    assert command(replace(study, replications=Replications(least=2, most=2, listed=(3, 5)))) is None
    assert command(replace(study, own_task=True)) is None
    compile(python_call(replace(study, own_task=True)), "call", "exec")


def test_staleness_is_shown_by_worker_and_by_range_where_there_were_updates(tmp_path: Path, no_figures: None) -> None:
    rows = one_seed()
    rows[-1] |= {"staleness_by": stale(2, bound=3, dropped=4)}
    write_study(tmp_path, rows, seeds=1)
    text = page_of(tmp_path).text
    assert text.count("Staleness, parameter-server:mode=async") == 1 and "Staleness, solo" not in text
    for part in ("worker 1", "server 3, range 0", "At most 2 steps", "3 were allowed", "dropped"):
        assert part in text
    assert "bound was not kept" not in text


def test_a_bound_that_was_not_kept_is_said_to_be_broken(tmp_path: Path, no_figures: None) -> None:
    write_study(tmp_path, without_history([make_row(STRATEGIES[-1], 0, staleness_by=stale(2, bound=1))]), seeds=1)
    assert "the bound was not kept" in page_of(tmp_path).text


def test_a_study_without_updates_has_no_tables_of_staleness(tmp_path: Path, no_figures: None) -> None:
    write_study(tmp_path, one_seed(), seeds=1)
    text = page_of(tmp_path).text
    assert "By worker" not in text and "By server and range" not in text


def test_what_happened_in_a_run_is_said_beside_it_and_in_the_answer(tmp_path: Path, no_figures: None) -> None:
    rows = one_seed()
    again = {"server": 3, "source": "snapshot", "took_s": 0.61, "lost_updates": 12}
    rows[-1] |= {"lost": [1, 3], "restored": [again], "dropped": 17}
    rows[-2] |= {"dropped": 1}
    write_study(tmp_path, rows, seeds=1)
    text = page_of(tmp_path).text
    assert "lost rank 1, 3" in text and "restored server 3 from snapshot in 0.61 s, 12 updates lost" in text
    assert "dropped 17 pushes" in text and "dropped 1 push" in text
    assert "1 of 3 finished runs lost ranks on the way (parameter-server:mode=async)" in text


def test_rows_from_before_drops_and_restorations_were_counted_still_read(tmp_path: Path, no_figures: None) -> None:
    rows = [{k: v for k, v in row.items() if k != "lost"} for row in one_seed()]
    write_study(tmp_path, rows, seeds=1)
    assert "lost ranks on the way" not in page_of(tmp_path).text


@pytest.mark.slow
def test_phases_are_told_of_with_switches_cost_figure_and_other_rules(tmp_path: Path) -> None:
    rows = [make_row(STRATEGIES[-1], 0, **phased(None, 0.5, 0.05)), make_row(STRATEGIES[-1], 1, **phased(None, 0.05))]
    write_study(tmp_path, [*without_history(rows[1:]), rows[0]], seeds=2)
    page = page_of(tmp_path)
    assert page.sections == [*EMPTY[:5], "phases", *EMPTY[5:]] and "#phases" in page.loads
    for part in ("all-reduce → parameter-server:mode=async", "settled (plateau: 0.0500, threshold 0.100)", "3.50"):
        assert part in page.text
    rules = page.text[page.text.index("Other rules") :]
    assert "2.50 (2.00 to 3.00)" in rules and "2 of 2" in rules
    assert "rate-decay" in rules and "not fired" in rules and "not measured" in rules


def test_a_run_whose_rule_never_fired_is_told_of_as_such(tmp_path: Path, no_figures: None) -> None:
    fields = phased(None, 0.5, latest=True)
    write_study(tmp_path, without_history([make_row(STRATEGIES[-1], 0, **{**fields, "switches": []})]), seeds=1)
    page = page_of(tmp_path)
    assert "phases" in page.sections and "No run changed its phase" in page.text


def test_a_study_without_phases_has_no_section_on_them(tmp_path: Path, no_figures: None) -> None:
    write_study(tmp_path, [{**row, "switches": [], "rules": []} for row in one_seed()], seeds=1)
    page = page_of(tmp_path)
    assert page.sections == SECTIONS and "#phases" not in page.loads


def test_which_way_is_better_is_said_when_the_comparison_was_told(tmp_path: Path) -> None:
    study = Study.from_dict(write_study(tmp_path, []).read_study())
    assert command(study) is not None and "maximize" not in python_call(study)
    assert (command(replace(study, maximize=False)) or "").count(" --minimize ") == 1
    assert "    maximize=False,\n" in python_call(replace(study, maximize=False))
    file = replace(study, file="a.toml", changes={"maximize": True})
    assert command(file) == "podium compare a.toml --maximize" and "changed({}, maximize=True)" in python_call(file)
