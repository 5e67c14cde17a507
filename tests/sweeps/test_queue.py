"""The sweep's queue: what it writes, how it goes on after a kill, and how trials are sorted."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from podium.errors import ConfigError, PodiumError, UnknownName
from podium.sweeps.executors.base import Queue
from podium.sweeps.queue import TrialQueue, read_outcomes
from podium.sweeps.search import make_source
from podium.sweeps.search.base import Source
from podium.sweeps.search.crossed import CrossedSource
from podium.sweeps.search.listed import PointList
from podium.sweeps.stopping.asha import ASHA
from podium.sweeps.stopping.wilcoxon import Wilcoxon
from podium.sweeps.trial import Outcome, Trial
from tests.sweeps.bank import Bank, evaluation, state_of

QUALITIES = [0.3, 0.9, 0.1, 0.6, 0.8, 0.2]


def quality(trial: Trial, epoch: int) -> float:
    return float(trial.options["q"]) * (epoch / 3)


def source(qualities: list[float] | None = None, **crossing: Any) -> CrossedSource:
    return make_source(PointList(rows=[{"q": q} for q in qualities or QUALITIES]), **crossing)


OPEN: list[TrialQueue] = []


@pytest.fixture(autouse=True)
def _close_desks() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def queue_over(given: Source, folder: Path | None = None, **settings: Any) -> TrialQueue:
    OPEN.append(TrialQueue(given, folder=folder, metric="accuracy", maximize=True, **settings))
    return OPEN[-1]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def bank(slots: int = 2) -> Bank:
    return Bank(quality, epochs=3, slots=slots)


class Hearing(Source):
    """A list that remembers what it was told."""

    def __init__(self) -> None:
        self.inner = PointList(rows=[{"q": q} for q in QUALITIES])
        self.told: list[tuple[int, float | None]] = []

    @property
    def total(self) -> int | None:
        return self.inner.total

    @property
    def exhausted(self) -> bool:
        return self.inner.exhausted

    def ask(self) -> Trial | None:
        return self.inner.ask()

    def tell(self, outcome: Outcome, score: float | None) -> None:
        self.told.append((outcome.trial.number, score))


class TestWriting:
    def test_every_trial_report_result_and_model_is_there(self, tmp_path: Path) -> None:
        events: list[dict[str, Any]] = []
        queue = queue_over(source(), tmp_path, on_event=events.append)
        bank().run(queue)
        assert [row["number"] for row in lines(tmp_path / "trials.jsonl")] == list(range(6))
        assert len(lines(tmp_path / "reports.jsonl")) == 18
        results = lines(tmp_path / "results.jsonl")
        assert sorted(row["trial"]["number"] for row in results) == list(range(6))
        for row in results:
            assert row["status"] == "finished" and row["steps"] == 30 and len(row["history"]) == 3
            assert row["evaluation"]["metrics"]["accuracy"] == row["trial"]["options"]["q"]
            weight = load_file(tmp_path / row["model"])["weight"]
            assert torch.equal(weight, state_of(Trial(number=row["trial"]["number"]))["weight"])
        assert [event["kind"] for event in events].count("outcome") == 6

    def test_a_result_is_readable_the_moment_it_is_handed_in(self, tmp_path: Path) -> None:
        queue = queue_over(source(), tmp_path)
        trial = queue.take()
        assert trial is not None
        queue.report(trial, evaluation(1, 0.5))
        assert lines(tmp_path / "reports.jsonl")[0]["metrics"] == {"accuracy": 0.5}
        queue.hand_in(Outcome(trial=trial, status="finished"), state_of(trial))
        (outcome,) = read_outcomes(tmp_path)
        assert outcome.trial == trial and outcome.evaluation == evaluation(1, 0.5) and outcome.history
        assert (tmp_path / "models" / "trial-00000.safetensors").is_file()

    def test_numbers_that_are_none_come_back_as_they_were(self, tmp_path: Path) -> None:
        queue = queue_over(source(), tmp_path)
        trial = queue.take()
        assert trial is not None
        queue.report(trial, evaluation(1, math.nan))
        queue.hand_in(Outcome(trial=trial, status="diverged", why="its loss was no number"), None)
        (outcome,) = read_outcomes(tmp_path)
        assert outcome.evaluation is not None and math.isnan(outcome.evaluation.loss)
        assert outcome.status == "diverged" and outcome.model == "" and queue.score_of(outcome) is None

    def test_with_none_no_model_is_kept(self, tmp_path: Path) -> None:
        bank().run(queue_over(source(), tmp_path, keeps_models=False))
        assert not (tmp_path / "models").exists() and all(o.model == "" for o in read_outcomes(tmp_path))

    def test_without_a_folder_nothing_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        queue = queue_over(source())
        bank().run(queue)
        assert len(queue.outcomes) == 6 and not any(tmp_path.iterdir())

    def test_an_unknown_metric_is_refused(self) -> None:
        queue = TrialQueue(source(), metric="acuracy", maximize=True)
        trial = queue.take()
        assert trial is not None
        with pytest.raises(UnknownName, match="Did you mean 'accuracy'"):
            queue.report(trial, evaluation(1, 0.5))


class TestTakingUp:
    def test_only_the_rest_is_trained(self, tmp_path: Path) -> None:
        first = bank()
        first.run(queue_over(source(), tmp_path), at_most=4)  # killed in the second pair's first epoch
        assert first.ran == {0: 3, 1: 3, 2: 1, 3: 1}
        second, queue = bank(), queue_over(source(), tmp_path)
        second.run(queue)
        assert second.ran == {2: 3, 3: 3, 4: 3, 5: 3}
        assert (
            sorted(o.trial.number for o in read_outcomes(tmp_path))
            == list(range(6))
            == sorted(o.trial.number for o in queue.outcomes)
        )
        assert [row["number"] for row in lines(tmp_path / "trials.jsonl")] == list(range(6))

    def test_a_finished_sweep_has_nothing_left(self, tmp_path: Path) -> None:
        bank().run(queue_over(source(), tmp_path))
        given = source()
        assert queue_over(given, tmp_path).take() is None and given.exhausted

    def test_a_trial_that_failed_begins_anew_and_its_later_result_counts(self, tmp_path: Path) -> None:
        with queue_over(source(), tmp_path) as queue:
            trial = queue.take()
            assert trial is not None and trial.number == 0
            queue.hand_in(Outcome(trial=trial, status="failed", why="its process was killed", steps=3), None)
        again, queue = bank(), queue_over(source(), tmp_path)
        again.run(queue)
        assert sorted(again.ran) == list(range(6)) and len(lines(tmp_path / "results.jsonl")) == 7
        assert [o.status for o in read_outcomes(tmp_path)] == ["finished"] * 6 == [o.status for o in queue.outcomes]

    def test_the_source_hears_of_what_is_done(self, tmp_path: Path) -> None:
        bank().run(queue_over(Hearing(), tmp_path), at_most=3)
        hearing = Hearing()
        queue_over(hearing, tmp_path).waiting.sort_into(lambda trial: 0)
        assert hearing.told == [(0, 0.3), (1, 0.9)]

    @pytest.mark.parametrize("cut", [1, 5, 200])
    def test_a_torn_last_line_is_left_out_and_cut_off(self, tmp_path: Path, cut: int) -> None:
        bank(slots=1).run(queue_over(source(), tmp_path))
        path = tmp_path / "results.jsonl"
        path.write_bytes(path.read_bytes()[:-cut])
        left = 6 if cut == 1 else 5  # without its newline alone a line is whole
        assert len(read_outcomes(tmp_path)) == left
        again = bank()
        again.run(queue_over(source(), tmp_path))
        assert again.ran == dict.fromkeys(range(left, 6), 3)
        assert [row["trial"]["number"] for row in lines(path)] == list(range(6))

    def test_a_last_line_that_lacks_its_end_only_is_ended(self, tmp_path: Path) -> None:
        bank(slots=1).run(queue_over(source(), tmp_path), at_most=15)
        path = tmp_path / "results.jsonl"
        path.write_bytes(path.read_bytes()[:-1])
        rest = bank()
        rest.run(queue_over(source(), tmp_path))
        assert rest.ran == {5: 3} and [row["trial"]["number"] for row in lines(path)] == list(range(6))

    def test_another_sweep_in_the_same_folder_is_refused(self, tmp_path: Path) -> None:
        bank().run(queue_over(source(), tmp_path), at_most=3)
        with pytest.raises(ConfigError, match=r"trial 1 must be as before, .*0\.9.* got .*0\.5"):
            bank().run(queue_over(source([0.3, 0.5]), tmp_path))

    def test_outcomes_may_be_given_without_a_folder(self) -> None:
        before = queue_over(source())
        bank().run(before, at_most=3)
        after = bank()
        after.run(queue_over(source(), done=before.outcomes))
        assert sorted(after.ran) == [2, 3, 4, 5]

    def test_a_rule_compares_with_trials_of_the_earlier_part(self, tmp_path: Path) -> None:
        good = [0.9, 0.8, 0.7, 0.2, 0.1, 0.15]
        bank(slots=3).run(queue_over(source(good), tmp_path), at_most=3)
        rest = bank(slots=1)
        rest.run(queue_over(source(good), tmp_path, stopping=ASHA(grace=1, factor=2)))
        assert rest.ran == {3: 1, 4: 1, 5: 1}

    @pytest.mark.slow
    def test_a_killed_process_leaves_what_it_had_finished(self, tmp_path: Path) -> None:
        script = (
            "import os, signal, sys; from pathlib import Path; from tests.sweeps.test_queue import *\n"
            "done = []\n"
            "def hear(event):\n"
            "    done.append(event['kind'])\n"
            "    if done.count('outcome') == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
            "bank().run(queue_over(source(), Path(sys.argv[1]), on_event=hear))\n"
        )
        ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, check=False)
        assert ended.returncode == -9
        assert [o.trial.number for o in read_outcomes(tmp_path)] == [0, 1, 2]
        rest = bank()
        rest.run(queue_over(source(), tmp_path))
        assert sorted(rest.ran) == [3, 4, 5]

    def test_optuna_goes_on_with_the_same_points(self, tmp_path: Path) -> None:
        optuna = pytest.importorskip("optuna")

        def search(study: Any) -> CrossedSource:
            from podium.sweeps.search.optuna import OptunaSearch
            from podium.sweeps.search.space import read_space

            points = OptunaSearch(space=read_space(["q=0..1"]), points=12, study=study, maximize=True, parallel=3)
            return make_source(points, folds=2)

        bank(slots=4).run(queue_over(search(optuna.create_study(direction="maximize")), tmp_path), at_most=10)
        asked = {row["number"]: row["options"] for row in lines(tmp_path / "trials.jsonl")}
        done = {o.trial.number for o in read_outcomes(tmp_path)}
        assert 4 < len(done) < len(asked) < 24
        study, rest = optuna.create_study(direction="maximize"), bank(slots=4)
        rest.run(queue_over(search(study), tmp_path))
        assert set(rest.ran) == set(range(24)) - done
        options = {row["number"]: row["options"] for row in lines(tmp_path / "trials.jsonl")}
        assert len(options) == 24 and all(options[number] == asked[number] for number in asked)
        assert len(study.trials) == 12 and all(t.state.name == "COMPLETE" for t in study.trials)


class TestSorting:
    def widths(self, **crossing: Any) -> CrossedSource:
        rows = [{"q": 0.5, "width": width} for width in (16, 32, 16, 64, 32, 16)]
        return make_source(PointList(rows=rows), **crossing)

    def width(self, trial: Trial) -> Hashable:
        return int(trial.options["width"])

    def numbers(self, queue: Queue) -> list[int]:
        taken = []
        while (trial := queue.take()) is not None:
            taken.append(trial.number)
            queue.hand_in(Outcome(trial=trial, status="finished"), None)
        return taken

    def test_each_group_gets_its_own_trials_in_order(self) -> None:
        queue = queue_over(self.widths())
        queue.waiting.sort_into(self.width)
        assert queue.waiting.groups() == [16, 32, 64] and [t.number for t in queue.waiting.of(32)] == [1, 4]
        assert self.numbers(queue.group_queue(32)) == [1, 4]
        assert queue.waiting.groups() == [16, 64]
        assert self.numbers(queue.group_queue(16)) == [0, 2, 5] and self.numbers(queue.group_queue(64)) == [3]
        assert queue.waiting.groups() == [] and len(queue.outcomes) == 6

    def test_the_whole_desk_serves_all_groups(self) -> None:
        queue = queue_over(self.widths())
        queue.waiting.sort_into(self.width)
        assert sorted(self.numbers(queue)) == list(range(6))

    def test_a_trial_whose_key_cannot_be_had_fails_and_the_others_go_on(self, tmp_path: Path) -> None:
        def key_of(trial: Trial) -> Hashable:
            if trial.options["width"] == 32:
                raise ConfigError("width must not be 32")
            return self.width(trial)

        queue = queue_over(self.widths(), tmp_path)
        queue.waiting.sort_into(key_of)
        assert queue.waiting.groups() == [16, 64]
        failed = [o for o in read_outcomes(tmp_path) if o.status == "failed"]
        assert [o.trial.number for o in failed] == [1, 4]
        assert all(o.why == "ConfigError: width must not be 32" and o.steps == 0 for o in failed)
        assert sorted(self.numbers(queue)) == [0, 2, 3, 5]

    def test_other_errors_are_not_swallowed(self) -> None:
        queue = queue_over(self.widths())
        with pytest.raises(KeyError):
            queue.waiting.sort_into(lambda trial: trial.options["depth"])
        assert not issubclass(KeyError, PodiumError)

    def test_a_group_asks_for_more_and_leaves_others_what_is_theirs(self) -> None:
        pytest.importorskip("optuna")
        given = make_source("optuna:sampler=random", ["width=16,32"], points=20, parallel=2, maximize=True)
        queue = queue_over(given)
        queue.waiting.sort_into(self.width)
        taken: dict[Hashable, list[int]] = {16: [], 32: []}
        for _ in range(40):
            groups = queue.waiting.groups()
            if not groups:
                break
            taken[groups[0]] += self.numbers(queue.group_queue(groups[0]))
        assert sorted(taken[16] + taken[32]) == list(range(20)) and taken[16] and taken[32]
        for width, numbers in taken.items():
            assert all(queue.ledger[number].trial.options["width"] == width for number in numbers)

    def test_sorting_again_loses_nobody(self) -> None:
        queue = queue_over(self.widths())
        queue.waiting.sort_into(self.width)
        queue.waiting.sort_into(lambda trial: "all")
        assert queue.waiting.groups() == ["all"] and self.numbers(queue.group_queue("all")) == list(range(6))

    def test_a_point_that_was_given_up_is_skipped_in_every_group(self) -> None:
        queue = queue_over(source([0.9, 0.1], folds=6), stopping=Wilcoxon(p=0.1, least=4))
        queue.waiting.sort_into(lambda trial: trial.fold is not None and trial.fold % 2)
        for key in (0, 1):
            trainer = Bank(lambda trial, epoch: trial.options["q"] + (trial.fold or 0) / 100, epochs=2, slots=1)
            trainer.run(queue.group_queue(key))
        worse = [o for o in queue.outcomes if o.trial.point == 1]
        assert len(worse) == 6 and any(o.status == "stopped" and o.steps == 0 for o in worse)
        assert all(o.status == "finished" for o in queue.outcomes if o.trial.point == 0)


def test_the_user_may_stop_the_sweep() -> None:
    asked = iter([False, True])
    queue = TrialQueue(source(), should_stop=lambda: next(asked))
    assert (queue.stop_requested(), queue.stop_requested()) == (False, True)
