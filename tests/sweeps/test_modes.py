"""Modules keep their modes in a sweep as they do in a run: what was put into evaluation mode stays in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from podium.engine.generators import derived_seed
from podium.sweeps.executors.base import Executor
from podium.sweeps.executors.fused import Fused
from podium.sweeps.executors.sequential import Sequential
from podium.sweeps.executors.streams import Streams
from podium.sweeps.fused.probe import probe
from podium.sweeps.parts import Parts
from podium.sweeps.seeds import seeded
from podium.sweeps.trial import Trial
from tests.sweeps import nets
from tests.sweeps.nets import Queue, recipe_of

EXECUTORS: dict[str, Executor] = {"sequential": Sequential(), "fused": Fused(), "streams": Streams()}


def frozen_batch_norm() -> nn.Module:
    model = nets.net()
    model[1].running_mean += 0.3
    model[1].running_var *= 1.7
    model[1].eval()
    return model


def dropout_in_eval() -> nn.Module:
    model = nets.net(dropout=0.5, norm=False)
    model[2].eval()
    return model


def all_in_eval() -> nn.Module:
    return nets.net(dropout=0.5).eval()


class Merging(nn.Module):
    """Merges its correction into its weight for evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nets.FEATURES, nets.CLASSES) * 0.1)
        self.correction = nn.Parameter(torch.full((nets.FEATURES, nets.CLASSES), 0.01))
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.merged:
            with torch.no_grad():
                self.weight += -self.correction if mode else self.correction
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight if self.merged else self.weight + self.correction)


class CountingEvaluations(nn.Module):
    """A buffer that changes in evaluation mode only."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(nets.FEATURES, nets.CLASSES)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.passes.add_(1)
        out: Tensor = self.head(x)
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "all in training mode": partial(nets.net, norm=True),
    "BatchNorm in evaluation mode": frozen_batch_norm,
    "dropout in evaluation mode": dropout_in_eval,
    "all in evaluation mode": all_in_eval,
    "more in train()": Merging,
    "a buffer that only evaluation changes": CountingEvaluations,
}


def plainly(parts: Parts) -> dict[str, Tensor]:
    """What anybody's loop comes to that never calls train() or eval()."""
    model, data = parts.model, nets.data().train
    with seeded(derived_seed(parts.trial.seed, 0xA10E)):
        for step in range(parts.steps):
            epoch, place = divmod(step, parts.steps_per_epoch)
            order, _ = parts.epoch(epoch)
            x, y = data.gather(order[place * parts.batch_size : (place + 1) * parts.batch_size])
            parts.optimizer.zero_grad()
            parts.task.loss(model(x.double()), y).backward()
            parts.optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", MODELS)
def test_a_trial_trains_in_the_modes_that_its_model_was_made_in(name: str, executor: str) -> None:
    recipe = recipe_of(nets.task_of(MODELS[name]), eval_every=1)
    trials = [Trial(number=i, seed=i, options={"lr": 0.1 / (i + 1)}) for i in range(3)]
    queue = Queue(trials)
    events: list[Any] = []
    EXECUTORS[executor].run(recipe, queue, events.append)
    for trial in trials:
        assert queue.outcomes[trial.number].status == "finished", queue.outcomes[trial.number].why
        assert nets.apart(queue.states[trial.number], plainly(recipe.make(trial))) < 1e-9


@pytest.mark.parametrize("name", ["BatchNorm in evaluation mode", "dropout in evaluation mode"])
def test_modes_do_not_keep_trials_from_being_fused(name: str) -> None:
    recipe = recipe_of(nets.task_of(MODELS[name]))
    trials = [Trial(number=i, seed=i, options={"lr": 0.1 / (i + 1)}) for i in range(2)]
    assert probe(recipe, trials, nets.device_data_of(recipe, trials[0])).fuses


def test_trials_whose_modules_differ_in_mode_do_not_share_an_array() -> None:
    one, two = (recipe_of(nets.task_of(make)).make(Trial(number=0)) for make in (nets.net, frozen_batch_norm))
    assert one.structure != two.structure


@pytest.mark.slow
def test_empty_parameters_are_trained_as_nothing() -> None:
    def model() -> nn.Module:
        made = nets.net(norm=False)
        made.register_parameter("nothing", nn.Parameter(torch.zeros(0, 3)))
        made.register_forward_hook(lambda module, _args, out: out + module.nothing.sum())
        return made

    for executor in EXECUTORS.values():
        recipe, queue = recipe_of(nets.task_of(model)), Queue([Trial(number=i, seed=i) for i in range(2)])
        executor.run(recipe, queue, lambda event: None)
        for number, outcome in queue.outcomes.items():
            assert outcome.status == "finished", outcome.why
            assert nets.apart(queue.states[number], plainly(recipe.make(outcome.trial))) < 1e-9
