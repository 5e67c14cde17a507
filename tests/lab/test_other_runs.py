"""Studies whose runs are no trainings: whole sweeps, or what a function of the study measures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError, UnknownName
from podium.lab.report.page import write_page
from podium.lab.study.file import read_study
from podium.lab.study.run import run_study
from podium.lab.study.store import Store
from podium.lab.study.study import Study

pytest.importorskip("statsmodels")

SWEEPS = """
[study]
runs = "sweeps"
replications = 1
retries = 0
[settings]
task = "digits-mlp"
epochs = 1
device = "cpu"
grid = { lr = [0.1, 0.05] }
"task.hidden" = 8
[factors]
executor = ["sequential", "fused"]
"""


def measure(settings: Mapping[str, Any], seed: int) -> Mapping[str, Any]:
    if settings["arm"] == "broken":
        raise ConfigError("no such device")
    return {"metrics": {"us": 10.0 * settings["trials"] + seed}, "seconds": 1.0}


def own(**more: Any) -> Study:
    factors: dict[str, Any] = {"arm": ["fused", "eager", "broken"], "trials": [4, 16]}
    keep = lambda at: not (at["arm"] == "broken" and at["trials"] == 4)  # noqa: E731
    return Study(
        name="own", factors=factors, keep=keep, runs=measure, retries=0, replications=2, maximize=False, **more
    )


def test_a_cell_may_be_a_whole_sweep(tmp_path: Path) -> None:
    file = tmp_path / "executors.toml"
    file.write_text(SWEEPS)
    found = run_study(file, out=tmp_path / "out", only={"executor": ["sequential"]})
    (row,) = found.rows
    assert row["status"] == "finished" and row["trials"] == 2 and row["trials_ended"] == {"finished": 2}
    assert 0 < row["metrics"]["accuracy"] <= 1 and row["best"]["n"] == 1 and row["seconds"] > 0
    assert Study.from_dict(Store(found.out).read_study()).runs == "sweeps"
    assert "Only sequential has finished runs" in found.answer


def test_a_setting_that_no_sweep_has_is_refused_before_the_first_run(tmp_path: Path) -> None:
    file = tmp_path / "executors.toml"
    file.write_text(SWEEPS.replace("epochs = 1", "epoch = 1"))
    with pytest.raises(UnknownName, match=r"setting of a sweep 'epoch'.*Did you mean 'epochs'"):
        read_study(file).resolved()


def test_a_sweep_that_fails_is_a_row_that_says_why(tmp_path: Path) -> None:
    file = tmp_path / "executors.toml"
    file.write_text(SWEEPS.replace('"task.hidden" = 8', '"task.hiden" = 8').replace(', "fused"', ""))
    (row,) = run_study(file, out=tmp_path / "out").rows
    assert row["status"] == "failed" and "hiden" in row["error"]


def test_a_function_of_the_study_may_measure_what_it_likes(tmp_path: Path) -> None:
    found = run_study(own(), out=tmp_path)
    assert found.metric == "us" and len(found.rows) == 10
    assert found.failed == 2 and "ConfigError: no such device" in {row.get("error") for row in found.rows}
    text = write_page(tmp_path).read_text()
    assert "| cell | runs | us | seconds |" in text and "every combination of levels but 1 left out" in text
    assert Store(tmp_path).read_study()["runs"] == "own"


def test_a_call_may_leave_cells_and_time_to_a_later_one(tmp_path: Path) -> None:
    first = run_study(own(), out=tmp_path, only={"arm": ["eager"], "trials": [4]})
    assert {row["cell"] for row in first.rows} == {"eager, trials=4"} and first.status == "finished"
    none = run_study(own(), out=tmp_path, budget_s=0)
    assert none.status == "stopped" and len(none.rows) == 2
    assert len(run_study(own(), out=tmp_path).rows) == 10
    with pytest.raises(UnknownName, match="level of arm 'egar'"):
        run_study(own(), out=tmp_path, only={"arm": ["egar"]})


def test_only_trainings_in_virtual_time_may_run_side_by_side(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only runs in virtual time"):
        run_study(own(), out=tmp_path, jobs=2)


def test_a_kind_of_runs_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UnknownName, match="kind of runs 'sweep'"):
        own_runs: Any = "sweep"
        Study(name="x", factors={"a": [1, 2]}, runs=own_runs)
