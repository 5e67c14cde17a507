"""When trials are stopped: rules against banks of learning curves that are known beforehand."""

from __future__ import annotations

import importlib
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from podium.errors import ConfigError, UnknownName
from podium.sweeps.queue import TrialQueue
from podium.sweeps.search import make_source
from podium.sweeps.search.listed import PointList
from podium.sweeps.search.space import read_space
from podium.sweeps.stopping import STOPPINGS, find_stopping, make_stopping
from podium.sweeps.stopping.asha import ASHA
from podium.sweeps.stopping.base import WORST, Ledger, NoStopping, Stopping
from podium.sweeps.stopping.median import Median
from podium.sweeps.stopping.pbt import PBT
from podium.sweeps.stopping.wilcoxon import Wilcoxon
from podium.sweeps.trial import Evaluation, Trial, Verdict
from tests.sweeps.bank import Bank, evaluation

QUALITIES = [i / 27 for i in range(27)]


def shuffled(seed: int) -> list[float]:
    qualities = list(QUALITIES)
    random.Random(seed).shuffle(qualities)
    return qualities


def learning(trial: Trial, epoch: int) -> float:
    """A curve that rises to the trial's quality."""
    return float(trial.options["q"]) * (1 - math.exp(-epoch / 4))


def sweep(stopping: Stopping, qualities: Sequence[float], *, slots: int, epochs: int = 27) -> tuple[TrialQueue, Bank]:
    queue = TrialQueue(
        make_source(PointList(rows=[{"q": q} for q in qualities])), stopping=stopping, metric="accuracy", maximize=True
    )
    bank = Bank(learning, epochs=epochs, slots=slots)
    bank.run(queue)
    return queue, bank


def report(stopping: Stopping, ledger: Ledger, trial: Trial, found: Evaluation) -> str:
    """What is said of a trial that reports by itself."""
    ledger.record(trial, found)
    stopping.hear(trial, found, ledger)
    return stopping.judge(trial, found, ledger).action


def judged(stopping: Stopping, curves: Sequence[Sequence[float]], maximize: bool = True) -> list[list[str]]:
    """Verdicts on trials that run one after the other."""
    ledger, said = Ledger(maximize=maximize, metric="accuracy"), []
    for number, curve in enumerate(curves):
        trial, row = Trial(number=number, point=number), []
        for epoch, score in enumerate(curve, 1):
            row.append(report(stopping, ledger, trial, evaluation(epoch, score)))
        ledger.close(trial, "finished")
        said.append(row)
    return said


@pytest.mark.parametrize("stopping", [Median(least=4), Wilcoxon(p=0.1, least=4)], ids=["median", "wilcoxon"])
@pytest.mark.parametrize("order", [1, -1])
def test_trials_that_report_together_are_judged_whatever_their_order(stopping: Stopping, order: int) -> None:
    """As in a grid from bad to good, all in one array: the first must not go on because it is judged first."""
    qualities = [0.05, 0.06, 0.07, 0.9, 0.95, 0.96][::order]
    source = make_source(PointList(rows=[{"q": q} for q in qualities]), folds=4)
    queue = TrialQueue(source, stopping=stopping, metric="accuracy", maximize=True)
    trials = [trial for _ in range(24) if (trial := queue.take()) is not None]
    found = queue.report_all([(t, evaluation(1, t.options["q"] + (t.fold or 0) / 1000 * t.point)) for t in trials])
    stopped = {
        t.options["q"] for t, v in zip(trials, found, strict=True) if isinstance(v, Verdict) and v.action != "go"
    }
    assert {0.05, 0.06, 0.07} <= stopped and 0.96 not in stopped


