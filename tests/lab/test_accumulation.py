"""The accumulation studies (virtual, real, passes): their pages say what their records give."""

from __future__ import annotations

import importlib.util
import math
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podium.lab.report.format import plain, spread
from podium.lab.stats.anova import anova
from podium.lab.study.file import read_study
from podium.lab.study.run import run_study
from podium.launch.clusters.description import read_cluster
from tests.lab.accumulation import (
    KINDS,
    LINKS,
    STUDIES,
    beyond_table,
    judged,
    model_table,
    percent,
    records,
    terms_table,
)

pytest.importorskip("statsmodels")

ROOT = Path(__file__).parents[2]


@cache
def page(name: str) -> str:
    return (STUDIES / name / "PAGE.md").read_text(encoding="utf-8")


def said(name: str) -> str:
    return " ".join(re.sub(r"\]\([^)]*\)", "", page(name)).replace("[", "").replace("*", "").split())


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"study_of_{name}", ROOT / "studies" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def epoch_s(mbit: int, model: str, nodes: int, batch: int, every: int) -> dict[int, float]:
    wanted = {"mbit": mbit, "nodes": nodes, "batch": batch, "every": every}
    rows = [row for row in records("accumulation") if row["levels"]["model"] == model]
    return {row["seed"]: row["epoch_s"] for row in rows if all(row[name] == wanted[name] for name in wanted)}


def ratios(mbit: int, model: str, nodes: tuple[int, ...]) -> list[float]:
    """Every 4 over every batch, the geometric mean over seeds, of each number of nodes and batch."""
    found = []
    for count in nodes:
        for batch in (32, 64, 100):
            one, four = (epoch_s(mbit, model, count, batch, every) for every in (1, 4))
            found.append(math.exp(statistics.fmean(math.log(four[seed] / one[seed]) for seed in one)))
    return found


class TestWhatAccumulatingSaves:
    def test_on_several_nodes_and_on_one(self) -> None:
        text = said("accumulation")
        for mbit in LINKS:
            for model, title in zip(KINDS, ("ResNet-50", "EfficientNet-B0"), strict=True):
                several = ratios(mbit, model, (2, 3))
                assert f"{title} {min(several):.3f} to {max(several):.3f}" in text
        alone = [ratios(1000, model, (1,)) for model in KINDS]
        told = " and ".join(f"{min(one):.3f} to {max(one):.3f}" for one in alone)
        assert f"where only updates are saved, {told}" in text
        most = [min(ratios(100, "resnet50", (2, 3))), max(ratios(1000, "resnet50", (2, 3)))]
        everything = [one for mbit in LINKS for model in KINDS for one in ratios(mbit, model, (2, 3))]
        assert [min(everything), max(everything)] == most
        assert f"between {most[0]:.2f} (ResNet-50 at 100 Mbit/s) and {most[1]:.2f} (ResNet-50 at 1000" in text

    def test_three_nodes_against_one(self) -> None:
        for mbit in LINKS:
            fast = {}
            for every in (1, 4):
                pairs = [
                    (epoch_s(mbit, m, 1, b, every), epoch_s(mbit, m, 3, b, every)) for m in KINDS for b in (32, 64, 100)
                ]
                fast[every] = [
                    statistics.fmean(one.values()) / statistics.fmean(three.values()) for one, three in pairs
                ]
            often, seldom = (f"{min(fast[every]):.2f} to {max(fast[every]):.2f}" for every in (1, 4))
            told = f"at {mbit} Mbit/s: {often} times as fast with an exchange every batch, {seldom} with one every 4"
            assert told in said("accumulation")
            slower = [sum(one < 1 for one in fast[every]) for every in (1, 4)]
            assert slower == ([0, 0] if mbit == 1000 else [5, 1])
        assert "slower than 1 in 5 and 1 of 6 combinations" in said("accumulation")

    def test_which_factors_matter(self) -> None:
        for mbit in LINKS:
            rows = [
                {**row, "levels": {name: level for name, level in row["levels"].items() if name != "link"}}
                for row in records("accumulation")
                if row["mbit"] == mbit
            ]
            found = anova(rows, "epoch_s", ratio=True)
            assert found is not None and all((term.p_holm or 0) < 0.001 for term in found.terms)
            share = {term.name: f"{term.omega_squared:.3f}" for term in found.terms}
            several = "accumulate × workers"
            if mbit == 1000:
                told = f"explain {share['model']} and {share['workers']} of the variation at 1000 Mbit/s, the exchange"
                assert f"{told} {share['accumulate']}" in said("accumulation")
            else:
                told = f"explain {share['model']}, {share['accumulate']}, {share['batch']} and {share[several]}"
                assert told in said("accumulation")


