"""Reports on studies of several factors: who wins where, speed-ups, analyses, and the way back to the records."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from podium.lab.report import study_results
from podium.lab.report.answer import answer, find
from podium.lab.report.drawing.files import every_figure
from podium.lab.report.page import write_page
from podium.lab.report.report import write_report
from podium.lab.report.shared import shared_sections
from podium.lab.report.study_results import StudyResults
from podium.lab.stats.speedup import speedups
from podium.lab.stats.winners import winners
from podium.lab.study.parts import Where, this_machine
from podium.lab.study.results import by_setting, crossed, first_level, setting_of
from podium.lab.study.store import Row, Store
from podium.lab.study.study import Study
from tests.lab.synthetic import make_row

TIMES = {("a", 2): 2.0, ("a", 4): 1.0, ("b", 2): 1.0, ("b", 4): 3.0}
NAMES = {"a": "all-reduce", "b": "parameter-server"}


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("matplotlib", "plotly.offline"):
        monkeypatch.setitem(sys.modules, package, None)


def rows_of(seeds: int = 4) -> list[Row]:
    """Two strategies that cross: a is faster with four workers, b with two; and a baseline that stands alone."""
    found = []
    for seed in range(seeds):
        noise = 1 + 0.02 * seed
        found.append(cell("solo", 2, 4.0 * noise, seed, nodes=1))
        for (name, workers), seconds in TIMES.items():
            jitter = 1 + 0.003 * ((seed * (ord(name) - 95) + workers) % 3)
            found.append(cell(NAMES[name], workers, seconds * noise * jitter, seed, nodes=workers))
    return found


def cell(strategy: str, workers: int, seconds: float, seed: int, **more: Any) -> Row:
    name = "solo" if strategy == "solo" else f"{strategy}, workers={workers}"
    levels = {"strategy": strategy, "workers": workers}
    final = 0.95 + 0.001 * ((seed + workers + len(strategy)) % 4)
    return make_row(name, seed, seconds=seconds, final=final, levels=levels, launcher="virtual", **more)


def study_in(folder: Path, rows: list[Row]) -> Store:
    study = Study(
        name="crossing",
        question="Which wins where?",
        settings={"task": "digits-mlp", "launcher": "virtual"},
        factors={"strategy": ["solo", "all-reduce", "parameter-server"], "workers": [2, 4]},
        where=[
            Where(levels={"strategy": "solo", "workers": 4}, leave_out=True),
            Where(levels={"strategy": "solo", "workers": 2}, name="solo"),
        ],
        replications=4,
        baseline={"strategy": "solo"},
        reference=[
            {"title": "Elsewhere", "source": "A table of theirs.", "columns": ["workers", "2"], "rows": [["x", 7]]}
        ],
    )
    store = Store(folder)
    store.write_study(replace(study.resolved(), machine=this_machine()).to_dict())
    for row in rows:
        store.append(row)
    return store


def test_a_row_knows_its_setting_and_its_name_in_it() -> None:
    row = cell("all-reduce", 4, 1.0, 0)
    assert (setting_of(row), first_level(row)) == ("workers 4", "all-reduce")
    assert (setting_of(make_row("solo", 0)), first_level(make_row("solo", 0))) == ("", "solo")
    assert list(by_setting(rows_of(1))) == ["workers 2", "workers 4"]
    assert {first_level(row) for row in crossed(rows_of())} == set(NAMES.values())


def test_only_cells_that_differ_in_the_first_factor_alone_are_paired() -> None:
    pairs = [c for c in find(rows_of()).contrasts if c.measure == "seconds"]
    assert {(c.setting, c.first, c.second) for c in pairs} >= {
        ("workers 4", "all-reduce, workers=4", "parameter-server, workers=4")
    }
    assert all(c.first.endswith(c.second[-9:]) for c in pairs)
    assert len(pairs) == 2  # a baseline that stands alone competes nowhere
    assert all(c.p_holm is not None and c.p is not None and c.p_holm >= c.p for c in pairs)


def test_each_setting_has_its_winner_and_the_answer_names_them() -> None:
    findings = find(rows_of())
    found = {w.setting: w for w in winners(rows_of(), findings.table, findings.contrasts, "accuracy", "seconds")}
    assert found["workers 2"].level == "parameter-server" and found["workers 4"].level == "all-reduce"
    assert found["workers 4"].ratio == pytest.approx(3, rel=0.01) and not found["workers 4"].level_with
    said = answer(rows_of())
    assert "parameter-server in 1 of 2 settings (workers 2)" in said and "all-reduce in 1 of 2" in said
    assert "solo alone takes less time than the fastest in no setting." in said


def test_where_seeds_do_not_settle_it_nobody_is_named() -> None:
    said = answer(rows_of(1))
    assert "no difference that we can detect between the first and at least one other in both settings" in said


def test_speed_ups_are_taken_seed_by_seed_over_the_baseline_and_by_machines() -> None:
    found = speedups(rows_of(), {"strategy": "solo"})
    assert found is not None and found.baseline == "solo"
    line = next(line for line in found.lines if line.cell == "all-reduce, workers=4")
    assert line.value == pytest.approx(4, rel=0.01) and line.efficiency == pytest.approx(1, rel=0.01)
    assert line.low is not None and line.high is not None and line.low < line.value < line.high
    assert speedups(rows_of(), {}) is None and speedups(rows_of(), {"strategy": "nobody"}) is None


def test_the_page_tells_all_of_it_and_every_cell_leads_to_its_lines(tmp_path: Path) -> None:
    store = study_in(tmp_path, rows_of())
    page = write_report(tmp_path).read_text(encoding="utf-8")
    for text in (
        "crossing: 5 cells compared",
        "Which wins where?",
        "every combination of levels but 1 left out by design",
        "Who comes first where",
        "<h3>Speed-up</h3>",
        '">solo</a> over the cell',
        "A table of theirs.",
        "strategy × workers",
    ):
        assert text in page, text
    ids = set(re.findall(r'id="([^"]+)"', page))
    links = re.findall(r'href="#([^"]+)"', page)
    assert set(links) <= ids and {f"run-{k}" for k in range(1, len(store.rows()) + 1)} <= set(links)
    row = re.search(r'<tr id="cell-1">.*?</tr>', page, flags=re.DOTALL)
    assert row is not None and "all-reduce, workers=2" in row[0]
    lines = [int(k) for k in re.findall(r'href="#run-(\d+)"', row[0])]
    assert [store.rows()[k - 1]["cell"] for k in lines] == ["all-reduce, workers=2"] * 4


def test_rows_of_an_older_study_without_levels_still_make_a_page(tmp_path: Path) -> None:
    old = {"task": "digits-mlp", "strategies": ["solo", "all-reduce"], "seeds": [0, 1], "workers": 2, "settings": {}}
    more = {"launcher": "local", "target": None, "order": [], **asdict(this_machine())}
    store = Store(tmp_path)
    store.write_study({**old, **more})
    for seed in (0, 1):
        for name in old["strategies"]:
            store.append(make_row(name, seed, seconds=1 + seed))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "digits-mlp: 2 strategies compared" in page and "podium compare digits-mlp --strategy solo" in page


def test_a_response_that_no_run_has_is_said_to_be_missing(tmp_path: Path) -> None:
    store = study_in(tmp_path, rows_of(2))
    store.write_study({**store.read_study(), "responses": ["f1 <b>", "parameters", "step_ms.p50"]})
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "f1 &lt;b&gt;: no run has it." in page and page.count("no run has it") == 1
    text = write_page(tmp_path).read_text(encoding="utf-8")
    assert "| cell | parameters | step_ms.p50 |" in text and "`f1 <b>`: no run has it." in text
    store.write_study({**store.read_study(), "responses": ["f1"]})
    assert "## Other responses\n\n`f1`: no run has it.\n" in write_page(tmp_path).read_text(encoding="utf-8")
    store.results.unlink()
    assert "no run has it" not in write_report(tmp_path).read_text(encoding="utf-8")


def test_reports_go_by_the_studys_own_word_on_which_way_is_better(tmp_path: Path) -> None:
    rows = rows_of()
    for row in rows:  # parameter-server has 0.05 more, not quite the same in every seed
        more = (0.05 + 0.001 * row["seed"]) * ("parameter" in row["cell"])
        row["metrics"]["accuracy"] += more
        for point in row["history"]:
            point["accuracy"] += more
    store = study_in(tmp_path, rows)
    found = {}
    for way in (None, False):
        store.write_study({**store.read_study(), "maximize": way})
        found[way] = (
            write_report(tmp_path).read_text(encoding="utf-8"),
            write_page(tmp_path).read_text(encoding="utf-8"),
        )
    up, down = found[None][0], found[False][0]
    assert "Best final accuracy: parameter-server in both settings." in up and "accuracy, higher is better</dd>" in up
    assert "Best final accuracy: all-reduce in both settings." in down
    assert "accuracy, lower is better, as the study says</dd>" in down
    assert "parameter-server has the best accuracy" in up and "all-reduce has the best accuracy" in down
    assert "Of accuracy lower is better, as [study.json](study.json) says." in found[False][1]
    assert "is better" not in found[None][1]


def test_page_report_and_figures_of_a_study_work_out_its_findings_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study_in(tmp_path, rows_of(2))
    asked = list[int]()
    monkeypatch.setattr(study_results, "find", lambda *given: asked.append(1) or find(*given))
    found = StudyResults.read(tmp_path)
    write_report(found, include_plotly=False)
    write_page(found)
    assert every_figure(found)
    assert len(asked) == 1


def test_report_and_page_are_made_from_one_list_of_sections(tmp_path: Path) -> None:
    study_in(tmp_path, rows_of(2))
    found = StudyResults.read(tmp_path)
    page, report = write_page(found).read_text(encoding="utf-8"), write_report(found).read_text(encoding="utf-8")
    sections = shared_sections(found)
    assert [section.name for section in sections] == ["winners", "speedups"]
    for section in sections:
        assert f"## {section.title}" in page and f"<h3>{section.title}</h3>" in report