class TestLedger:
    def test_larger_is_better_whatever_the_direction(self) -> None:
        down, up = Ledger(maximize=False), Ledger(maximize=True, metric="accuracy")
        good, bad = Evaluation(1, 1.0, 0.1, {"accuracy": 0.9}), Evaluation(1, 1.0, 2.0, {"accuracy": 0.2})
        assert down.score_of(good) > down.score_of(bad) and up.score_of(good) > up.score_of(bad)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("maximize", [True, False])
    def test_what_is_no_number_is_worst_in_both_directions(self, value: float, maximize: bool) -> None:
        assert Ledger(maximize=maximize).score_of(Evaluation(1, 1.0, value, {})) == WORST

    def test_an_unknown_metric_lists_the_known_ones(self) -> None:
        with pytest.raises(UnknownName, match="Known: accuracy, loss"):
            Ledger(maximize=True, metric="acuracy").score_of(Evaluation(1, 1.0, 0.0, {"accuracy": 1.0}))


class TestASHA:
    @pytest.mark.parametrize("slots", [40, 8])
    @pytest.mark.parametrize("seed", range(3))
    def test_about_one_in_three_goes_on_at_each_rung_and_the_best_to_the_end(self, slots: int, seed: int) -> None:
        rng = random.Random(seed)
        qualities = [rng.random() for _ in range(240)]
        _, bank = sweep(ASHA(grace=1, factor=3), qualities, slots=slots)
        assert bank.ran[qualities.index(max(qualities))] == 27
        reached = [sum(epochs >= rung for epochs in bank.ran.values()) for rung in (1, 3, 9)]
        for here, further in itertools.pairwise(reached):
            assert 0.22 <= further / here <= 0.5
        assert sum(bank.ran.values()) < 240 * 27 / 5

    def test_side_by_side_it_is_successive_halving_whatever_the_order(self) -> None:
        for qualities in (QUALITIES, QUALITIES[::-1], shuffled(1)):
            _, bank = sweep(ASHA(grace=1, factor=3), qualities, slots=27)
            by_quality = sorted(range(27), key=lambda i: -qualities[i])
            assert all(bank.ran[i] <= 2 for i in by_quality[9:])
            assert all(3 <= bank.ran[i] <= 4 for i in by_quality[3:9])
            assert all(9 <= bank.ran[i] <= 10 for i in by_quality[1:3])
            assert bank.ran[by_quality[0]] == 27

    def test_looking_once_lets_go_on_whoever_is_better_than_those_before(self) -> None:
        _, once = sweep(ASHA(grace=1, factor=3, again=False), QUALITIES, slots=27)
        assert set(once.ran.values()) == {27}  # each is better than all before it
        _, again = sweep(ASHA(grace=1, factor=3), QUALITIES, slots=27)
        assert sum(epochs > 2 for epochs in again.ran.values()) == 9

    def test_nobody_is_stopped_before_the_grace_is_over(self) -> None:
        _, bank = sweep(ASHA(grace=5, factor=3), shuffled(0), slots=9)
        assert min(bank.ran.values()) == 5

    def test_folds_are_compared_with_the_same_fold(self) -> None:
        source = make_source(PointList(rows=[{"q": 0.5}] * 3), folds=2)
        queue = TrialQueue(source, stopping=ASHA(grace=1, factor=2), metric="accuracy", maximize=True)
        bank = Bank(lambda trial, epoch: 0.1 if trial.fold else 0.9, epochs=4, slots=6)
        bank.run(queue)
        assert set(bank.ran.values()) == {4}  # the second fold is harder for all

    def test_each_fold_is_halved_by_itself(self) -> None:
        source = make_source(PointList(rows=[{"q": q} for q in (0.9, 0.5, 0.6, 0.8)]), folds=2)
        queue = TrialQueue(source, stopping=ASHA(grace=1, factor=2), metric="accuracy", maximize=True)
        bank = Bank(lambda trial, epoch: trial.options["q"] / (1 + (trial.fold or 0)), epochs=4, slots=8)
        bank.run(queue)
        # Rungs at epochs 1, 2 and 4: two of four go on to the second, and one of those two beyond it.
        assert [bank.ran[number] for number in range(8)] == [4, 4, 2, 2, 2, 2, 2, 2]
        whys = [next(o.why for o in queue.outcomes if o.trial.number == number) for number in (2, 4, 6)]
        assert whys[0] == "place 4 of 4 at epoch 1, where 2 may continue"
        assert whys[2] == "place 2 of 2 at epoch 2, where 1 may continue"

    def test_what_is_no_number_is_stopped_and_stops_nobody(self) -> None:
        said = judged(ASHA(grace=1, factor=2), [[math.nan] * 2, [0.5] * 2, [math.nan] * 2, [0.6] * 2])
        assert said[1] == said[3] == ["go", "go"] and said[2][0] == "stop"


