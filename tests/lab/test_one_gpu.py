"""The study of one GPU: what its pages say is what its records give, and its file measures here what it can."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from podium import read_study, run_study
from podium.errors import UnknownName
from podium.lab.report.format import plain
from podium.lab.report.frame import frame, where
from podium.lab.study.store import Store
from podium.sweeps.plan import make_executor

pytest.importorskip("statsmodels")

ROOT = Path(__file__).parents[2]
STEPS, SWEEPS = (ROOT / "docs" / "studies" / name for name in ("one-gpu", "one-gpu-sweeps"))
FILES = {STEPS: "studies/one_gpu.py", SWEEPS: "studies/one_gpu_sweeps.toml"}
DRIVER = ["processes", "processes-graph", "mps", "mps-graph"]
RUNTIME = ["ray", "ray-mps"]
ALONE = ["eager", "graph", "compiled"]
FRAMEWORK = ["streams", "fused", "fused-compiled"]
MAIN = {"mnist-mlp": 64, "mnist-cnn": 64, "cifar10-resnet20": 16}


@cache
def runs(folder: Path) -> pd.DataFrame:
    rows = Store(folder).all_rows()
    return frame([row for row in rows if "cell" in row], {id(row): line for line, row in enumerate(rows, 1)})


def best(task: str, arms: list[str]) -> float:
    """Microseconds per model-step of the fastest of these arms in a task's main cell."""
    mine = where(runs(STEPS), task=task, trials=MAIN[task], precision="tf32", arm=arms)
    energy = where(mine, part="energy")
    alone = mine[~mine.arm.isin(energy.arm)]  # a long window counts before a short one
    return float(pd.concat([energy, alone]).us.min())


def said(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


class TestFindings:
    @pytest.mark.parametrize(
        ("others", "sentence"),
        [
            (DRIVER, "{} to {}× as fast as the driver's best"),
            (RUNTIME, "{} to {}× as fast as the runtime's best"),
            (ALONE, "{} to {}× as fast as one after another"),
        ],
    )
    def test_the_framework_is_as_many_times_as_fast_as_the_page_says(self, others: list[str], sentence: str) -> None:
        ratios = sorted(best(task, others) / best(task, FRAMEWORK) for task in MAIN)
        assert sentence.format(plain(ratios[0], 2), plain(ratios[-1], 2)) in said(STEPS)

    def test_auto_chose_the_fastest_arm_in_all_cells(self) -> None:
        found = where(runs(STEPS), arm="auto")
        for one in found.to_dict("records"):
            there = where(runs(STEPS), task=one["task"], trials=one["trials"], precision=one["precision"])
            assert there.sort_values("us").arm.iloc[0] == one["chosen_arm"]
        assert len(found) == 11 and "It is none in all [eleven cells]" in said(STEPS)

    def test_fused_is_first_or_near_it_in_every_whole_sweep(self) -> None:
        gains = {}
        for (search, task), mine in runs(SWEEPS).groupby(["search", "task"]):
            fused = where(mine, arm="fused").seconds.min()
            assert fused <= 1.04 * mine.seconds.min()
            gains[search, task] = plain(where(mine, arm=DRIVER).seconds.min() / fused, 2)
        folds, asha = ([gains[search, task] for task in ("mnist-mlp", "mnist-cnn")] for search in ("folds", "asha"))
        assert len(gains) == 4
        assert f"{folds[0]}× and {folds[1]}× as fast as the driver's best in k-fold" in said(SWEEPS)
        assert f"{asha[0]}× and {asha[1]}× in a search" in said(SWEEPS)

    def test_auto_was_within_a_tenth_of_the_fastest_sweep_in_three_of_four(self) -> None:
        near = 0
        for _, mine in runs(SWEEPS).groupby(["search", "task"]):
            own, others = where(mine, arm="auto"), mine[mine.arm != "auto"]
            near += own.seconds.min() <= 1.1 * others.seconds.min()
        assert near == 3 and "Within 10 % in three of four" in said(SWEEPS)

    def test_all_executors_train_the_same_models(self) -> None:
        for _, mine in runs(SWEEPS).groupby(["search", "task"]):
            assert mine.accuracy.max() - mine.accuracy.min() < 0.005


class TestRecords:
    @pytest.mark.parametrize("folder", FILES, ids=lambda folder: folder.name)
    def test_the_records_are_of_the_studys_cells(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        size = "full" if folder == STEPS else None
        study = read_study(FILES[folder], size).resolved()
        cells = {cell.cell: dict(cell.levels) for cell in study.cells}
        found = {row["cell"]: row["levels"] for row in Store(folder).runs()}
        assert found == {name: cells[name] for name in found}
        assert Store(folder).read_study()["cells"] == json.loads(json.dumps(study.to_dict()["cells"]))

    def test_a_study_file_has_at_most_150_lines(self) -> None:
        for name in FILES.values():
            assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 150


class TestFile:
    def test_every_arm_of_the_whole_sweeps_is_an_executor(self) -> None:
        for cell in read_study(ROOT / FILES[SWEEPS]).resolved().cells:
            assert make_executor(cell.settings["executor"]).name

    def test_a_size_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(UnknownName, match="size 'huge'"):
            read_study(ROOT / FILES[STEPS], "huge")

    def test_without_a_gpu_every_run_says_what_runs_here(self, tmp_path: Path) -> None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        only: dict[str, Any] = {"arm": ["fused"], "task": ["mnist-mlp"], "trials": [4]}
        (row,) = run_study(ROOT / FILES[STEPS], out=tmp_path, only=only).rows
        assert row["status"] == "failed" and "--size small runs on a CPU" in row["error"]

    @pytest.mark.slow
    def test_an_arm_and_a_choice_are_measured_here(self, tmp_path: Path) -> None:
        only: dict[str, Any] = {"arm": ["eager", "fused-compiled", "auto"], "task": ["digits-mlp"], "trials": [8]}
        found = run_study(ROOT / FILES[STEPS], size="small", out=tmp_path, only=only, seconds=0.02, rounds=2)
        rows = {row["levels"]["arm"]: row for row in found.rows}
        assert rows["eager"]["metrics"]["us"] > 0 and len(rows["eager"]["rounds_us"]) == 2
        assert "needs a GPU" in rows["fused-compiled"]["error"]
        assert rows["auto"]["chosen"] and rows["auto"]["calibration_s"] > 0

    @pytest.mark.slow
    def test_a_whole_sweep_leaves_its_makespan_and_how_trials_ended(self, tmp_path: Path) -> None:
        only: dict[str, Any] = {"arm": ["eager"], "search": ["folds"]}
        (row,) = run_study(ROOT / FILES[SWEEPS], size="small", out=tmp_path, only=only).rows
        assert row["trials_ended"] == {"finished": 12} and row["best"]["n"] == 3 and row["seconds"] > 0
