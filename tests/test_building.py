"""What cannot be trained is refused before the first step; what models and losses return may be any nest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, ReduceLROnPlateau

import podium
from podium.errors import CheckpointError, ConfigError
from podium.strategies.all_reduce import AllReduce
from podium.strategies.solo import Solo
from podium.task import Task
from tests.toys import CLASSES, FEATURES, batch_norm_model, plain_model, toy, train, train_plainly


def train_named(tmp_path: Path, task: Task, **options: Any) -> podium.RunResult:
    return podium.train(task, strategy="solo", launcher="threads", out=str(tmp_path), **options)


def stranger(model: nn.Module) -> Optimizer:
    return SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)


def lazy_model() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Linear(8, CLASSES))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a parameter outside the model": ({"optimizer": stranger}, r"shape \(2,\) that is not in the model"),
    "LBFGS": ({"optimizer": lambda m: LBFGS(m.parameters())}, "LBFGS"),
    "no optimizer": ({"optimizer": lambda m: None}, "got NoneType"),
    "a plateau schedule": ({"schedule": lambda o, n: ReduceLROnPlateau(o)}, "ReduceLROnPlateau"),
    "a lazy module": ({"model": lazy_model}, "no shape yet"),
    "a loss per sample": ({"loss": partial(cross_entropy, reduction="none")}, r"shape \(\), got \(12,\)"),
    "a loss that is a float": ({"loss": lambda o, t: cross_entropy(o, t).item()}, "got float"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_trained_is_refused_with_its_reason(what: str) -> None:
    fields, reason = REFUSED[what]
    with pytest.raises(ConfigError, match=reason):
        train(toy(**fields), Solo())


class Outputs(NamedTuple):
    scores: Tensor
    hidden: dict[str, Tensor]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Outputs:
        hidden = self.first(x)
        return Outputs(self.head(hidden), {"hidden": hidden})


def nested_loss(outputs: Outputs, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.scores, targets) + 0.01 * outputs.hidden["hidden"].square().mean()


def nested_accuracy(outputs: Outputs, targets: Tensor) -> float:
    assert len(outputs.hidden["hidden"]) == len(targets)
    return float((outputs.scores.argmax(1) == targets).double().mean())


def test_a_model_may_return_a_nest_and_is_validated_on_it(tmp_path: Path) -> None:
    task = toy(model=Nested, loss=nested_loss, metrics={"accuracy": nested_accuracy}, eval_batch_size=7, accumulate=2)
    result = train_named(tmp_path, task, epochs=8)
    assert result.metrics["accuracy"] > 0.5


def cosine(optimizer: Optimizer, steps: int) -> LRScheduler:
    return CosineAnnealingLR(optimizer, steps)


def test_a_schedule_made_for_another_number_of_steps_is_not_resumed(tmp_path: Path) -> None:
    short = train_named(tmp_path, toy(schedule=cosine))
    with pytest.raises(CheckpointError, match="scheduled_steps=8, this run has scheduled_steps=16"):
        train_named(tmp_path, toy(schedule=cosine), epochs=4, resume=short.run_dir)
    unscheduled = train_named(tmp_path, toy())
    assert train_named(tmp_path, toy(), epochs=4, resume=unscheduled.run_dir).epochs == 4


def two_groups_of(model: nn.Module) -> Optimizer:
    first, *rest = model.parameters()
    return SGD([{"params": [first]}, {"params": rest}], lr=0.1, momentum=0.9)


@pytest.mark.parametrize(("fields", "reason"), [({"optimizer": two_groups_of}, "1 parameter groups saved, 2 here")])
def test_a_checkpoint_that_does_not_fit_says_why(
    tmp_path: Path, fields: dict[str, Callable[..., Any]], reason: str
) -> None:
    saved = train_named(tmp_path, toy())
    with pytest.raises(CheckpointError, match=reason):
        train_named(tmp_path, toy(**fields), epochs=4, resume=saved.run_dir)


def test_buffers_are_averaged_by_samples_so_an_idle_worker_does_not_count() -> None:
    task = toy(model=batch_norm_model)
    trained = train(task, AllReduce(), 2, shares=(1, 0))
    plain = train_plainly(task)
    for worker in trained:
        assert torch.allclose(worker.state["1.running_var"], plain.state["1.running_var"])


def test_outputs_in_double_precision_stay_so(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    def noted(outputs: Tensor, targets: Tensor) -> float:
        seen.append(outputs.dtype)
        return 0.0

    task = toy(model=lambda: plain_model().double(), metrics={"noted": noted})
    doubled = Task(**{**vars(task), "data": partial(_doubled, task)})
    train_named(tmp_path, doubled)
    assert set(seen) == {torch.float64}


def _doubled(task: Task) -> podium.Data:
    data = task.data()
    sets = [podium.ArrayDataset(d.inputs.double(), d.targets) for d in data]  # type: ignore[attr-defined,union-attr]
    return podium.Data(*sets)