class TestModels:
    def test_the_tables_are_what_the_records_give(self) -> None:
        for line in (*model_table(), *beyond_table()):
            assert line in page("accumulation")

    @pytest.mark.slow
    def test_the_terms_are_what_the_records_give(self) -> None:
        """To a twentieth: what hides has a kink, where the last digits of an interval depend on rounding."""
        shown = page("accumulation").partition("| link | term | value |")[2].splitlines()[2:]
        for line, kept in zip(terms_table(), shown, strict=False):
            (*name, value, ends, _), (*known, there, limits, _) = (one.strip("| ").split(" | ") for one in (line, kept))
            assert name == known and value == there
            found, wanted = ([float(end) for end in one.split(" to ")] for one in (ends, limits))
            assert found == pytest.approx(wanted, rel=0.05, abs=1e-4)

    def test_the_sentences_are_those_of_the_tables(self) -> None:
        by_name = [{one.model: one for one in judged(mbit)} for mbit in LINKS]
        first, second = ({name: percent(one.median_error) for name, one in found.items()} for found in by_name)
        assert first["overlapped"] == second["overlapped"] == "0.4 %"
        told = f"of {first['quadratic'].removesuffix(' %')} and {second['quadratic']} by a quadratic model, of"
        assert f"{told} {first['linear'].removesuffix(' %')} and {second['linear']} by a linear" in said("accumulation")
        times = [found["quadratic"].median_error / found["overlapped"].median_error for found in by_name]
        assert f"is {times[0]:.0f} times smaller" in said("accumulation")
        assert f"and {times[1]:.0f} times at 100 Mbit/s" in said("accumulation")


class TestRealRuns:
    def errors(self) -> list[float]:
        """Predicted over measured less one, by cell."""
        found: dict[str, dict[str, list[float]]] = {}
        for row in records("accumulation-real"):
            cell = row["cell"].removeprefix(f"{row['levels']['world']}, ")
            found.setdefault(cell, {"predicted": [], "real": []})[row["levels"]["world"]].append(row["batch_s"])
        return [statistics.fmean(one["predicted"]) / statistics.fmean(one["real"]) - 1 for one in found.values()]

    def test_virtual_time_is_too_fast_by_as_much_as_both_pages_say(self) -> None:
        errors = self.errors()
        assert len(errors) == 6 and all(error < 0 for error in errors)
        middle, worst = (percent(one) for one in (statistics.median(map(abs, errors)), max(map(abs, errors))))
        assert f"median error {middle}, worst {worst}, always too fast" in said("accumulation")
        assert f"by {middle} in the median and {worst} at most" in said("accumulation-real")


