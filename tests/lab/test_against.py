"""Cells beside a reference: which are paired, what is compared, which side of a margin they lie on."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import ConfigError, UnknownName
from podium.lab.report.drawing import to_plotly, to_svg
from podium.lab.report.drawing.tradeoff import LETTER, LINE, asides
from podium.lab.report.figures import tradeoffs
from podium.lab.report.page import write_page
from podium.lab.report.report import write_report
from podium.lab.stats.against import Pairing, against
from podium.lab.study.file import read_study
from podium.lab.study.parts import Against
from podium.lab.study.store import Row, Store
from podium.lab.study.study import Study
from tests.lab.synthetic import make_row
from tests.lab.test_traces import problems

CODECS = {"dense": (0.97, 1000), "fp16": (0.97, 500), "int8": (0.95, 250), "sign": (0.90, 32)}
DENSE = Against(levels={"codec": "dense"}, margin=0.01)


CODEC_STUDY = Study(name="codecs", factors={"codec": list(CODECS)}, against=[DENSE], responses=["sent_bytes"])


def study_rows(swing: float = 0.0) -> list[Row]:
    """Four codecs on two tasks; with `swing`, a codec's accuracy goes up and down by as much from seed to seed."""
    return [
        make_row(
            f"{codec}, {task}",
            seed,
            final=accuracy + 0.001 * seed + (swing * (seed - 1) if codec != "dense" else 0),
            levels={"codec": codec, "task": task},
            sent_bytes=sent,
        )
        for task in ("a", "b")
        for codec, (accuracy, sent) in CODECS.items()
        for seed in range(3)
    ]


def by_cell(rows: list[Row], asked: Against = DENSE) -> dict[str, Pairing]:
    return {one.cell: one for one in against(rows, asked, ["accuracy", "sent_bytes", "wait_share"], "accuracy")}


class TestPairs:
    def test_a_cell_is_paired_with_the_reference_of_its_own_setting(self) -> None:
        found = by_cell(study_rows())
        assert len(found) == 6
        assert all(one.reference == f"dense, {one.cell.rpartition(' ')[2]}" for one in found.values())

    def test_only_the_cells_asked_for_are_compared(self) -> None:
        found = by_cell(study_rows(), Against(levels={"codec": "sign"}, only={"codec": ["int8"], "task": "a"}))
        assert [(one.cell, one.reference) for one in found.values()] == [("int8, a", "sign, a")]
        assert found["int8, a"].gaps["accuracy"].value == pytest.approx(0.05)

    def test_a_reference_of_two_factors_is_one_cell_for_all(self) -> None:
        found = by_cell(study_rows(), Against(levels={"codec": "dense", "task": "a"}))
        assert len(found) == 7 and {one.reference for one in found.values()} == {"dense, a"}

    def test_bytes_are_compared_by_their_ratio_and_shares_by_their_difference(self) -> None:
        gaps = by_cell(study_rows())["fp16, a"].gaps
        assert gaps["sent_bytes"].ratio and gaps["sent_bytes"].value == pytest.approx(0.5)
        assert not gaps["wait_share"].ratio and gaps["wait_share"].value == 0

    def test_a_table_may_have_responses_of_its_own(self) -> None:
        found = by_cell(study_rows(), replace(DENSE, responses=("sent_bytes",)))
        assert [*found["fp16, a"].gaps] == ["sent_bytes"] and found["fp16, a"].verdict == ""

    @given(st.permutations(study_rows(0.004)))
    def test_the_order_of_the_rows_does_not_matter(self, rows: list[Row]) -> None:
        assert by_cell(rows) == by_cell(study_rows(0.004))

    def test_a_seed_without_the_reference_has_no_difference(self) -> None:
        rows = [row for row in study_rows() if (row["cell"], row["seed"]) != ("dense, a", 2)]
        assert by_cell(rows)["fp16, a"].gaps["accuracy"].n == 2
        assert by_cell([row for row in rows if "dense" not in row["cell"]]) == {}


class TestVerdict:
    def test_a_margin_says_who_is_close(self) -> None:
        found = by_cell(study_rows(0.001))
        assert found["fp16, a"].verdict == "within" and found["sign, a"].verdict == "worse"
        assert by_cell(study_rows(), Against(levels={"codec": "dense"}))["fp16, a"].verdict == ""

    def test_close_by_the_mean_is_not_yet_close_for_sure(self) -> None:
        found = by_cell(study_rows(0.02))
        assert found["fp16, a"].verdict == "within, not settled" and found["int8, a"].verdict == "worse, not settled"

    def test_of_a_metric_that_is_better_when_lower_more_is_worse(self) -> None:
        (one, *_) = against(study_rows(0.001), DENSE, ["accuracy"], "accuracy", lower=True)
        assert one.verdict == "within"
        gaps = {
            one.cell: one.verdict
            for one in against(study_rows(0.001), replace(DENSE, margin=0), ["accuracy"], "accuracy")
        }
        assert gaps["sign, a"] == "worse"


