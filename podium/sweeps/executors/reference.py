"""One trial by itself, as plain PyTorch would train it: what every other way to train it is held against.

The optimizer is torch's own and steps a module's own parameters; nothing is stacked, captured or compiled.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from podium.engine.build import derived_seed
from podium.engine.modes import evaluating
from podium.engine.pytree import join_rows, map_tensors
from podium.errors import ConfigError
from podium.sweeps.fused.device_data import DeviceData, Shelf
from podium.sweeps.recipe import Parts, Recipe, computing, seeded
from podium.sweeps.trial import Evaluation, Outcome, Trial, Verdict


class PopulationError(ConfigError):
    """A trial was to take over another's state where it is trained alone."""


class ReferenceTrainer:
    """A trial under way. Its model, optimizer and schedule are its own."""

    def __init__(self, recipe: Recipe, trial: Trial, resident: DeviceData, parts: Parts | None = None) -> None:
        self.recipe, self.trial, self.resident = recipe, trial, resident
        self.parts = recipe.make(trial) if parts is None else parts
        self.model = self.parts.model.to(recipe.torch_device)  # its modules in the modes that they were made in
        self.optimizer = self.parts.optimizer  # made for this model's parameters, which `to` moved in place
        for param, state in self.optimizer.state.items():  # some make theirs at once
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
        parts, shelf = self.parts, self.resident.train
        epoch, place = divmod(self.steps_done, parts.steps_per_epoch)
        if epoch != self._epoch:
            order, keys = parts.epoch(epoch)
            self._order = torch.from_numpy(order).to(shelf.index_device)
            self._keys = torch.from_numpy(keys.view(np.int64)).to(shelf.index_device)
            self._epoch = epoch
        cut = slice(place * parts.batch_size, (place + 1) * parts.batch_size)
        return shelf.batch(self._order[cut], self._keys[cut])

    def evaluate(self, most: int | None = None) -> Evaluation:
        """How it does now on its validation data, or on the first `most` samples of it."""
        shelf, index = validation(self.resident, self.parts)
        index = index[:most]
        with computing(self.recipe, self.parts.task):
            outputs, targets = predict(self.model, shelf, index, self.parts.task.eval_batch_size)
        return self.parts.evaluate(self.steps_done, outputs, targets)

    def state(self) -> dict[str, Tensor]:
        """Its `state_dict`, on the CPU."""
        held = self.model.state_dict()
        return {name: tensor.detach().cpu().clone() for name, tensor in held.items() if isinstance(tensor, Tensor)}


def train_alone(
    alone: ReferenceTrainer, report: Callable[[Trial, Evaluation], Verdict], executor: str, stop: Callable[[], bool]
) -> Outcome | None:
    """Train to the end, or until a verdict says otherwise; None when `stop` cut it short.

    What the model draws from torch's generators it draws from the trial's seed; they are as before afterwards.
    """
    with seeded(seed_of_training(alone.trial), alone.recipe.torch_device):
        return _train(alone, report, executor, stop)


def seed_of_training(trial: Trial) -> int:
    """What the generators are seeded with before a trial's first step."""
    return derived_seed(trial.seed, 0xA10E)


def _train(
    alone: ReferenceTrainer, report: Callable[[Trial, Evaluation], Verdict], executor: str, stop: Callable[[], bool]
) -> Outcome | None:
    began, history = time.perf_counter(), []
    status, why = "finished", ""
    while True:
        if alone.parts.is_due(alone.steps_done, alone.recipe.eval_every):
            history.append(alone.evaluate())
            if not math.isfinite(history[-1].loss):
                status, why = "diverged", f"its loss is {history[-1].loss} after {alone.steps_done} steps"
                break
            verdict = report(alone.trial, history[-1])
            if alone.is_over:
                break
            if verdict.action == "stop":
                status, why = "stopped", verdict.why
                break
            if verdict.action == "become":
                raise PopulationError(
                    f"trial {alone.trial.number}: population based training copies rows between trials: executor must "
                    f"be fused, got {executor}"
                )
        if stop():
            return None
        alone.step()
    return outcome_of(alone.parts, status, why, alone.steps_done, history, executor, time.perf_counter() - began)


def on_device(loss: Callable[[Any, Any], Tensor], device: torch.device) -> Callable[[Any, Any], Tensor]:
    """A loss that is a module may hold tensors (class weights); evaluation, on the CPU, keeps its own."""
    return copy.deepcopy(loss).to(device) if isinstance(loss, nn.Module) else loss


def outcome_of(
    parts: Parts, status: Any, why: str, steps: int, history: list[Evaluation], executor: str, seconds: float
) -> Outcome:
    """What a trial came to, as all executors put it."""
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


def validation(resident: DeviceData, parts: Parts) -> tuple[Shelf, np.ndarray]:
    """What a trial is validated on: its fold's held-out samples, or the test data."""
    if parts.valid is not None:
        return resident.train, parts.valid
    return resident.test, np.arange(len(resident.test.dataset))


@torch.no_grad()
def predict(model: nn.Module, shelf: Shelf, index: np.ndarray, batch_size: int) -> tuple[Any, Any]:
    """What the model says of these samples, in evaluation mode, and what is true of them; on the CPU."""
    rows = []
    with evaluating(model):
        for start in range(0, len(index), batch_size):
            cut = torch.from_numpy(index[start : start + batch_size]).to(shelf.index_device)
            inputs, targets = shelf.batch(cut, None)
            rows.append(map_tensors(lambda x: x.cpu(), (at_least_single(model(inputs)), targets)))
    outputs, targets = (join_rows(column) for column in zip(*rows, strict=True))
    return outputs, targets


def at_least_single(outputs: Any) -> Any:
    """Metrics are computed in single precision, whatever the model's outputs are."""
    return map_tensors(lambda x: x.float() if x.dtype in (torch.bfloat16, torch.float16) else x, outputs)


def plain_state(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of `values` that the model's own `state_dict` has, tied names included."""
    keep = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    first = {id(tensor): name for name, tensor in reversed(list(keep.items()))}
    return {name: values[name] if name in values else values[first[id(tensor)]] for name, tensor in keep.items()}