class TestMedian:
    def test_a_case_computed_by_hand(self) -> None:
        # At epoch 2 the means of the first three are .2, .4, .6: their median is .4.
        before = [[0.1, 0.3], [0.3, 0.5], [0.5, 0.7]]
        assert judged(Median(grace=2, least=3), [*before, [0.0, 0.39]])[3] == ["go", "stop"]
        assert judged(Median(grace=2, least=3), [*before, [0.0, 0.40]])[3] == ["go", "go"]
        assert judged(Median(grace=2, least=3), [*before, [0.40, 0.0]])[3] == ["go", "go"]  # its best counts
        assert judged(Median(grace=2, least=4), [*before, [0.0, 0.39]])[3] == ["go", "go"]
        # With a fourth of mean .8 the median is .5.
        assert judged(Median(grace=2, least=3), [*before, [0.8, 0.8], [0.0, 0.49]])[4] == ["go", "stop"]
        assert judged(Median(grace=2, least=3), [*before, [0.8, 0.8], [0.0, 0.51]])[4] == ["go", "go"]

    def test_a_loss_counts_downwards(self) -> None:
        before = [[0.1, 0.3], [0.3, 0.5], [0.5, 0.7]]
        assert judged(Median(grace=2, least=3), [*before, [0.9, 0.41]], maximize=False)[3] == ["go", "stop"]
        assert judged(Median(grace=2, least=3), [*before, [0.9, 0.39]], maximize=False)[3] == ["go", "go"]

    def test_the_best_of_a_bank_is_never_stopped(self) -> None:
        for seed in range(5):
            qualities = shuffled(seed)
            queue, bank = sweep(Median(), qualities, slots=5)
            assert bank.ran[qualities.index(max(qualities))] == 27
            assert 5 < sum(outcome.status == "stopped" for outcome in queue.outcomes) < 22

    def test_numbers_that_are_none_move_the_median_down_and_are_stopped(self) -> None:
        nan = [math.nan] * 2
        said = judged(Median(grace=1, least=2), [nan, nan, [0.1, 0.1], [0.5, 0.5], [0.5, 0.5], [0.6, 0.6], nan])
        assert all(row == ["go", "go"] for row in said[:6]) and said[6][0] == "stop"