FILE = """
[settings]
task = "digits-mlp"
launcher = "virtual"
[factors]
codec = ["dense", "fp16", "int8", "sign"]
task = ["digits-mlp"]
[[against]]
levels = { codec = "dense" }
margin = 0.01
"""


class TestStudy:
    def test_a_file_names_its_tables_and_a_level_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "codecs.toml"
        path.write_text(FILE, encoding="utf-8")
        (table,) = read_study(path).resolved().to_dict()["against"]
        assert table == {"levels": {"codec": "dense"}, "only": {}, "responses": (), "margin": 0.01, "title": ""}
        path.write_text(FILE.replace('levels = { codec = "dense"', 'levels = { codec = "dens"'), encoding="utf-8")
        with pytest.raises(UnknownName, match="Did you mean 'dense'"):
            read_study(path).resolved()
        path.write_text(FILE.replace("levels = { codec", "levels = { coder"), encoding="utf-8")
        with pytest.raises(ConfigError, match="unknown factor 'coder'"):
            read_study(path)

    def test_page_and_report_show_the_table_and_every_number_leads_to_a_record(self, tmp_path: Path) -> None:
        store = written(tmp_path / "docs", study_rows(0.001))
        (store.folder / "PAGE.md").write_text(
            "Signs lose [a lot](#against-dense).\n\n{{ part.against }}\n\n{{ part.cells }}"
        )
        page = write_page(store.folder)
        text = page.read_text(encoding="utf-8")
        assert "## Against dense" in text and "| within |" in text and "Signs lose [a lot](#against-dense)." in text
        assert problems(page, tmp_path) == []
        report = write_report(store.folder, include_plotly=False).read_text(encoding="utf-8")
        assert "<h3>Against dense</h3>" in report and "accuracy against sent_bytes, both over dense, a" in report


def written(folder: Path, rows: list[Row]) -> Store:
    store = Store(folder)
    cells = {row["cell"]: row["levels"] for row in rows}
    study = {
        "name": "codecs",
        "cells": [{"cell": cell, "levels": levels, "settings": {}} for cell, levels in cells.items()],
        "factors": {"codec": list(CODECS), "task": ["a", "b"]},
        "responses": ["sent_bytes"],
        "against": [asdict(DENSE)],
        "seeds": [0, 1, 2],
    }
    store.write_study(study)
    for row in rows:
        store.append(row)
    return store


class TestFigure:
    def test_a_figure_has_a_point_for_each_cell_on_paper_and_on_the_screen(self) -> None:
        (figure, other) = tradeoffs(CODEC_STUDY, no_seconds(), "accuracy")
        assert (figure.setting, other.setting) == ("a", "b") and len(figure.places) == 3
        shown = to_plotly(figure, {})
        assert shown["data"][0]["x"] == [place.x for place in figure.places]
        svg = to_svg(figure, {})
        assert svg is None or all(f">{name}<" in svg for name in ("fp16", "int8", "sign"))

    def test_two_cells_are_not_worth_a_figure(self) -> None:
        rows = [row for row in no_seconds() if row["levels"]["codec"] in ("dense", "fp16", "int8")]
        assert tradeoffs(CODEC_STUDY, rows, "accuracy") == []

    @given(st.lists(st.tuples(st.floats(0, 300), st.floats(0, 250)), min_size=1, max_size=19))
    def test_names_never_lie_on_each_other(self, spots: list[tuple[float, float]]) -> None:
        found = asides(spots, ["power-sgd 2"] * len(spots))
        boxes = [(x + dx, y + dy) for (x, y), (dx, dy) in zip(spots, found, strict=True)]
        for i, (x, y) in enumerate(boxes):
            assert not any(abs(x - a) < LETTER * 11 - 1e-6 and abs(y - b) < LINE - 1e-6 for a, b in boxes[:i])
        assert all(math.isfinite(end) for box in boxes for end in box)


def no_seconds() -> list[Row]:
    return [{**row, "seconds": None} for row in study_rows(0.001)]
