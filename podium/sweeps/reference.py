"""One trial alone, trained by plain PyTorch: the reference for every other way to train it.

Nothing is stacked, captured or compiled.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from podium.engine.generators import derived_seed
from podium.engine.modes import evaluating
from podium.engine.pytree import join_rows, map_tensors
from podium.errors import ConfigError
from podium.sweeps.fused.device_data import DeviceData, DeviceDataset
from podium.sweeps.parts import Parts
from podium.sweeps.precision import computing
from podium.sweeps.recipe import Recipe
from podium.sweeps.seeds import seeded
from podium.sweeps.trial import Evaluation, Outcome, Status, Trial, Verdict


class PopulationError(ConfigError):
    """A trial that is trained alone got the verdict to take over another trial's state."""


class ReferenceTrainer:
    """A trial in training, with its model, optimizer and schedule."""

    def __init__(self, recipe: Recipe, trial: Trial, device_data: DeviceData, parts: Parts | None = None) -> None:
        self.recipe, self.trial, self.device_data = recipe, trial, device_data
        self.parts = recipe.make(trial) if parts is None else parts
        self.model = self.parts.model.to(recipe.torch_device)  # no `train()`: modules keep the modes they were made in
        self.optimizer = self.parts.optimizer  # made for this model's parameters, which `to` moved in place
        for param, state in self.optimizer.state.items():  # some optimizers have state before the first step
            moved = {k: v.to(param.device) for k, v in state.items() if isinstance(v, Tensor) and v.dim()}
            state.update(moved)
        self.schedule = self.parts.schedule()
        self._loss = on_device(self.parts.task.loss, recipe.torch_device)
        self.steps_done = 0
        self.loss: Tensor | None = None
        self._epoch = -1
        self._order = self._keys = torch.empty(0, dtype=torch.int64)

    @property
    def is_over(self) -> bool:
        return self.steps_done >= self.parts.steps

    def step(self) -> None:
        """One step; the loss stays on the device."""
        inputs, targets = self.batch()
        with computing(self.recipe, self.parts.task):
            loss = self._loss(self.model(inputs), targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.parts.task.clip_norm is not None:
            clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], self.parts.task.clip_norm)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.loss = loss.detach()
        self.steps_done += 1

    def batch(self) -> tuple[Any, Any]:
        """The samples of the next step."""
        parts, samples = self.parts, self.device_data.train
        epoch, place = divmod(self.steps_done, parts.steps_per_epoch)
        if epoch != self._epoch:
            order, keys = parts.epoch(epoch)
            self._order = torch.from_numpy(order).to(samples.index_device)
            self._keys = torch.from_numpy(keys.view(np.int64)).to(samples.index_device)
            self._epoch = epoch
        cut = slice(place * parts.batch_size, (place + 1) * parts.batch_size)
        return samples.batch(self._order[cut], self._keys[cut])

    def evaluate(self, most: int | None = None) -> Evaluation:
        """Evaluate on the trial's validation data, or on the first `most` samples of it."""
        samples, index = validation(self.device_data, self.parts)
        index = index[:most]
        with computing(self.recipe, self.parts.task):
            outputs, targets = predict(self.model, samples, index, self.parts.task.eval_batch_size)
        return self.parts.evaluate(self.steps_done, outputs, targets)

    def state(self) -> dict[str, Tensor]:
        """Its `state_dict`, on the CPU."""
        held = self.model.state_dict()
        return {name: tensor.detach().cpu().clone() for name, tensor in held.items() if isinstance(tensor, Tensor)}


class Ending(NamedTuple):
    """How a training ended."""

    status: Status | Literal["cut"]
    """`cut`: the user stopped the sweep; the trial is neither finished nor handed in."""
    why: str = ""
    evaluation: Evaluation | None = None
    """The last one, where it was not yielded for a verdict."""


