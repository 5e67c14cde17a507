"""Starting a run: what is refused before anything starts, and what a run is called afterwards."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import podium
from podium.cli.summary import summary
from podium.config import RunConfig, RunResult, parse_strategy
from podium.data.base import ArrayDataset, Data
from podium.errors import ConfigError
from podium.launch.labels import label_of
from podium.launch.prepare import plan_script, prepare
from podium.records.recorder import read_records
from podium.strategies import make_strategy
from podium.strategies.all_reduce import AllReduce
from podium.strategies.parameter_server import ParameterServer
from podium.strategies.solo import Solo
from podium.task import Task
from podium.testing.toys import CLASSES, FEATURES, toy
from tests.integration.processes import document, finish, settings, torchrun
from tests.integration.processes import podium as cli

TASK = "podium.testing.toys:toy"  # 44 samples, steps of 12: four an epoch
ASYNC = "parameter-server:mode=async"


def train(out: Path, **options: Any) -> RunResult:
    return podium.train(TASK, launcher="threads", out=str(out), **{"workers": 2, **options})


# The run's folder.


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    first = train(tmp_path, run_dir=tmp_path / "a", steps=1)
    before = list(read_records(tmp_path / "a"))
    for options in ({}, {"resume": first.run_dir}):
        with pytest.raises(ConfigError, match=rf"got {tmp_path}/a, .* add --resume {tmp_path}/a"):
            train(tmp_path, run_dir=tmp_path / "a", **options)
    assert list(read_records(tmp_path / "a")) == before


def test_a_script_is_refused_the_folder_of_a_run_too(tmp_path: Path) -> None:
    config = RunConfig(task=__file__, run_dir=str(tmp_path))
    assert plan_script(config).run_dir == tmp_path
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="--resume"):
        plan_script(config)


def test_a_resumed_run_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    first = train(tmp_path, steps=1)
    second = train(tmp_path, steps=2, resume=first.run_dir)
    third = train(tmp_path, steps=3, resume=second.run_dir, run_dir=tmp_path / "named")
    assert len({first.run_dir, second.run_dir, third.run_dir}) == 3


def test_a_rank_takes_the_folder_that_another_chose(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")  # the first rank may have been quick
    job = prepare(RunConfig(task=TASK), chosen=tmp_path)
    assert (job.run_dir, job.config.run_dir) == (tmp_path, str(tmp_path))
    script = plan_script(RunConfig(task=__file__), chosen=tmp_path)
    assert (script.run_dir, script.config.run_dir) == (tmp_path, str(tmp_path))


@pytest.mark.slow
def test_under_torchrun_a_named_folder_serves_one_run(tmp_path: Path) -> None:
    words = ("--task", TASK, *settings({"run_dir": tmp_path / "a", "steps": 2, "threads": 1}))
    code, _, err = torchrun(2, *words)
    assert code == 0, err
    code, _, err = torchrun(2, *words)
    assert code != 0
    assert f"add --resume {tmp_path}/a" in err


# Counts after a resume.


@pytest.mark.parametrize("strategy", ["all-reduce", ASYNC])
def test_steps_and_epochs_of_a_resumed_run_are_since_the_beginning(strategy: str, tmp_path: Path) -> None:
    whole = train(tmp_path, strategy=strategy, steps=6)
    first = train(tmp_path, strategy=strategy, steps=3)
    rest = train(tmp_path, strategy=strategy, steps=6, resume=first.run_dir, workers=3)
    assert (whole.steps, first.steps, rest.steps) == (6, 3, 6)
    assert rest.epochs == whole.epochs == whole.samples / 44
    assert first.samples + rest.samples == whole.samples


def test_updates_are_those_of_this_run(tmp_path: Path) -> None:
    first = train(tmp_path, strategy=f"{ASYNC},servers=2", steps=3)
    rest = train(tmp_path, strategy=f"{ASYNC},servers=2,lease=1", steps=6, resume=first.run_dir)
    assert first.updates == 2 * 3
    assert rest.updates == rest.samples
    assert train(tmp_path, strategy="parameter-server", steps=1).updates == 0


# Names and arguments.


@pytest.mark.parametrize(
    ("text", "strategy", "label"),
    [
        ("solo", Solo(), "solo"),
        ("all-reduce:overlap=false", AllReduce(overlap=False), "all-reduce(overlap=False)"),
        ("all-reduce:overlap=true", AllReduce(), "all-reduce"),
        (ASYNC, ParameterServer(mode="async"), "parameter-server(mode=async)"),
        (
            "parameter-server:servers=2,lease=none,mode=async",
            ParameterServer(mode="async", servers=2),
            "parameter-server(mode=async, servers=2)",
        ),
    ],
)
def test_a_label_holds_what_differs_from_the_default(text: str, strategy: Any, label: str) -> None:
    name, options = parse_strategy(text)
    assert label_of(name, make_strategy(name, options)) == label_of(name, strategy) == label


def test_text_and_instance_are_called_the_same(tmp_path: Path) -> None:
    named, made = (
        train(tmp_path, strategy=strategy, steps=1).strategy
        for strategy in ("parameter-server:servers=2", ParameterServer(servers=2))
    )
    assert named == made == "parameter-server(servers=2)"


def test_shares_of_asynchronous_workers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^parameter-server\(mode=async\): .* shares must not be set, got \(3"):
        train(tmp_path, strategy=ASYNC, shares=(3, 1))
    train(tmp_path, strategy="parameter-server", shares=(3, 1), steps=1)


def test_a_strategy_of_ones_own_may_live_in_a_module_without_a_dot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = Path(__file__).parents[1] / "examples" / "my_strategy.py"
    (tmp_path / "mystrat.py").write_text(example.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mystrat", raising=False)
    result = train(tmp_path, strategy="mystrat:LocalSteps:every=4", steps=4)
    assert result.strategy == "mystrat:LocalSteps(every=4)"


@pytest.mark.parametrize(
    ("task", "strategy", "message"),
    [
        (toy, "solo", "task must be a name or a Task, got a function; call it"),
        (podium.Task, "solo", "task must be a name or a Task, got a class; make an instance"),
        (None, "solo", "task must be a name or a Task, got None"),
        (TASK, AllReduce, "strategy must be a name or a Strategy, got a class; make an instance"),
        (TASK, make_strategy, "strategy must be a name or a Strategy, got a function; call it"),
    ],
)
def test_what_is_neither_a_name_nor_an_instance_is_refused(task: Any, strategy: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        podium.train(task, strategy=strategy)


# Validations that give no number.


def spoilt() -> Data:
    """One test sample is no number."""
    inputs = torch.randn(40, FEATURES, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(40) % CLASSES
    tests = inputs[:8].clone()
    tests[3, 0] = float("nan")
    return Data(ArrayDataset(inputs, targets), ArrayDataset(tests, targets[:8]))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_last_validation_that_is_not_finite_leaves_a_result_with_a_word(value: str, tmp_path: Path) -> None:
    metrics = {"odd": lambda outputs, targets: float(value), "fine": lambda outputs, targets: 0.5}
    task = dataclasses.replace(toy(), data=spoilt, metrics=metrics)
    result = podium.train(task, launcher="threads", run_dir=str(tmp_path / "run"))
    assert result.status == "finished"
    assert math.isnan(result.loss)
    assert str(result.metrics["odd"]) == value
    assert [type(row["loss"]) for row in result.history] == [float] * len(result.history)
    written = json.loads((tmp_path / "run" / "result.json").read_text(), parse_constant=pytest.fail)
    assert (written["loss"], written["metrics"]) == ("nan", {"odd": value, "fine": 0.5})
    told = summary(result, RunConfig(task="toy"))
    assert "warning    the last validation's loss, odd are not finite: check the test data" in told


@pytest.mark.slow
def test_the_command_line_reports_a_last_validation_that_is_not_finite(tmp_path: Path) -> None:
    (tmp_path / "spoilt.py").write_text("from tests.test_launch import spoilt_task as make\n")
    words = ("train", f"{tmp_path}/spoilt.py:make", "--launcher", "threads", "--set", f"out={tmp_path}/runs")
    code, out, err = finish(cli(*words))
    assert (code, "Traceback" in err) == (0, False), err
    assert "the last validation's loss is not finite" in out
    code, out, err = finish(cli(*words, "--json"))
    assert (code, document(out)["loss"]) == (0, "nan"), err


def spoilt_task() -> Task:
    return dataclasses.replace(toy(), data=spoilt)
