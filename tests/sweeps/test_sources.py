"""Where trials come from: how many, which, and in what order."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError, MissingExtra, UnknownName
from podium.sweeps.search import SOURCES, make_source
from podium.sweeps.search.base import Source
from podium.sweeps.search.crossed import CrossedSource
from podium.sweeps.search.grid import Grid
from podium.sweeps.search.listed import PointList
from podium.sweeps.search.random import RandomDraws
from podium.sweeps.search.space import read_space
from podium.sweeps.trial import Outcome, Status, Trial

SPACE = ["lr=0.1,0.01", "width=16..64:int:3", "activation=relu,gelu"]


def all_of(source: Source) -> list[Trial]:
    trials = []
    while (trial := source.ask()) is not None:
        trials.append(trial)
    return trials


def ended(trial: Trial, status: Status = "finished", steps: int = 10) -> Outcome:
    return Outcome(trial=trial, status=status, steps=steps)


class Told(Source):
    """Three points, and what was told of them."""

    def __init__(self) -> None:
        self.told: list[tuple[int, str, float | None, int]] = []
        self._asked = 0

    @property
    def total(self) -> int:
        return 3

    @property
    def exhausted(self) -> bool:
        return self._asked == 3

    def ask(self) -> Trial | None:
        if self.exhausted:
            return None
        self._asked += 1
        return Trial(number=self._asked - 1, point=self._asked - 1, options={"x": self._asked})

    def tell(self, outcome: Outcome, score: float | None) -> None:
        self.told.append((outcome.trial.number, outcome.status, score, outcome.steps))


def test_a_grid_has_every_combination_once() -> None:
    source = Grid(space=read_space(SPACE))
    trials = all_of(source)
    assert len(trials) == source.total == 2 * 3 * 2 and source.exhausted
    assert len({json.dumps(trial.options) for trial in trials}) == 12
    assert [trial.number for trial in trials] == [trial.point for trial in trials] == list(range(12))
    assert trials[1].options == {"lr": 0.1, "width": 16, "activation": "gelu"}


def test_a_shuffled_grid_has_the_same_points_in_an_order_that_the_seed_decides() -> None:
    def options(how: str) -> list[str]:
        return [json.dumps(trial.options) for trial in all_of(make_source(how, SPACE))]

    plain, shuffled = options("grid"), options("grid:shuffle=true")
    assert sorted(shuffled) == sorted(plain) and shuffled != plain
    assert options("grid:shuffle=true,seed=0") == shuffled != options("grid:shuffle=true,seed=1")


def test_a_grid_over_nothing_is_one_trial_with_the_tasks_own_options() -> None:
    assert [trial.options for trial in all_of(make_source("grid"))] == [{}]


def test_a_range_in_a_grid_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"got a range for lr; .*`lr=0.001..0.1:log:5`"):
        make_source("grid", ["lr=1e-3..1e-1:log"])


def test_points_folds_and_seeds_are_crossed_and_numbered_in_a_row() -> None:
    source = make_source("grid", SPACE, seeds=(3, 5), folds=4)
    trials = all_of(source)
    assert len(trials) == source.total == 12 * 4 * 2
    assert [trial.number for trial in trials] == list(range(96))
    by_point: dict[int, set[tuple[int | None, int]]] = {}
    for trial in trials:
        by_point.setdefault(trial.point, set()).add((trial.fold, trial.seed))
        assert trial.options == trials[8 * trial.point].options
    assert by_point == {point: {(f, s) for f in range(4) for s in (3, 5)} for point in range(12)}


def test_random_draws_are_repeatable_and_independent_of_what_else_is_drawn() -> None:
    def drawn(points: int, space: list[str], seed: int = 0) -> list[Any]:
        return [t.options["lr"] for t in all_of(RandomDraws(space=read_space(space), points=points, seed=seed))]

    lr = "lr=1e-4..1e-1:log"
    assert drawn(8, [lr]) == drawn(8, [lr]) == drawn(20, [lr])[:8] == drawn(8, ["p=0..1", lr])
    assert drawn(8, [lr]) != drawn(8, [lr], seed=1)
    assert len(set(drawn(20, [lr]))) == 20


def test_random_draws_are_the_same_on_every_machine() -> None:
    trial = RandomDraws(space=read_space(["lr=1e-4..1e-1:log", "w=1..9:int"]), points=1).ask()
    assert trial is not None and trial.options["w"] == 3
    assert trial.options["lr"] == pytest.approx(0.001573529029, rel=1e-9)


def test_without_a_word_a_list_is_a_grid_and_a_range_is_drawn() -> None:
    assert isinstance(make_source(None, ["lr=1,2"]).points, Grid)
    assert isinstance(make_source(None, ["lr=1..2"], points=3).points, RandomDraws)
    with pytest.raises(ConfigError, match="how many points must be given"):
        make_source(None, ["lr=1..2"])


def test_options_in_the_text_are_read() -> None:
    source = make_source("random:points=7,seed=9", ["lr=1..2"], seed=1).points
    assert isinstance(source, RandomDraws) and (source.points, source.seed) == (7, 9)


@pytest.mark.parametrize(
    ("how", "space", "points", "told"),
    [
        ("gird", (), None, "Did you mean 'grid'"),
        ("grid", ["lr=1,2"], 5, "must not be given"),
        ("list:file=x.json", ["lr=1,2"], None, "takes no space"),
        ("random:points=0", ["lr=1..2"], None, "at least 1"),
        ("random:pionts=3,points=3", ["lr=1..2"], None, "Did you mean 'points'"),
        ("list", (), None, "rows or a file"),
        ("random", (), 3, "what is searched must be given"),
        ("optuna:points=3", (), None, "what is searched must be given"),
    ],
)
def test_what_a_source_does_not_take_is_refused(how: str, space: Any, points: int | None, told: str) -> None:
    with pytest.raises(ConfigError, match="search") as error:
        make_source(how, space, points=points)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("points.json", '[{"lr": 0.1, "act": "relu"}, {"lr": 0.01, "betas": [0.9, 0.99]}]'),
        ("points.csv", 'lr,act,betas\n0.1,relu,\n0.01, ,"[0.9, 0.99]"\n'),
        ("points.csv", '\ufefflr,act,betas\n0.1,relu,\n0.01, ,"[0.9, 0.99]"\n'),
        ("points.toml", '[[point]]\nlr = 0.1\nact = "relu"\n[[point]]\nlr = 0.01\nbetas = [0.9, 0.99]\n'),
    ],
)
def test_a_file_of_points_reads_the_same_in_each_format(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    trials = all_of(make_source(f"list:file={tmp_path / name}"))
    assert [trial.options for trial in trials] == [{"lr": 0.1, "act": "relu"}, {"lr": 0.01, "betas": [0.9, 0.99]}]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("points.json", "[1, 2]", "each a table"),
        ("points.json", "[", "cannot be read as JSON"),
        ("points.toml", "lr = 1", "[[point]]"),
        ("points.csv", "lr,p\n1,2,3\n", "as many cells"),
        ("points.csv", "lr,p\n", "list of points"),
        ("points.csv", "lr,p\n1\n", "as many cells"),
        ("points.csv", "lr, lr\n1,2\n", "'lr' twice"),
        ("points.json", '[{"lr": 1, "lr": 2}]', "'lr' twice"),
        ("points.txt", "", "unknown ending"),
        ("points.json", '[{"seed": 1}]', "point 0: search space: seed is no option"),
    ],
)
def test_a_bad_file_of_points_is_refused(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        PointList(file=str(tmp_path / name))
    assert told in str(error.value)


def test_a_point_is_told_once_with_the_mean_when_all_its_trials_are_in() -> None:
    inner = Told()
    source = CrossedSource(inner, seeds=(0, 1), folds=2)
    trials = all_of(source)
    for trial in trials[:3]:
        source.tell(ended(trial), 0.5 + trial.number)
    assert inner.told == []
    source.tell(ended(trials[4]), 9.0)
    source.tell(ended(trials[3]), 0.5 + 3)
    assert inner.told == [(0, "finished", 2.0, 40)]


@pytest.mark.parametrize(
    ("statuses", "scores", "status", "mean"),
    [
        (("finished", "stopped"), (1.0, 3.0), "stopped", 2.0),
        (("stopped", "diverged"), (1.0, None), "diverged", 1.0),
        (("failed", "diverged"), (None, None), "failed", None),
    ],
)
def test_a_point_is_as_bad_as_the_worst_of_its_trials(
    statuses: tuple[Status, ...], scores: tuple[float | None, ...], status: str, mean: float | None
) -> None:
    inner = Told()
    source = CrossedSource(inner, folds=2)
    for each, score in zip(statuses, scores, strict=True):
        trial = source.ask()
        assert trial is not None
        source.tell(ended(trial, each), score)
    assert inner.told == [(0, status, mean, 20)]


def test_every_source_on_the_list_exists_and_says_what_it_is() -> None:
    for place in SOURCES.values():
        module, _, name = place.partition(":")
        cls = getattr(importlib.import_module(module), name)
        assert issubclass(cls, Source) and cls.__doc__.splitlines()[0].endswith(".")


def test_without_optuna_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)  # as if it were not there
    with pytest.raises(MissingExtra, match=r"podium\[sweep\]"):
        make_source("optuna:points=3", ["lr=1..2"])


class TestOptuna:
    @pytest.fixture
    def optuna(self) -> Any:
        return pytest.importorskip("optuna")

    def search(self, optuna: Any, **settings: Any) -> Any:
        from podium.sweeps.search.optuna import OptunaSearch

        space = ["lr=1e-4..1e-1:log", "width=16..64:int", "act=relu,gelu", "betas=[0.9,0.99],[0.9,0.999]"]
        return OptunaSearch(space=read_space(space), **{"points": 6, **settings})

    def test_points_lie_in_the_space(self, optuna: Any) -> None:
        for trial in all_of(self.search(optuna)):
            assert list(trial.options) == ["lr", "width", "act", "betas"]
            assert 1e-4 <= trial.options["lr"] <= 1e-1 and 16 <= trial.options["width"] <= 64
            assert trial.options["act"] in ("relu", "gelu") and trial.options["betas"] in ([0.9, 0.99], [0.9, 0.999])

    def test_each_status_reaches_the_study(self, optuna: Any) -> None:
        study = optuna.create_study(direction="maximize")
        source = self.search(optuna, study=study, maximize=True)
        trials = all_of(source)
        for trial, status, score in zip(
            trials,
            ("finished", "stopped", "failed", "diverged", "finished", "stopped"),
            (0.7, 0.4, None, None, math.nan, None),
            strict=True,
        ):
            source.tell(ended(trial, status), score)
        assert [t.state.name for t in study.trials] == ["COMPLETE", "PRUNED", "FAIL", "FAIL", "FAIL", "PRUNED"]
        assert study.best_value == 0.7 and study.trials[1].value == 0.4

    def test_no_more_points_are_under_way_than_allowed(self, optuna: Any) -> None:
        source = self.search(optuna, parallel=2)
        first, second = source.ask(), source.ask()
        assert source.ask() is None and not source.exhausted
        source.tell(ended(second), 1.0)
        assert source.ask() is not None and source.ask() is None
        assert first.number == 0

    def test_it_finds_what_chance_does_not(self, optuna: Any) -> None:
        def best(how: str) -> float:
            source = make_source(how, {"x": "0..1", "y": "0..1"}, points=40, parallel=1)
            scores = []
            while (trial := source.ask()) is not None:
                scores.append((trial.options["x"] - 0.3) ** 2 + (trial.options["y"] - 0.8) ** 2)
                source.tell(ended(trial), scores[-1])
            return sum(scores[20:]) / 20

        assert best("optuna") < best("optuna:sampler=random") / 2

    def test_the_same_seed_and_scores_give_the_same_points(self, optuna: Any) -> None:
        def run(seed: int) -> list[Any]:
            source, options = self.search(optuna, seed=seed, parallel=1, points=14), []
            while (trial := source.ask()) is not None:
                options.append(trial.options)
                source.tell(ended(trial), trial.options["lr"])
            return options

        assert run(1) == run(1) != run(2)

    def test_folds_of_a_point_are_one_trial_of_the_study(self, optuna: Any) -> None:
        study = optuna.create_study()
        source = CrossedSource(self.search(optuna, study=study, points=2), folds=3)
        for trial in all_of(source):
            source.tell(ended(trial), float(trial.fold or 0))
        assert [t.value for t in study.trials] == [1.0, 1.0]

    def test_points_of_an_earlier_sweep_come_first_and_as_they_were(self, optuna: Any) -> None:
        earlier = [trial.options for trial in all_of(self.search(optuna, seed=3))][:4]
        source = self.search(optuna, seed=4)
        source.recall(json.loads(json.dumps(earlier)))
        assert [trial.options for trial in all_of(source)][:4] == earlier

    def test_a_study_of_the_other_direction_and_unknown_samplers_are_refused(self, optuna: Any) -> None:
        with pytest.raises(ConfigError, match="must maximize, got one to minimize"):
            self.search(optuna, study=optuna.create_study(), maximize=True)
        with pytest.raises(UnknownName, match="tpe"):
            self.search(optuna, sampler="tpee")
        with pytest.raises(ConfigError, match="as an instance"):
            self.search(optuna, sampler="grid")
