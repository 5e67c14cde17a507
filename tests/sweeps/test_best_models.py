"""Whatever order trials end in, the model that is left is that of the best point's best trial."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from podium.sweeps.best_models import BestModelKeeper
from podium.sweeps.ranking import find_points
from podium.sweeps.trial import Evaluation, Outcome, Status, Trial


@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_what_is_left_is_the_best_points_best(rng: random.Random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _left_is_the_best(rng, Path(folder))


def _left_is_the_best(rng: random.Random, tmp_path: Path) -> None:
    folds, maximize = rng.choice([1, 3]), rng.random() < 0.5
    trials = [Trial(number=n, point=n // folds, fold=n % folds) for n in range(5 * folds)]
    statuses: list[Status] = ["finished"] * 6 + ["stopped", "diverged", "failed"] if rng.random() < 0.7 else ["stopped"]
    outcomes = []
    for trial in trials:
        value = rng.choice([0.1, 0.2, 0.3, 0.4, 0.5])  # ties, too
        evaluation = Evaluation(1, 1.0, value, {})
        model = f"{trial.number}.safetensors"
        outcomes.append(Outcome(trial=trial, status=rng.choice(statuses), evaluation=evaluation, model=model))
    rng.shuffle(outcomes)
    config: dict[str, Any] = {"metric": "loss", "maximize": maximize, "seeds": [0], "folds": {"count": folds}}
    half = len(outcomes) // 2
    for outcome in outcomes[:half]:
        (tmp_path / outcome.model).touch()
    before = BestModelKeeper(tmp_path, config, outcomes[:half])
    del before  # interrupted: a new one begins with what is there
    known = [o if (tmp_path / o.model).is_file() else dataclasses.replace(o, model="") for o in outcomes[:half]]
    kept = BestModelKeeper(tmp_path, config, known)
    for outcome in outcomes[half:]:
        (tmp_path / outcome.model).touch()
        kept.add(outcome)
    kept.end()
    best = find_points(trials, outcomes, "loss", maximize=maximize)[0]
    values = [score.value for score in best.scores]
    failed = {outcome.trial.point for outcome in outcomes if outcome.status == "failed"}  # these may yet win
    left = {int(path.stem) // folds: int(path.stem) for path in tmp_path.iterdir()}
    assert len(left) == len(list(tmp_path.iterdir())) and set(left) - failed == (
        {best.number} - failed if values else set()
    )
    if values:
        wanted = (max if maximize else min)(values)
        assert left[best.number] in [score.trial for score in best.scores if score.value == wanted]


def test_a_point_whose_failed_trial_is_trained_again_still_has_its_model(tmp_path: Path) -> None:
    def ended(number: int, status: Status, score: float) -> Outcome:
        trial = Trial(number=number, point=number // 2, seed=number % 2)
        model = f"{number}.safetensors" if status == "finished" else ""
        if model:
            (tmp_path / model).touch()
        return Outcome(trial=trial, status=status, evaluation=Evaluation(1, 1.0, 1 - score, {}), model=model)

    config: dict[str, Any] = {"metric": "loss", "maximize": False, "seeds": [0, 1], "folds": None}
    before = [ended(0, "finished", 0.9), ended(1, "failed", 0.0), ended(2, "finished", 0.5), ended(3, "finished", 0.5)]
    BestModelKeeper(tmp_path, config, before).end()
    assert (tmp_path / "0.safetensors").is_file()
    known = [
        before[0],
        *(o if (tmp_path / o.model).is_file() else dataclasses.replace(o, model="") for o in before[2:]),
    ]
    kept = BestModelKeeper(tmp_path, config, known)
    kept.add(ended(1, "finished", 0.8))
    kept.end()
    assert [path.name for path in tmp_path.iterdir()] == ["0.safetensors"]
