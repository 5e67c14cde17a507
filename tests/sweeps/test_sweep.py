"""A sweep from what was asked for to its report, on models of a few hundred parameters."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.model_selection import KFold
from torch import nn
from torch.nn.functional import cross_entropy

from podium.data.base import ArrayDataset, Data, MapDataset
from podium.errors import ConfigError, RecordError, TrainingError, UnknownName
from podium.lab.sweeps import sweep as run_sweep
from podium.lab.sweeps import write_all
from podium.lab.sweeps.figures import Map, OneOption, Parallel, score_figure, timeline_figure
from podium.lab.sweeps.table import format_statuses
from podium.records.folder_lock import folder_lock
from podium.records.recorder import read_records, to_json
from podium.sweeps.answer import answer_of
from podium.sweeps.best_models import BestModelKeeper
from podium.sweeps.fingerprint import describe_data
from podium.sweeps.formats import format_mean, format_number
from podium.sweeps.parts import SpareParts
from podium.sweeps.plan import plan
from podium.sweeps.queue import read_outcomes
from podium.sweeps.ranking import Point, Score, find_points, find_rivals
from podium.sweeps.recipe import Recipe
from podium.sweeps.result import Sweep, read_sweep
from podium.sweeps.search.base import Source
from podium.sweeps.search.crossed import CrossedSource
from podium.sweeps.stopping.base import Ledger, Stopping
from podium.sweeps.trial import GO, Evaluation, Outcome, Trial, Verdict
from podium.task import Task, accuracy


@cache
def blobs() -> Data:
    """Three clouds in four dimensions that overlap a little."""
    rng = np.random.default_rng(0)
    middles = rng.normal(size=(3, 4)) * 1.5
    parts = []
    for count in (120, 60):
        kinds = np.arange(count) % 3
        points = torch.tensor(middles[kinds] + rng.normal(size=(count, 4)), dtype=torch.float32)
        parts.append(ArrayDataset(points, torch.tensor(kinds)))
    return Data(*parts)


def clouds(*, hidden: int = 8, lr: float = 0.1, batch_size: int = 20, epochs: int = 2, moody: bool = False) -> Task:
    if hidden < 0:
        raise ValueError(f"no layer has {hidden} units")
    layers = [nn.Linear(4, hidden), Moody() if moody else nn.ReLU(), nn.Linear(hidden, 3)]
    return Task(
        name="clouds",
        model=lambda: nn.Sequential(*[_again(layer) for layer in layers]),
        data=blobs,
        loss=cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        metrics={"accuracy": accuracy},
        batch_size=batch_size,
        epochs=epochs,
    )


def _again(layer: nn.Module) -> nn.Module:
    return nn.Linear(layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else layer


class Moody(nn.Module):
    """Branches on a value, which many models at once cannot."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() if x.mean() > -1e9 else x


def sweep(folder: Path, **asked: Any) -> Sweep:
    given = {"executor": "fused", "out": folder, "device": "cpu", **asked}
    return run_sweep(given.pop("task", clouds), **given)


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return list(read_records(folder / f"{name}.jsonl"))


class PlainRule(Stopping):
    name = "plain"

    def judge(self, trial: Trial, evaluation: Evaluation, ledger: Ledger) -> Verdict:
        return GO


class PlainSource(Source):
    """A point with the next number, without end."""

    asked = 0
    total = None  # type: ignore[assignment]  # nobody knows
    exhausted = False  # type: ignore[assignment]

    def ask(self) -> Trial | None:
        self.asked += 1
        return Trial(number=self.asked - 1, point=self.asked - 1, options={"lr": 1 / self.asked})