class TestWilcoxon:
    FOLDS = 8

    def run(self, qualities: Sequence[float], stopping: Wilcoxon, slots: int, seed: int = 0) -> tuple[TrialQueue, Bank]:
        rng = random.Random(seed)
        hard = [rng.gauss(0, 0.2) for _ in range(self.FOLDS)]  # folds differ far more than points do
        noise = {(p, f): rng.gauss(0, 0.005) for p in range(len(qualities)) for f in range(self.FOLDS)}

        def curve(trial: Trial, epoch: int) -> float:
            assert trial.fold is not None
            return (trial.options["q"] + hard[trial.fold] + noise[trial.point, trial.fold]) * (1 - 0.5**epoch)

        source = make_source(PointList(rows=[{"q": q} for q in qualities]), folds=self.FOLDS)
        queue = TrialQueue(source, stopping=stopping, metric="accuracy", maximize=True)
        bank = Bank(curve, epochs=4, slots=slots)
        bank.run(queue)
        return queue, bank

    def by_point(self, queue: TrialQueue, status: str) -> dict[int, int]:
        counts: dict[int, int] = {}
        for outcome in queue.outcomes:
            counts[outcome.trial.point] = counts.get(outcome.trial.point, 0) + (outcome.status == status)
        return counts

    @pytest.mark.parametrize("slots", [1, 3, 24])
    def test_a_worse_point_is_given_up_and_the_best_is_not(self, slots: int) -> None:
        queue, _ = self.run([0.6, 0.8, 0.55], Wilcoxon(p=0.05, least=5), slots)
        finished = self.by_point(queue, "finished")
        assert finished[1] == self.FOLDS
        assert finished[2] < self.FOLDS
        assert len(queue.outcomes) == 3 * self.FOLDS  # each trial was handed in once

    def test_trials_that_have_not_begun_do_not_begin(self) -> None:
        queue, bank = self.run([0.8, 0.6], Wilcoxon(p=0.05, least=5), slots=1)
        never = [outcome for outcome in queue.outcomes if outcome.steps == 0]
        assert len(never) == self.FOLDS - 5 and all(o.status == "stopped" and o.trial.point == 1 for o in never)
        assert len(bank.ran) == 2 * self.FOLDS - 3
        assert "worse than point 0" in next(o.why for o in queue.outcomes if o.status == "stopped")
        assert all(o.why == "its point 1 was given up" for o in never)

    def test_of_equal_points_few_are_given_up(self) -> None:
        given_up = 0
        for seed in range(20):
            queue, _ = self.run([0.8, 0.8], Wilcoxon(p=0.05, least=8), slots=16, seed=seed)
            given_up += any(outcome.status == "stopped" for outcome in queue.outcomes)
        assert given_up <= 4  # the expected share is p, all epochs of a curve here being one draw

    def test_the_point_with_the_highest_mean_is_never_given_up(self) -> None:
        ledger, said = Ledger(maximize=True, metric="accuracy"), []
        # Ahead in all folds that both have, and behind by the mean of all that each has.
        for point, scores in ((0, [0.5, 0.5, 0.5, 0.5, 0.5]), (1, [0.9, 0.4, 0.4, 0.4, 0.4, 0.4])):
            for fold, score in enumerate(scores, 5 - len(scores)):
                trial = Trial(number=10 * point + fold + 1, point=point, fold=fold + 1)
                said.append(report(Wilcoxon(p=0.1, least=5), ledger, trial, evaluation(1, score)))
        assert said == ["go"] * 10 + ["stop"]  # .483 against .5
        better = Trial(number=99, point=1, fold=9)
        assert report(Wilcoxon(p=0.1, least=5), ledger, better, evaluation(1, 0.9)) == "go"  # .543 against .5

    def test_too_few_pairs_for_p_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"with least=3 pairs p cannot be below 0\.125"):
            Wilcoxon(least=3, p=0.1)

    def test_what_is_no_number_is_worse(self) -> None:
        ledger = Ledger(maximize=True, metric="accuracy")
        said = []
        for point, score in ((0, 0.5), (1, math.nan)):
            for fold in range(5):
                trial = Trial(number=5 * point + fold, point=point, fold=fold)
                said.append(report(Wilcoxon(p=0.1, least=5), ledger, trial, evaluation(1, score)))
        assert said == ["go"] * 9 + ["stop"]


