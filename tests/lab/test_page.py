"""A study as a Markdown page: every number leads to its record, and others' numbers are told from ours."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from podium.lab.report.page import write_page
from podium.lab.study.store import Row, Store
from tests.lab.synthetic import failed_row, make_row, write_study
from tests.lab.test_traces import problems

pytest.importorskip("statsmodels")

REFERENCE = {
    "title": "Beside it",
    "source": "Doe, 2020: 48 epochs on one host. Read off its figures.",
    "columns": ["workers", "2", "16"],
    "rows": [["all-reduce, s", 654, 288]],
    "note": "Its times are 3× ours. Shapes are comparable.",
}
STRATEGIES = {"a": 1.0, "b until epoch:at=2 | a": 1.5, "c": 2.0}


def two_factors(folder: Path, **fields: Any) -> Store:
    """A study of three strategies and two numbers of workers; the file's order is not that of the cells."""
    rows: list[Row] = []
    made: list[dict[str, Any]] = []
    for name in STRATEGIES:
        for workers in (2, 4):
            cell = f"{name}, workers {workers}"
            levels = {"strategy": name, "workers": workers}
            made.append({"cell": cell, "levels": levels, "settings": {"strategy": name, "workers": workers}})
            for seed in range(3):
                seconds = STRATEGIES[name] / workers * (1 + 0.01 * seed * (1 + len(rows) % 3))
                rows.append(make_row(cell, seed, seconds=seconds, levels=levels, nodes=workers))
    store = write_study(folder, sorted(rows, key=lambda row: int(row["seed"])))
    changed: dict[str, Any] = {
        "cells": made,
        "factors": {"strategy": list(STRATEGIES), "workers": [2, 4]},
        "reference": [REFERENCE],
    }
    changed |= {"question": "Who is fastest on 2 to 4 machines?", "baseline": made[0]["levels"], "target": 0.9}
    store.write_study({**store.read_study(), **changed, **fields})
    return store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "study"
    two_factors(path)
    write_page(path)
    return path


def test_every_number_leads_to_a_record(folder: Path) -> None:
    assert problems(folder / "README.md", folder.parent) == []


def test_a_row_links_to_the_lines_of_its_own_cell(folder: Path) -> None:
    rows = Store(folder).rows()
    lines = re.findall(r'^\| <a id="cell-\d+"></a>`(.+?)` \|.*\| (.+) \|$', (folder / "README.md").read_text(), re.M)
    assert len(lines) == 6
    for cell, links in lines:
        linked = [rows[int(n) - 1] for n in re.findall(r"results\.jsonl#L(\d+)", links)]
        assert {row["cell"] for row in linked} == {cell.replace("\\|", "|")}
        assert [row["seed"] for row in linked] == [0, 1, 2]


def test_it_says_what_a_reader_asks(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    for heading in ("Answer", "Design", "Cells", "Who comes first where", "Speed-up", "Which factors matter"):
        assert f"\n## {heading}\n" in text
    assert "What may not be concluded: Measured on" in text
    assert "Who is fastest on 2 to 4 machines ([study.json](study.json))?" in text
    assert "| `strategy × workers` |" in text
    assert "set in advance" in text
    assert text.index("## Answer") < text.index("## Design")


def test_numbers_of_others_stand_apart_under_their_source(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    quoted = text[text.index("## Beside it") : text.index("## How to reproduce")]
    assert "Not measured here." in quoted
    assert "48 epochs on one host (quoted in [study.json](study.json))." in quoted
    assert "```\nworkers          2   16\nall-reduce, s  654  288\n```" in quoted
    assert "|" not in quoted


def test_the_same_study_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    for name in ("study.json", "results.jsonl"):
        shutil.copy(folder / name, tmp_path)
    assert write_page(tmp_path).read_bytes() == (folder / "README.md").read_bytes()


def test_figures_that_are_there_are_shown_interactions_first_and_six_at_most(folder: Path, tmp_path: Path) -> None:
    for name in ("study.json", "results.jsonl"):
        shutil.copy(folder / name, tmp_path)
    names = ["accuracy-against-workers-by-strategy", "seconds-against-workers-by-strategy", "accuracy-against-epoch"]
    names += ["accuracy-against-seconds-of-training", "seconds-of-training", "mb-sent-by-all-ranks"]
    names += ["of-step-time-spent-waiting", "topology-a"]
    (tmp_path / "figures").mkdir()
    for name in names:
        (tmp_path / "figures" / f"{name}.svg").touch()
    page = write_page(tmp_path)
    shown = re.findall(r"!\[[^]]+\]\(figures/(.+)\.svg\)", page.read_text())
    assert len(shown) == 6
    assert shown[:2] == names[:2]
    assert problems(page, tmp_path) == []


def test_a_comparison_of_strategies_with_failures_has_its_page(tmp_path: Path) -> None:
    rows = [make_row("solo", 0), failed_row("all-reduce", 0), failed_row("all-reduce", 0)]
    write_study(tmp_path, rows, seeds=1)
    page = write_page(tmp_path)
    text = page.read_text()
    assert problems(page, tmp_path) == []
    assert "`all-reduce` | 0, 1 failed |" in text
    assert "Not run: `parameter-server:mode=async`." in text
    assert "podium compare digits-mlp" in text


def test_a_study_without_a_run_has_its_page(tmp_path: Path) -> None:
    write_study(tmp_path, [])
    page = write_page(tmp_path)
    assert "No run has finished yet" in page.read_text()
    assert problems(page, tmp_path) == []