def training(
    trainer: ReferenceTrainer, stop: Callable[[], bool], on_step: Callable[[int], None] = lambda steps: None
) -> Generator[Evaluation, Verdict, Ending]:
    """Train to the end: yields each evaluation and takes the verdict on it. `on_step` gets the steps done."""
    while True:
        if trainer.parts.is_due(trainer.steps_done, trainer.recipe.eval_every):
            evaluation = trainer.evaluate()
            on_step(trainer.steps_done)
            if not math.isfinite(evaluation.loss):
                return Ending("diverged", f"its loss is {evaluation.loss} after {trainer.steps_done} steps", evaluation)
            verdict = yield evaluation
            if trainer.is_over:
                return Ending("finished")
            if verdict.action == "stop":
                return Ending("stopped", verdict.why)
        if stop():
            return Ending("cut")
        trainer.step()
        on_step(trainer.steps_done)


def train_trial(
    trainer: ReferenceTrainer, report: Callable[[Trial, Evaluation], Verdict], executor: str, stop: Callable[[], bool]
) -> Outcome | None:
    """Train to the end, or until a verdict stops the trial; None when `stop` cut it short.

    torch's generators are seeded from the trial's seed meanwhile, and restored afterwards.
    """
    with seeded(seed_of_training(trainer.trial), trainer.recipe.torch_device):
        began, history, steps = time.perf_counter(), list[Evaluation](), training(trainer, stop)
        try:
            history.append(next(steps))
            while True:
                verdict = report(trainer.trial, history[-1])
                if verdict.action == "become" and not trainer.is_over:
                    raise PopulationError(
                        f"trial {trainer.trial.number}: population based training copies rows between trials: executor "
                        f"must be fused, got {executor}"
                    )
                history.append(steps.send(verdict))
        except StopIteration as end:
            ending: Ending = end.value
    if ending.status == "cut":
        return None
    history += [ending.evaluation] if ending.evaluation is not None else []
    seconds = time.perf_counter() - began
    return outcome_of(trainer.parts, ending.status, ending.why, trainer.steps_done, history, executor, seconds)


def seed_of_training(trial: Trial) -> int:
    """The seed of torch's, Python's and numpy's generators before a trial's first step."""
    return derived_seed(trial.seed, 0xA10E)


def on_device(loss: Callable[[Any, Any], Tensor], device: torch.device) -> Callable[[Any, Any], Tensor]:
    """A copy of the loss on the device, as it may hold tensors (class weights); evaluation uses it on the CPU."""
    return copy.deepcopy(loss).to(device) if isinstance(loss, nn.Module) else loss


def outcome_of(
    parts: Parts, status: Any, why: str, steps: int, history: list[Evaluation], executor: str, seconds: float
) -> Outcome:
    return Outcome(
        trial=parts.trial,
        status=status,
        why=why,
        steps=steps,
        samples=steps * parts.batch_size,
        evaluation=history[-1] if history else None,
        history=tuple(history),
        executor=executor,
        seconds=seconds,
    )


def validation(device_data: DeviceData, parts: Parts) -> tuple[DeviceDataset, np.ndarray]:
    """A trial's validation samples: its fold's held-out samples, or the test data."""
    if parts.valid is not None:
        return device_data.train, parts.valid
    return device_data.test, np.arange(len(device_data.test.dataset))


@torch.no_grad()
def predict(model: nn.Module, samples: DeviceDataset, index: np.ndarray, batch_size: int) -> tuple[Any, Any]:
    """The model's outputs in evaluation mode and the targets of these samples, on the CPU."""
    rows = []
    with evaluating(model):
        for start in range(0, len(index), batch_size):
            cut = torch.from_numpy(index[start : start + batch_size]).to(samples.index_device)
            inputs, targets = samples.batch(cut, None)
            rows.append(map_tensors(lambda x: x.cpu(), (at_least_single(model(inputs)), targets)))
    outputs, targets = (join_rows(column) for column in zip(*rows, strict=True))
    return outputs, targets


def at_least_single(outputs: Any) -> Any:
    """Half precision outputs as float32, in which metrics are computed."""
    return map_tensors(lambda x: x.float() if x.dtype in (torch.bfloat16, torch.float16) else x, outputs)


def plain_state(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of `values` that the model's own `state_dict` has, tied names included."""
    keep = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    first = {id(tensor): name for name, tensor in reversed(list(keep.items()))}
    return {name: values[name] if name in values else values[first[id(tensor)]] for name, tensor in keep.items()}