class TestPBT:
    def run(self, seed: int = 0, slots: int = 16, **settings: Any) -> tuple[TrialQueue, Bank, list[dict[str, Any]]]:
        events: list[dict[str, Any]] = []
        space = read_space(["lr=1e-3..1e-1:log"])
        queue = TrialQueue(
            make_source("random", space, points=16),
            stopping=PBT(seed=seed, space=space, **{"every": 2.0, **settings}),
            metric="accuracy",
            maximize=True,
            on_event=events.append,
        )
        bank = Bank(lambda trial, epoch: float(trial.options["lr"]) * epoch, epochs=10, slots=slots)
        bank.run(queue)
        return queue, bank, events

    def test_the_bottom_takes_over_from_the_top_only(self) -> None:
        queue, bank, _ = self.run()
        order = sorted(range(16), key=lambda number: -queue.ledger[number].trial.options["lr"])
        assert {source for _, source, _ in bank.became} <= set(order[:4])
        assert {number for number, _, _ in bank.became} == set(order[-4:])
        assert len(bank.became) == 4 * 4  # four milestones, and the rows' order does not matter
        assert all(outcome.status == "finished" for outcome in queue.outcomes)

    def test_options_change_from_the_sources_and_stay_in_the_space(self) -> None:
        _, _, events = self.run(resample=0.0)
        options: dict[int, float] = {
            event["number"]: event["options"]["lr"] for event in events if event["kind"] == "begin"
        }
        changed = [event for event in events if event.get("verdict") == "become"]
        assert changed
        for event in changed:
            assert event["options"]["lr"] in [
                min(options[event["source"]] * factor, 1e-1) if factor > 1 else options[event["source"]] * factor
                for factor in (0.8, 1.2)
            ]
            options[event["trial"]] = event["options"]["lr"]

    def test_the_same_seed_gives_the_same_course(self) -> None:
        assert self.run(3)[1].became == self.run(3)[1].became != self.run(4)[1].became

    def test_a_newcomer_stops_nobody(self) -> None:
        _, bank, _ = self.run(slots=12)
        assert bank.became and set(bank.ran.values()) == {10}

    def report(self, rule: PBT, ledger: Ledger, number: int, epoch: int, score: float) -> Verdict:
        trial = Trial(number=number, point=number, options={"lr": 1.0 + number})
        ledger.record(trial, evaluation(epoch, score))
        return rule.judge(trial, evaluation(epoch, score), ledger)

    def test_elders_do_not_wait_for_a_newcomer(self) -> None:
        rule, ledger = PBT(every=2), Ledger(maximize=True, metric="accuracy")
        for epoch in (1, 2, 3):
            for number in range(4):
                self.report(rule, ledger, number, epoch, number / 10)
        self.report(rule, ledger, 4, 1, 0.0)
        said = [self.report(rule, ledger, number, epoch, number / 10) for epoch in (4, 5) for number in range(4)]
        assert [(v.action, v.source) for v in said if v.action != "go"] == [("become", 3)]

    def test_what_was_changed_before_is_changed_further(self) -> None:
        rule, ledger = PBT(resample=0.0), Ledger(maximize=True, metric="accuracy")
        self.report(rule, ledger, 0, 1, 0.9)
        first = self.report(rule, ledger, 1, 1, 0.1)
        assert first.source == 0 and first.options["lr"] in (0.8, 1.2)  # of trial 0's 1.0
        self.report(rule, ledger, 1, 2, 0.9)
        second = self.report(rule, ledger, 0, 2, 0.1)
        assert second.source == 1 and second.options["lr"] in (first.options["lr"] * 0.8, first.options["lr"] * 1.2)

    def test_choices_move_to_a_neighbour_and_fractions_stay_below_one(self) -> None:
        space = read_space(["width=16,32,64,128", "act=relu,gelu,tanh"])
        pbt, rng = PBT(space=space, resample=0.0), random.Random(0)
        assert {pbt._changed("width", 32, rng) for _ in range(50)} == {16, 64}
        assert {pbt._changed("act", "tanh", rng) for _ in range(50)} == {"gelu", "tanh"}
        assert {pbt._changed("momentum", 0.9, rng) for _ in range(50)} == {0.9 * 0.8, 0.99}

    def test_equal_trials_are_left_alone(self) -> None:
        queue = TrialQueue(
            make_source(PointList(rows=[{"lr": 0.1}] * 8)), stopping=PBT(), metric="accuracy", maximize=True
        )
        bank = Bank(lambda trial, epoch: 0.5, epochs=4, slots=8)
        bank.run(queue)
        assert bank.became == []

    def test_what_cannot_change_in_mid_training_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="not batch_size"):
            make_stopping("pbt:explore=lr+batch_size")