class TestPasses:
    def test_the_fits_are_those_of_the_recorded_passes(self) -> None:
        summary = module("passes").summary
        for row in records("passes"):
            found = summary([tuple(one) for one in row["passes"]])
            assert np.allclose(found["per_sample_s"], row["per_sample_s"], rtol=2e-3)
            assert np.allclose(found["per_pass_s"], row["per_pass_s"], rtol=2e-3)
            per = [spread(*(1e3 * x for x in row[name])) for name in ("per_sample_s", "per_pass_s")]
            assert f"{per[0]} and {per[1]}" in said("passes")
        assert f"were {plain(records('passes')[0]['per_sample_s'][0])} and" in said("accumulation")

    def test_fixed_and_per_sample_parts_are_found(self) -> None:
        found = module("passes").summary(
            [(n, 0.05 + 0.01 * n + 1e-6 * (n % 3), 0.1) for n in (8, 16, 32, 64) for _ in range(3)]
        )
        assert found["per_sample_s"][0] == pytest.approx(0.01, rel=1e-3)
        assert found["per_pass_s"][0] == pytest.approx(0.05, rel=1e-3)

    def test_a_fixed_part_below_zero_is_held_at_zero(self) -> None:
        found = module("passes").summary([(n, 0.01 * n - 0.02, 0.1) for n in (8, 16, 32) for _ in range(2)])
        assert found["per_pass_s"] == [0.0, None, None] and found["per_sample_s"][0] > 0

    def test_cluster_files_say_what_was_measured(self) -> None:
        for row in records("passes"):
            model, where = row["levels"].values()
            for mbit in LINKS:
                path = ROOT / "studies" / "clusters" / f"{model}-{where}-{mbit}mbit.toml"
                if path.is_file():
                    cluster = read_cluster(str(path))
                    assert cluster.seconds_per_sample == pytest.approx(row["per_sample_s"][0], rel=1e-5)
                    assert cluster.seconds_per_step == pytest.approx(row["per_pass_s"][0], rel=1e-5)
                    assert cluster.jitter == pytest.approx(row["cv"], rel=1e-5)

    @pytest.mark.slow
    def test_passes_are_measured_alone_and_beside_another_process(self, tmp_path: Path) -> None:
        found = run_study(ROOT / "studies" / "passes.py", size="small", out=tmp_path)
        assert found.failed == 0 and len(found.rows) == 4
        assert all(row["per_sample_s"][0] > 0 and len(row["passes"]) == 9 for row in found.rows)


class TestTheStudy:
    @pytest.mark.parametrize(("size", "name"), [(None, "accumulation"), ("real", "accumulation-real")])
    def test_the_records_are_of_the_studys_cells_and_seeds(self, size: str | None, name: str) -> None:
        study = read_study(ROOT / "studies" / "accumulation.py", size).resolved()
        assert sorted((row["cell"], row["seed"]) for row in records(name)) == sorted(study.order())

    def test_cells_that_differ_in_how_often_they_exchange_use_the_same_samples(self) -> None:
        study = read_study(ROOT / "studies" / "accumulation.py").resolved()
        samples: dict[str, set[Any]] = {}
        for cell in study.cells:
            config = study.config(cell.cell, 0)
            rest = cell.cell.partition(", ")[2]
            samples.setdefault(rest, set()).add(config.task_options["samples"])
            assert config.batch_size == config.accumulate * config.workers * int(str(cell.levels["batch"])[6:])
        assert all(len(found) == 1 for found in samples.values()) and len(samples) == 36

    @pytest.mark.slow
    def test_a_quarter_of_the_exchanges_sends_a_quarter_of_the_bytes(self, tmp_path: Path) -> None:
        study = read_study(ROOT / "studies" / "accumulation.py", "small").changed({}, seeds=1)
        only = {"model": ["efficientnet-b0"], "workers": [2], "batch": ["batch 4"]}
        found = run_study(study, out=tmp_path, jobs=2, only=only)
        one, four = sorted(found.rows, key=lambda row: int(row["levels"]["accumulate"]))
        assert found.failed == 0 and len(one["step_s"]) == 8 and len(four["step_s"]) == 2
        assert one["step_bytes"] == four["step_bytes"] and one["batch_s"] > four["batch_s"] > 0
        assert one["epoch_s"] == pytest.approx(one["seconds"] / one["samples"] * 100_000)

    @pytest.mark.slow
    def test_a_run_today_gives_the_committed_row(self, tmp_path: Path) -> None:
        study = read_study(ROOT / "studies" / "accumulation.py").changed({}, seeds=1)
        only = {"model": ["efficientnet-b0"], "workers": [2], "batch": ["batch 32"], "link": ["100 Mbit/s"]}
        kept = {row["cell"]: row for row in records("accumulation") if row["seed"] == 0}
        rows = run_study(study, out=tmp_path, only=only).rows
        assert len(rows) == 2
        for row in rows:
            assert row["sent_bytes"] == kept[row["cell"]]["sent_bytes"]
            assert row["epoch_s"] == pytest.approx(kept[row["cell"]]["epoch_s"], rel=1e-5)
            assert row["step_s"] == pytest.approx(kept[row["cell"]]["step_s"], rel=1e-5)