class TestAWholeSweep:
    @pytest.fixture(scope="class")
    @classmethod
    def found(cls, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
        folder = tmp_path_factory.mktemp("sweep") / "whole"
        return sweep(folder, grid={"lr": [0.3, 0.1, 0.001], "hidden": [4, 8]}, folds=3, seeds=2, executor="auto")

    @pytest.mark.slow
    def test_every_point_has_a_trial_for_each_fold_and_seed(self, found: Sweep) -> None:
        trials = [(o.trial.point, o.trial.fold, o.trial.seed) for o in found.outcomes]
        assert len(trials) == len(set(trials)) == 6 * 3 * 2
        assert found.status == "finished"

    def test_means_are_over_folds_and_seeds_and_the_best_comes_first(self, found: Sweep) -> None:
        for point in found.points:
            values = [o.evaluation.metrics["accuracy"] for o in found.outcomes if o.trial.point == point.number]  # type: ignore[union-attr]
            assert (point.n, point.mean) == (6, pytest.approx(np.mean(values)))
            assert point.sd == pytest.approx(np.std(values, ddof=1))
            low, high = stats.t.interval(0.95, 5, loc=np.mean(values), scale=stats.sem(values))
            assert (point.low, point.high) == (pytest.approx(low), pytest.approx(high))
        means = [point.mean for point in found.points]
        assert means == sorted(means, reverse=True)  # type: ignore[type-var]

    def test_the_best_state_gives_the_score_that_is_told_of_it(self, found: Sweep) -> None:
        best = found.best_trial
        assert best is not None and best.evaluation is not None and found.best is not None
        assert best.trial.point == found.best.number
        recipe = plan(clouds, grid={"lr": [0.1]}, folds=3, device="cpu").recipe
        parts = recipe.make(best.trial)
        parts.model.load_state_dict(found.best_state())
        inputs, targets = blobs().train.gather(parts.valid)
        assert accuracy(parts.model.eval()(inputs), targets) == pytest.approx(best.evaluation.metrics["accuracy"])

    def test_only_the_best_model_is_left(self, found: Sweep) -> None:
        assert found.best_trial is not None
        left = [str(path.relative_to(found.folder)) for path in (Path(found.folder) / "models").iterdir()]
        assert left == [found.best_trial.model]

    def test_choices_say_why(self, found: Sweep) -> None:
        assert [choice["group"] for choice in found.choices] == [0, 1]
        assert all(choice["why"] and choice["table"] for choice in found.choices)

    def test_what_was_measured_is_there_and_what_was_not_says_why(self, found: Sweep) -> None:
        assert found.seconds > 0 and found.trials_per_s == pytest.approx(36 / found.seconds)
        assert found.samples_per_s == pytest.approx(sum(o.samples for o in found.outcomes) / found.seconds)
        assert found.reading is not None and found.reading["energy_j"] is None and found.reading["absent"]["energy_j"]

    def test_it_reads_the_same_from_its_folder(self, found: Sweep) -> None:
        again = read_sweep(found.folder)
        assert dataclasses.replace(again, report=found.report, table=found.table) == found

    def test_the_report_holds_the_answer_and_the_figures_and_fetches_nothing(self, found: Sweep) -> None:
        page = Path(found.report).read_text()
        assert found.answer.partition(":")[0] in page and page.count("<svg") == 3
        assert "http://" not in page.replace("http://www.w3.org", "") and "<script" not in page
        for name in ("scores", "curves", "slots"):
            ElementTree.parse(Path(found.folder) / "figures" / f"{name}.svg")

    def test_the_table_has_a_line_for_each_point(self, found: Sweep) -> None:
        rows = Path(found.table).read_text().splitlines()
        assert rows[0].startswith("place,point,lr,hidden,accuracy_mean") and len(rows) == 7

    def test_slots_say_which_trial_sat_where(self, found: Sweep) -> None:
        rows = lines(Path(found.folder), "slots")
        assert {row["group"] for row in rows} == {0, 1}
        assert sorted(row["trial"] for row in rows) == list(range(36))
        assert all(0 <= row["began_s"] <= row["ended_s"] <= found.seconds for row in rows)

    def test_as_a_document_it_is_strict_json(self, found: Sweep) -> None:
        document = json.loads(to_json(found.to_dict()), parse_constant=pytest.fail)
        assert document["best"]["number"] == found.points[0].number and len(document["outcomes"]) == 36


@pytest.mark.slow
def test_one_after_another_comes_to_the_same(tmp_path: Path) -> None:
    asked = {"grid": ["lr=0.3,0.03"], "folds": 2}
    fused, alone = (sweep(tmp_path / name, executor=name, **asked) for name in ("fused", "sequential"))
    for one, other in zip(fused.points, alone.points, strict=True):
        assert one.options == other.options and one.mean == pytest.approx(other.mean, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["sequential", "fused:probed=false", "fused:probed=false,width=2"])
def test_each_model_is_built_once(tmp_path: Path, executor: str) -> None:
    count = 0

    def counted(*, lr: float = 0.1, hidden: int = 8) -> Task:
        task = clouds(lr=lr, hidden=hidden)

        def model() -> nn.Module:
            nonlocal count
            count += 1
            return task.model()

        return dataclasses.replace(task, model=model)

    sweep(tmp_path, task=counted, grid={"lr": [0.1, 0.2, 0.3], "hidden": [4, 8]}, executor=executor)
    assert count == 6 + 1, "one more at the beginning, to see that the task makes new ones"


def test_data_are_opened_once_with_folds_too(tmp_path: Path) -> None:
    opened: list[str] = []

    def counted(*, lr: float = 0.1) -> Task:
        def data() -> Data:
            opened.append("once")
            return blobs()

        return dataclasses.replace(clouds(lr=lr), data=data)

    sweep(tmp_path, task=counted, grid={"lr": [0.1, 0.2]}, folds=3, executor="sequential")
    assert opened == ["once"]


def test_models_beyond_the_bound_of_spare_parts_are_built_again() -> None:
    recipe = Recipe(task=clouds)
    first, second = (recipe.make(Trial(number=number)) for number in range(2))
    nbytes = sum(tensor.nbytes for tensor in first.model.state_dict().values())
    spare = SpareParts(most_bytes=nbytes)
    spare.push(first)
    spare.push(second)
    assert spare.pop(second.trial) is None
    assert spare.pop(dataclasses.replace(first.trial, seed=1)) is None
    spare.push(second)
    assert spare.pop(second.trial) is second
    assert spare.pop(second.trial) is None


def test_a_sweep_that_was_stopped_goes_on_and_trains_each_trial_once(tmp_path: Path) -> None:
    stop = threading.Event()

    def after_five(event: dict[str, Any]) -> None:
        if event["event"] == "outcome" and event["done"] == 5:
            stop.set()

    asked: dict[str, Any] = {"grid": {"lr": [0.3, 0.1, 0.03]}, "folds": 4, "executor": "sequential"}
    first = sweep(tmp_path / "a", on_event=after_five, stop=stop, **asked)
    assert (first.status, len(first.outcomes)) == ("stopped", 5)
    second = sweep(tmp_path / "a", **asked)
    assert [session["trained"] for session in second.sessions] == [5, 7]
    whole = sweep(tmp_path / "b", **asked)
    assert sorted(o.trial.number for o in second.outcomes) == list(range(12))
    assert [(p.number, p.mean) for p in second.points] == [(p.number, p.mean) for p in whole.points]
    third = sweep(tmp_path / "a", **asked)
    assert third.sessions[-1]["trained"] == 0 and third.points == second.points
    assert third.samples_per_s is not None


@pytest.mark.slow
def test_another_sweep_in_the_same_folder_is_refused_with_what_differs(tmp_path: Path) -> None:
    sweep(tmp_path / "a", grid={"lr": [0.3, 0.1]})
    with pytest.raises(ConfigError, match=r"with search \{'space': \['lr=0.3\|0.1'\]\}; wanted .*lr=0.3\|0.2"):
        sweep(tmp_path / "a", grid={"lr": [0.3, 0.2]})
    with pytest.raises(ConfigError, match=r"with options \{\}; wanted \{'epochs': 3\}"):
        sweep(tmp_path / "a", grid={"lr": [0.3, 0.1]}, epochs=3)
    assert sweep(tmp_path / "a", grid={"lr": [0.3, 0.1]}, executor="sequential").status == "finished"


def test_a_manifest_that_was_half_written_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"podium": "0.')
    assert sweep(tmp_path, grid={"lr": [0.3]}, executor="sequential", epochs=1).status == "finished"
    (tmp_path / "manifest.json").write_text('{"podium": "0.')
    with pytest.raises(ConfigError, match="holds trials without a whole manifest"):
        sweep(tmp_path, grid={"lr": [0.3]}, executor="sequential", epochs=1)


@pytest.mark.slow
def test_two_sweeps_in_one_folder_at_once_are_refused_and_a_lock_left_behind_is_none(tmp_path: Path) -> None:
    folder, refused = tmp_path / "a", []

    def meanwhile(event: dict[str, Any]) -> None:
        if event["event"] == "outcome" and not refused:
            with pytest.raises(
                ConfigError, match=f"{folder}: another sweep must not be under way there, got one .this process"
            ) as e:
                sweep(folder, grid={"lr": [0.3, 0.1]})
            refused.append(e.value)

    first = sweep(folder, grid={"lr": [0.3, 0.1]}, on_event=meanwhile)
    assert refused and len(first.outcomes) == 2 and len(lines(folder, "results")) == 2
    (folder / ".lock").write_text("process 1 on a host")  # as after a process that died
    assert sweep(folder, grid={"lr": [0.3, 0.1]}).sessions[-1]["trained"] == 0


def test_when_no_more_can_be_written_the_file_that_was_first_is_named(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(event: dict[str, Any]) -> None:
        if event["event"] == "sweep":  # from now on no file may grow: the kernel says so as of a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))

    try:
        with pytest.raises(RecordError, match=r"trials\.jsonl cannot be written: .*File too large"):
            sweep(tmp_path / "a", grid={"lr": [0.3, 0.1]}, on_event=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sweep(tmp_path / "a", grid={"lr": [0.3, 0.1]}).status == "finished"


def test_a_process_that_the_task_has_forked_does_not_hold_the_folder(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from podium.records.folder_lock import folder_lock\n"
        "with folder_lock(Path(sys.argv[1]), 'sweep'):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        time.sleep(30)\n"
        "        os._exit(0)\n"
        "    print(child, flush=True)\n"
        "    time.sleep(30)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(ConfigError, match=f"got one .process {holder.pid} on"), folder_lock(tmp_path, "sweep"):
                pass
            holder.kill()
            holder.wait(10)
            with folder_lock(tmp_path, "sweep"):  # though the child lives
                os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_search_without_end_is_trained_and_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.sweeps.waiting.MOST_WAITING", 8)
    stop, source = threading.Event(), PlainSource()

    def after_twelve(event: dict[str, Any]) -> None:
        if event["event"] == "outcome" and event["done"] == 12:
            stop.set()

    found = sweep(tmp_path / "a", search=source, on_event=after_twelve, stop=stop, executor="sequential", epochs=1)
    assert found.status == "stopped" and len(found.outcomes) == 12 and source.asked < 30


@pytest.mark.slow
def test_a_failed_trial_without_the_metric_is_in_the_report(tmp_path: Path) -> None:
    sweep(tmp_path / "a", grid={"lr": [0.3, 0.1]}, keep="best")
    path = tmp_path / "a" / "results.jsonl"
    rows = lines(tmp_path / "a", "results")
    rows[1] |= {"status": "failed", "why": "it has no accuracy"}
    for evaluation in (*rows[1]["history"], rows[1]["evaluation"]):
        evaluation["metrics"] = {}
    path.write_text("".join(to_json(row) + "\n" for row in rows))
    assert "it has no accuracy" in Path(write_all(tmp_path / "a").report).read_text()
    config: dict[str, Any] = {"metric": "accuracy", "maximize": True, "seeds": [0], "folds": None}
    BestModelKeeper(tmp_path / "a", config, read_outcomes(tmp_path / "a"))


def test_a_search_that_looks_the_other_way_is_refused() -> None:
    search = PlainSource()
    search.maximize = False  # type: ignore[attr-defined]  # as a search of Optuna's has it
    with pytest.raises(ConfigError, match="a PlainSource of this sweep must maximize, got one to minimize"):
        plan(clouds, device="cpu", search=search)
    assert plan(clouds, device="cpu", search=CrossedSource(search), metric="loss").source.total is None


def test_a_crossed_search_that_was_made_already_brings_its_seeds() -> None:
    made = plan(clouds, device="cpu", search=CrossedSource(PlainSource(), seeds=(0, 1, 5)))
    assert made.config["seeds"] == [0, 1, 5]


def test_rules_that_can_act_and_numbers_of_numpy_are_taken() -> None:
    plan(clouds, device="cpu", stopping="asha:grace=2", epochs=3)
    plan(clouds, device="cpu", stopping="wilcoxon", folds=4, eval_every=0)
    plan(clouds, device="cpu", stopping="asha:grace=9", grid={"epochs": [1, 10]})
    made = plan(clouds, device="cpu", seeds=np.int64(2), folds=np.int64(3))  # type: ignore[arg-type]  # as from an array
    assert made.source.total == 6
    assert plan(clouds, device="cpu", seeds=np.array([3, 4])).config["seeds"] == [3, 4]  # type: ignore[arg-type]


def test_a_task_that_goes_elsewhere_does_not_take_the_folder_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir(), elsewhere.mkdir()
    moves = f"    os.chdir({str(elsewhere)!r})\n    x = torch.linspace"
    code = TestGoingOnWithSomethingElse.CODE.replace("    x = torch.linspace", moves)
    (here / "moves.py").write_text(f"import os\n{code}")
    monkeypatch.chdir(here)
    asked: dict[str, Any] = {"task": "moves.py:line", "grid": {"lr": [0.1, 0.2]}, "executor": "sequential"}
    found = sweep(Path("a"), **asked)
    assert len(found.outcomes) == 2 and Path(found.report).is_file() and found.folder == str(here / "a")
    assert not list(elsewhere.iterdir())
    monkeypatch.chdir(here)
    assert sweep(Path("a"), **asked).sessions[-1]["trained"] == 0


class TestGoingOnWithSomethingElse:
    CODE = """
import torch
from podium import Task
from podium.data.base import ArrayDataset, Data

def data():
    x = torch.linspace(-1, 1, 16)[:, None]
    return Data(ArrayDataset(x, 2 * x), ArrayDataset(x[:5], 2 * x[:5]))

def line(*, lr=0.1):  # a comment
    return Task(name="line", model=lambda: torch.nn.Linear(1, 1), data=data, loss=torch.nn.functional.mse_loss,
                optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr), batch_size=8, epochs=1)
"""

    def test_a_changed_task_or_changed_data_are_refused_with_what_changed(self, tmp_path: Path) -> None:
        file, folder = tmp_path / "line.py", tmp_path / "a"
        asked: dict[str, Any] = {"task": f"{file}:line", "grid": {"lr": [0.1, 0.2]}, "executor": "sequential"}

        def go_on(code: str) -> Sweep:
            file.write_text(code)
            return sweep(folder, **asked)

        assert len(go_on(self.CODE).outcomes) == 2
        as_script = f"{self.CODE}\nif __name__ == '__main__':\n    print(line())\n"
        assert go_on(as_script.replace("a comment", "another")).sessions[-1]["trained"] == 0
        documented = self.CODE.replace("def data():\n", "def data():\n    'Sixteen points.'\n")
        assert documented != self.CODE and go_on(documented).sessions[-1]["trained"] == 0
        with pytest.raises(ConfigError, match=r"another source file of the task, \{'digest': '\w+'\}; now it is"):
            go_on(self.CODE.replace("Linear(1, 1)", "Linear(1, 1, bias=False)"))

    def test_data_are_known_by_their_number_shapes_and_ends(self) -> None:
        x = torch.arange(12.0).reshape(4, 3)

        def told(inputs: torch.Tensor) -> dict[str, Any]:
            some = ArrayDataset(inputs, torch.arange(len(inputs)))
            return describe_data(Data(some, some))

        assert told(x) == told(x.clone())
        assert told(x)["train"]["each"] == "float32[3] int64" and told(x)["train"]["samples"] == 4
        others = [x[:3], x.double(), x + torch.tensor([[0.0], [0], [0], [1]])]
        assert len({str(told(other)) for other in [x, *others]}) == 4

    def test_data_that_come_out_otherwise_each_time_are_known_by_number_and_shape(self) -> None:
        class Jittered:
            def __len__(self) -> int:
                return 3

            def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
                return np.random.default_rng().normal(size=2), index

        some = MapDataset(Jittered())
        assert describe_data(Data(some, some))["train"] == {"samples": 3, "each": "float64[2] int64", "ends": None}

    @pytest.mark.slow
    def test_other_data_in_the_same_folder_are_refused(self, tmp_path: Path) -> None:
        sweep(tmp_path / "a", grid={"lr": [0.3]})
        before = json.loads((tmp_path / "a" / "manifest.json").read_text())
        before["config"]["data"]["train"]["samples"] = 119
        (tmp_path / "a" / "manifest.json").write_text(json.dumps(before))
        with pytest.raises(ConfigError, match=r"another data set, \{'train': \{.*119.*; now it is .*120"):
            sweep(tmp_path / "a", grid={"lr": [0.3]})


class TestSources:
    @pytest.mark.slow
    def test_draws_come_from_ranges_and_repeat(self, tmp_path: Path) -> None:
        asked = {"space": {"lr": "1e-3..1:log"}, "random": 4, "eval_every": 0}
        one, two = (sweep(tmp_path / name, **asked) for name in "ab")
        assert len(one.points) == 4 and [p.options for p in one.points] == [p.options for p in two.points]
        assert all(1e-3 <= p.options["lr"] <= 1 for p in one.points)

    @pytest.mark.slow
    def test_a_list_is_trained_as_written(self, tmp_path: Path) -> None:
        found = sweep(tmp_path / "a", trials=[{"lr": 0.1}, {"lr": 0.2, "hidden": 5}])
        assert sorted(map(str, (p.options for p in found.points))) == ["{'lr': 0.1}", "{'lr': 0.2, 'hidden': 5}"]

    @pytest.mark.slow
    def test_optuna_may_bring_new_structures_as_it_goes_on(self, tmp_path: Path) -> None:
        pytest.importorskip("optuna")
        space = {"lr": "1e-2..1:log", "hidden": [2, 3, 4, 5]}
        found = sweep(tmp_path / "a", space=space, search="optuna:points=12,parallel=2,sampler=random", epochs=1)
        assert len(found.points) == 12 and found.status == "finished"
        assert len({row["group"] for row in lines(tmp_path / "a", "slots")}) > 1

    def test_one_value_of_an_option_that_is_a_list_is_a_list_of_one(self, tmp_path: Path) -> None:
        made = plan("digits-mlp", grid=["hidden=32|64,16"], device="cpu")
        assert made.config["search"]["space"] == ['hidden=[32]|"64,16"']

    def test_nothing_to_search_is_one_point(self, tmp_path: Path) -> None:
        found = sweep(tmp_path / "a", folds=KFold(3))
        assert len(found.points) == 1 and found.answer.startswith("One point: the task as it is")


class TestStopping:
    def test_bad_trials_are_stopped_and_the_best_is_not(self, tmp_path: Path) -> None:
        rates = [0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7]
        found = sweep(tmp_path / "a", grid={"lr": rates}, stopping="asha:grace=1,factor=3", epochs=4)
        counts = Counter(outcome.status for outcome in found.outcomes)
        assert counts["stopped"] >= 4 and found.best is not None and found.best.options["lr"] >= 0.03
        assert "stopped early; no mean includes them" in found.answer

    def test_a_population_trains_through_fused_rows_and_can_be_gone_on_with(self, tmp_path: Path) -> None:
        asked = {"grid": {"lr": [0.3, 0.1, 1e-4, 1e-5]}, "stopping": "pbt", "epochs": 4}
        found = sweep(tmp_path / "a", executor="auto", **asked)
        assert found.choices[0]["executor"] == "fused" and len(found.outcomes) == 4
        became = [row for row in lines(tmp_path / "a", "reports") if row["verdict"] == "become"]
        assert became
        assert sorted(p.options["lr"] for p in found.points) == [1e-5, 1e-4, 0.1, 0.3]  # as asked for
        assert "Best of 4 points, as it began: " in found.answer and "copied each other" in found.answer
        assert found.rivals == () and "copied each other during training" in Path(found.report).read_text()
        assert sweep(tmp_path / "a", executor="auto", **asked).sessions[-1]["trained"] == 0

    def test_a_copied_trial_is_told_with_the_options_it_ended_with(self) -> None:
        trials = [Trial(number=n, point=n, options={"lr": lr}) for n, lr in enumerate([1e-4, 0.3])]
        outcomes = [
            Outcome(
                trial=dataclasses.replace(trial, options={"lr": 0.25 + trial.number}),
                status="finished",
                evaluation=Evaluation(1, 1.0, 0.0, {"accuracy": 0.9 - trial.number / 10}),
            )
            for trial in trials
        ]
        found = find_points(trials, outcomes, "accuracy", maximize=True)
        config: dict[str, Any] = {"metric": "accuracy", "maximize": True, "folds": None, "seeds": [0], "copies": True}
        answer = answer_of(found, find_rivals(found, config), outcomes, config)
        assert "as it began: lr=0.0001" in answer
        assert "trial (0, 0.9000) took over another trial's model on the way and ended with lr=0.25." in answer

    def test_a_population_needs_rows_and_one_structure(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="executor must be auto or fused, got sequential"):
            sweep(tmp_path / "a", grid={"lr": [0.3, 0.1]}, stopping="pbt", executor="sequential")
        with pytest.raises(ConfigError, match="all must have one structure, got 2"):
            sweep(tmp_path / "b", grid={"hidden": [3, 4]}, stopping="pbt")
        with pytest.raises(ConfigError, match="must train side by side, got 1 that wait for a row"):
            sweep(tmp_path / "c", grid={"lr": [0.3, 0.2, 0.1]}, stopping="pbt", epochs=3, executor="fused:width=2")


class TestTrouble:
    def test_a_trial_that_cannot_be_made_fails_beside_good_ones(self, tmp_path: Path) -> None:
        found = sweep(tmp_path / "a", grid={"hidden": [8, -1]}, seeds=2)
        assert Counter(o.status for o in found.outcomes) == {"finished": 2, "failed": 2}
        assert found.points[1].statuses == {"failed": 2} and found.points[1].mean is None
        assert "no layer has -1 units" in Path(found.report).read_text()

    def test_a_first_trial_that_cannot_be_made_is_no_reason_to_end_and_counts_as_none_trained(
        self, tmp_path: Path
    ) -> None:
        found = sweep(tmp_path / "a", grid={"hidden": [-1, 8]})
        assert Counter(o.status for o in found.outcomes) == {"finished": 1, "failed": 1}
        assert found.sessions[-1]["trained"] == 1 and found.trials_per_s == pytest.approx(1 / found.seconds)
        assert "in a session that was killed" not in Path(found.report).read_text()
        with pytest.raises(TrainingError, match="trial 0: ValueError: no layer has -2 units"):
            sweep(tmp_path / "b", grid={"hidden": [-2, -1]})
        assert not (tmp_path / "b").exists()

    def test_what_cannot_be_fused_is_trained_all_the_same_and_says_why(self, tmp_path: Path) -> None:
        found = sweep(tmp_path / "a", grid={"lr": [0.3, 0.1]}, options={"moody": True})
        assert [o.status for o in found.outcomes] == ["finished"] * 2
        (probe,) = found.probes
        assert not probe["fuses"] and probe["why"] and f"Not fused:</span> {probe['why'][:20]}" in _unescaped(found)

    def test_how_many_rows_there_were_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from podium.cli.sweep import told

        monkeypatch.setattr("podium.sweeps.fused.slots._NARROW_S", -1e9)  # whatever it costs
        trials = [{"epochs": 1 + (i > 4) + (i > 6)} for i in range(8)]
        found = sweep(tmp_path / "a", trials=trials, executor="fused", keep="none")
        assert found.widths == [[8, 3]] and "rows     8, then 3, as trials ended" in list(told(found))
        assert "narrower arrays: 8, then 3 rows" in _unescaped(found)
        turns = [{"event": "fell back", "why": "no room"}, {"event": "narrowed", "before": 4, "rows": 2}]
        fell = dataclasses.replace(found, turns=(*found.turns, *turns))
        assert fell.widths == [[8, 3], [4, 2]] and "fell back to one by one: no room" in list(told(fell))

    def test_a_population_that_cannot_be_fused_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="these trials cannot be fused"):
            sweep(tmp_path / "a", grid={"lr": [0.3, 0.1]}, options={"moody": True}, stopping="pbt")

    @pytest.mark.slow
    def test_without_matplotlib_the_report_says_which_extra_has_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = sweep(tmp_path / "a", grid={"lr": [0.3, 0.1]})
        page = Path(found.report).read_bytes()
        assert Path(write_all(found.folder).report).read_bytes() == page  # the same folder gives the same bytes
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert "pip install 'podium[study]'" in _unescaped(write_all(found))

    def test_when_every_point_is_wrong_that_is_said_before_anything_is_written(self, tmp_path: Path) -> None:
        with pytest.raises(UnknownName, match=r"'lrr'\. Did you mean 'lr'"):
            sweep(tmp_path / "a", grid={"lrr": [0.3]})
        with pytest.raises(ConfigError, match="epochs must be a whole number"):
            sweep(tmp_path / "a", grid={"epochs": [0, -1]})
        assert not (tmp_path / "a").exists()

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            ({"executor": "fuzed"}, "unknown executor 'fuzed'. Did you mean 'fused'"),
            ({"executor": "fused:widht=3"}, "option of executor fused 'widht'. Did you mean 'width'"),
            ({"metric": "acuracy"}, "unknown metric 'acuracy'. Did you mean 'accuracy'"),
            ({"keep": "bst"}, "way to keep models 'bst'. Did you mean 'best'"),
            ({"stopping": "ahsa"}, "Did you mean 'asha'"),
            ({"random": 3, "optuna": 3}, "points must come from one place, got random and optuna"),
            ({"epochs": 3, "grid": {"epochs": [1, 2]}}, "epochs must hold for all trials or be searched, got both"),
            ({"grid": {"lr": [0.1]}, "space": {"lr": [0.2]}}, "lr must be given once"),
            ({"trials": [{"lr": 0.1}], "grid": {"lr": [0.1]}}, "take no grid, got lr"),
            ({"space": {"lr": "0.1..1"}}, "got a range for lr"),
            ({"folds": "stratifid:3"}, "Did you mean 'stratified'"),
            ({"random": 3}, "what is searched must be given"),
            ({"trials": [{"lr": 0.1}, {"lrr": 0.2}]}, "Did you mean 'lr'"),
            ({"seeds": [-1]}, "seed must be between 0 and"),
            ({"executor": "processes"}, "name it"),
            ({"executor": "processes:mode=graph"}, "mode=graph needs a GPU"),
            ({"executor": "mps"}, "MPS needs a GPU"),
            ({"stopping": "asha", "eval_every": 0}, "eval_every must be at least 1, got 0"),
            ({"stopping": "asha:grace=2"}, "begins at epoch 2, so trials must be evaluated then or later"),
            ({"stopping": "median", "epochs": 4, "eval_every": 4}, "got 4 epochs and eval_every 4"),
            ({"stopping": "wilcoxon", "seeds": 3}, "at least least=4 trials, got 3"),
            ({"stopping": "pbt:explore=lrr", "grid": {"lr": [0.1, 0.2]}}, "option 'lrr'. Did you mean 'lr'"),
            ({"stopping": f"{__name__}:PlainRule"}, "must be a dataclass"),
            ({"search": f"{__name__}:PlainSource"}, "must be a dataclass"),
        ],
    )
    def test_refusals_name_what_must_hold(self, asked: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError) as refused:
            plan(clouds, device="cpu", **asked)
        assert message in str(refused.value)


def _unescaped(found: Sweep) -> str:
    import html

    return html.unescape(Path(found.report).read_text())


@pytest.mark.parametrize(("keep", "models"), [("all", 4), ("none", 0)])
def test_models_are_kept_as_asked(tmp_path: Path, keep: Any, models: int) -> None:
    found = sweep(tmp_path / "a", grid={"lr": [0.3, 0.1]}, folds=2, keep=keep)
    assert len(list((tmp_path / "a").glob("models/*"))) == models
    if keep == "none":
        with pytest.raises(RecordError, match="models were not kept"):
            found.best_state()


def points(*values: list[float]) -> list[Point]:
    made = []
    for number, some in enumerate(values):
        scores = tuple(Score(0, fold, 0, value) for fold, value in enumerate(some))
        made.append(Point(number=number, options={}, n=len(some), mean=math.fsum(some) / len(some), scores=scores))
    return made


class TestTellingPointsApart:
    CONFIG: dict[str, Any] = {"maximize": True, "folds": None}  # noqa: RUF012  # read only
    BEST, NEXT = [0.9, 0.92, 0.95, 0.91], [0.88, 0.91, 0.92, 0.9]

    def test_seeds_are_compared_by_a_paired_t_test(self) -> None:
        (rival,) = find_rivals(points(self.BEST, self.NEXT), self.CONFIG)
        assert rival.p == pytest.approx(stats.ttest_rel(self.BEST, self.NEXT).pvalue)
        assert rival.gap == pytest.approx(np.mean(self.BEST) - np.mean(self.NEXT))

    def test_folds_overlap_so_it_takes_more_to_tell_them_apart(self) -> None:
        folds = {**self.CONFIG, "folds": {"overlap": 1 / 3, "count": 4}}
        (rival,) = find_rivals(points(self.BEST, self.NEXT), folds)
        gaps = np.array(self.BEST) - np.array(self.NEXT)
        t = gaps.mean() / np.sqrt(gaps.var(ddof=1) * (1 / 4 + 1 / 3))
        assert rival.p == pytest.approx(2 * stats.t.sf(t, 3))

    def test_the_best_was_chosen_by_these_scores_so_all_pairs_of_points_count(self) -> None:
        one = find_rivals(points(self.BEST, self.NEXT), self.CONFIG)
        worse = [[0.1, 0.2, 0.1, 0.3], [0.1, 0.3, 0.1, 0.2]]
        two = find_rivals(points(self.BEST, self.NEXT, *worse), self.CONFIG)
        assert two[0].p == pytest.approx(6 * one[0].p)  # type: ignore[operator]

    def test_equally_good_points_are_rarely_told_apart(self) -> None:
        rng = np.random.default_rng(0)
        wrong = 0
        for _ in range(100):
            some = points(*map(list, rng.normal(size=(12, 5))))
            ranked = sorted(some, key=lambda point: -(point.mean or 0.0))
            wrong += any(rival.is_distinct for rival in find_rivals(ranked, self.CONFIG))
        assert wrong <= 8  # 3 are to be expected; 15, where only the eleven others were counted

    @pytest.mark.parametrize("kind", [np.float64, np.float32])
    def test_the_same_gap_in_a_few_pairs_is_luck_as_with_coins(self, kind: type[np.floating]) -> None:
        best, other = ([float(kind(v - gap)) for v in (0.975, 0.95, 0.9, 0.925, 0.9)] for gap in (0, 0.025))
        (two,) = find_rivals(points(best[:2], other[:2]), self.CONFIG)
        (five,) = find_rivals(points(best, other), self.CONFIG)
        assert (two.p, five.p) == (0.5, 0.0625) and not five.is_distinct
        (folds,) = find_rivals(points(best, other), {**self.CONFIG, "folds": {"overlap": 0.25, "count": 5}})
        assert folds.p is not None and five.p is not None and five.p < folds.p < 1

    def test_one_lucky_fold_is_not_the_best_of_five(self) -> None:
        lucky = [(0, 0, 0.99), *[(0, fold, None) for fold in range(1, 5)]]
        steady = [*[(1, fold, 0.97) for fold in range(4)], (1, 4, None)]
        outcomes = [
            Outcome(
                trial=Trial(number=number, point=point, fold=fold),
                status="finished" if value else "stopped",
                evaluation=Evaluation(1, 1.0, 0.0, {"accuracy": value or 0.9}),
            )
            for number, (point, fold, value) in enumerate([*lucky, *steady])
        ]
        found = find_points([o.trial for o in outcomes], outcomes, "accuracy", maximize=True)
        assert [(point.number, point.n) for point in found] == [(1, 4), (0, 1)]

    def test_one_pair_is_no_test_though_the_best_has_an_interval(self) -> None:
        config = {"metric": "accuracy", "maximize": True, "folds": None, "seeds": [0, 1]}
        some = points([0.9, 0.91], [0.8])
        answer = answer_of(some, find_rivals(some, config), [], config)
        assert "One pair of trials is no test" in answer and "One trial of each" not in answer

    def test_one_that_is_better_in_fewer_trials_is_not_called_worse(self) -> None:
        ahead = [0.95, 0.961, 0.97, 0.959]
        config = {"metric": "accuracy", "maximize": True, "folds": None, "seeds": list(range(6))}
        some = points([0.9, 0.91, 0.92, 0.91, 0.9, 0.9], ahead)
        (rival,) = find_rivals(some, config)
        assert rival.gap < 0 and rival.is_better and not rival.is_distinct
        assert "which is better in the 4 trials that both finished" in answer_of(some, [rival], [], config)

    def test_equal_scores_are_no_difference_and_one_pair_is_no_test(self) -> None:
        (same,) = find_rivals(points(self.BEST, self.BEST), self.CONFIG)
        (single,) = find_rivals(points([0.9], [0.1]), self.CONFIG)
        assert same.p == 1.0 and single.p is None and not single.is_distinct

    @pytest.mark.slow
    def test_the_answer_says_so(self, tmp_path: Path) -> None:
        level = sweep(tmp_path / "a", grid={"lr": [0.1, 0.1001]}, folds=3)
        assert "the best two are tied by these folds" in level.answer
        clear = sweep(tmp_path / "b", grid={"lr": [0.3, 1e-7]}, folds=6, epochs=6)
        assert "better than the next, lr=1e-07" in clear.answer
        single = sweep(tmp_path / "c", grid={"lr": [0.3, 0.1]})
        assert "One trial of each has no interval" in single.answer and "test data, which are" in single.answer


def test_very_small_scores_are_told_with_an_exponent() -> None:
    small = Point(number=0, options={}, n=2, mean=2.345e-10, low=1.345e-10, high=3.345e-10)
    assert (format_number(1e-10), format_number(2.3e-6)) == ("1.000e-10", "0.00000230")
    assert format_mean(small) == "2.3450000e-10 ± 1.0e-10"


def test_a_score_that_is_no_number_is_said_to_be_none() -> None:
    trials = [Trial(number=n, point=n // 2, seed=n % 2) for n in range(4)]
    scores = [0.5, math.nan, 0.4, math.nan]
    outcomes = [
        Outcome(trial=trial, status="finished", evaluation=Evaluation(1, 1.0, 0.0, {"accuracy": score}))
        for trial, score in zip(trials, scores, strict=True)
    ]
    found = find_points(trials, outcomes, "accuracy", maximize=True)
    assert [format_statuses(point) for point in found] == ["1, 1 without a score"] * 2
    config: dict[str, Any] = {"metric": "accuracy", "maximize": True, "folds": None, "seeds": [0, 1]}
    answer = answer_of(found, find_rivals(found, config), outcomes, config)
    assert "Of 4 trials 2 finished with a score that is no number" in answer and "trials have no score" in answer


def test_a_minimised_metric_has_its_smallest_first(tmp_path: Path) -> None:
    found = sweep(tmp_path / "a", grid={"lr": [1e-4, 0.3]}, metric="loss")
    assert not found.maximize and found.points[0].options == {"lr": 0.3}


def test_a_recipe_has_the_folds_of_its_plan() -> None:
    made = plan(clouds, folds="shuffle:4", device="cpu")
    assert isinstance(made.recipe, Recipe) and made.recipe.folds is not None and len(made.recipe.folds) == 4
    assert made.source.total == 4 and made.config["folds"]["overlap"] == pytest.approx(24 / 96)


class TestFigures:
    def swept(self, *options: dict[str, Any]) -> Sweep:
        """Points in the order of their means, as a sweep has them."""
        some = [
            Point(number=n, options=one, n=1, mean=1 - n / 10, scores=(Score(n, None, 0, 1 - n / 10),))
            for n, one in enumerate(options)
        ]
        facts: dict[str, Any] = {"answer": "", "rivals": (), "outcomes": (), "seconds": 0.0, "reading": None}
        rates: dict[str, Any] = {"trials_per_s": None, "samples_per_s": None, "folder": "", "status": "finished"}
        return Sweep(task="t", metric="accuracy", maximize=True, points=tuple(some), **facts, **rates)

    def test_one_option_is_a_line_over_its_values(self) -> None:
        figure = score_figure(self.swept({"lr": 0.1}, {"lr": 0.001}, {"lr": 1.0}))
        assert isinstance(figure, OneOption) and figure.log
        assert [(mark.x, mark.mean) for mark in figure.marks] == [(0.001, 0.9), (0.1, 1.0), (1.0, 0.8)]

    def test_two_options_that_were_combined_are_a_map_in_order(self) -> None:
        grid = [{"lr": lr, "hidden": [units]} for lr in (0.3, 0.1) for units in (64, 8, 16)]
        figure = score_figure(
            self.swept(
                *grid,
            )
        )
        assert isinstance(figure, Map)
        assert (figure.columns, figure.rows) == (("0.1", "0.3"), ("8", "16", "64"))
        assert figure.cells[2] == (pytest.approx(0.7), 1.0)

    def test_a_mean_of_zero_was_tried(self) -> None:
        found = self.swept(*[{"a": n % 4, "b": n // 4} for n in range(11)])
        figure = score_figure(found)
        assert isinstance(figure, Map) and figure.cells[2][2] == 0.0
        assert math.isnan(figure.cells[2][3])

    def test_more_options_are_lines_through_an_axis_for_each(self) -> None:
        figure = score_figure(
            self.swept({"a": 1, "b": "x", "c": 1}, {"a": 2, "b": "y", "c": 1}, {"a": 3, "b": "x", "c": 2})
        )
        assert isinstance(figure, Parallel)
        assert [axis.option for axis in figure.axes] == ["a", "b", "c", "accuracy"]
        assert [line[0] for line in figure.lines] == [0.0, 0.5, 1.0]
        assert figure.lines[0][-1] == 1.0 and figure.lines[2][-1] == 0.0

    def test_nothing_varied_is_no_figure(self) -> None:
        assert score_figure(self.swept({"a": 1})) is None

    def test_trials_without_rows_get_as_many_lanes_as_overlapped(self, tmp_path: Path) -> None:
        times = [(0, 0.0, 2.0), (1, 0.5, 1.0), (2, 1.0, 3.0), (3, 2.5, 4.0)]
        rows = [
            {"trial": t, "group": 0, "row": None, "began_s": a, "ended_s": b, "status": "finished"} for t, a, b in times
        ]
        (tmp_path / "slots.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        figure = timeline_figure(tmp_path)
        assert figure is not None and figure.lanes == ("row 0", "row 1")
        assert {stay.trial: stay.lane for stay in figure.stays} == {0: 0, 1: 1, 2: 1, 3: 0}