class TestOptuna:
    @pytest.fixture(autouse=True)
    def optuna(self) -> Any:
        return pytest.importorskip("optuna")

    @pytest.mark.parametrize("pruner", ["median", "successive-halving", "hyperband", "HyperbandPruner"])
    def test_pruners_stop_some_and_not_the_best(self, pruner: str) -> None:
        qualities = [0.5, 0.6, 0.7, 0.8, 0.9, *shuffled(0)[:20], 2.0]
        queue, bank = sweep(make_stopping(f"optuna:pruner={pruner}"), qualities, slots=3, epochs=9)
        assert bank.ran[len(qualities) - 1] == 9
        assert 3 < sum(outcome.status == "stopped" for outcome in queue.outcomes) < 26

    def test_the_median_pruner_says_what_optuna_says(self, optuna: Any) -> None:
        study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(2, 0))
        curves = [[0.1, 0.3], [0.3, 0.5], [0.5, 0.7], [0.0, 0.39], [0.5, 0.1], [0.2, 0.6]]
        said = []
        for curve in curves:
            trial, row = study.ask(), []
            for step, score in enumerate(curve, 1):
                trial.report(score, step)
                row.append("stop" if trial.should_prune() else "go")
            study.tell(trial, curve[-1])
            said.append(row)
        assert judged(make_stopping_with(optuna.pruners.MedianPruner(2, 0)), curves) == said
        assert any("stop" in row for row in said)

    def test_what_is_no_number_is_stopped(self, optuna: Any) -> None:
        curves = [[0.5, 0.5], [math.nan, 0.5], [0.5, 0.5], [math.nan, math.nan], [0.6, 0.6]]
        assert judged(make_stopping_with(optuna.pruners.MedianPruner(2, 0)), curves)[3:] == [
            ["stop", "stop"],
            ["go", "go"],
        ]

    def test_halving_stops_trials_side_by_side_and_compares_within_a_fold(self) -> None:
        source = make_source(PointList(rows=[{"q": q} for q in (0.9, 0.2, 0.3, 0.8, 0.1, 0.4)]), folds=2)
        stopping = make_stopping("optuna:pruner=successivehalving")
        queue = TrialQueue(source, stopping=stopping, metric="accuracy", maximize=True)

        def curve(trial: Trial, epoch: int) -> float:
            return float(trial.options["q"] / (1 + 9 * (trial.fold == 0)))  # the first fold is the harder one

        bank = Bank(curve, epochs=8, slots=12)
        bank.run(queue)
        through = {(o.trial.options["q"], o.trial.fold) for o in queue.outcomes if o.status == "finished"}
        assert {(0.9, 0), (0.9, 1)} <= through and len(through) < 12

    def test_unknown_and_unfit_pruners_are_refused(self) -> None:
        with pytest.raises(UnknownName, match="median"):
            make_stopping("optuna:pruner=medain")
        with pytest.raises(ConfigError, match="use `wilcoxon`"):
            make_stopping("optuna:pruner=wilcoxon")
        with pytest.raises(ConfigError, match="as an instance"):
            make_stopping("optuna:pruner=percentile")


def make_stopping_with(pruner: Any) -> Stopping:
    from podium.sweeps.stopping.optuna import OptunaPruner

    return OptunaPruner(pruner=pruner)


def test_texts_make_rules() -> None:
    assert make_stopping("asha:grace=2,factor=4") == ASHA(grace=2.0, factor=4)
    assert make_stopping(None) == make_stopping("none") == NoStopping()
    rule = Median()
    assert make_stopping(rule) is rule
    space = read_space(["lr=1..2"])
    made = make_stopping("pbt:every=3", space=space)
    assert isinstance(made, PBT) and made.space is space and made.copies
    for text, told in (("ahsa", "Did you mean 'asha'"), ("asha:factor=1", "at least 2"), ("asha:gracee=1", "'grace'")):
        with pytest.raises(ConfigError) as error:
            make_stopping(text)
        assert told in str(error.value)


def test_every_rule_on_the_list_exists_and_says_what_it_is() -> None:
    for name, place in STOPPINGS.items():
        cls = find_stopping(name)
        assert importlib.import_module(place.partition(":")[0]) and cls.name == name
        assert cls.__doc__ and cls.__doc__.splitlines()[0].endswith(".")


def test_no_stopping_stops_nobody() -> None:
    queue, bank = sweep(NoStopping(), shuffled(0)[:6], slots=4, epochs=3)
    assert set(bank.ran.values()) == {3} and all(outcome.status == "finished" for outcome in queue.outcomes)
