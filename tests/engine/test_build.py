"""What cannot be trained is refused before the first step; what models and losses return may be any nest."""

from __future__ import annotations

import os
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
from podium.config import RunConfig, devices_in
from podium.engine.device import device_of
from podium.errors import CheckpointError, ConfigError
from podium.launch.torchrun_environment import Environment, own_settings
from podium.strategies.all_reduce import AllReduce
from podium.strategies.solo import Solo
from podium.task import Task
from podium.testing.toys import CLASSES, FEATURES, batch_norm_model, plain_model, toy, train, train_plainly


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


# Devices.


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """As though PyTorch saw so many; nothing is done on them here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def devices(setting: str, workers: int, first: int = 0) -> list[str]:
    return [str(device_of(setting, rank, first)) for rank in range(first, first + workers)]


@pytest.mark.parametrize(
    ("setting", "count", "expected"),
    [
        ("cpu", 2, ["cpu", "cpu", "cpu"]),
        ("auto", 0, ["cpu", "cpu", "cpu"]),
        ("auto", 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda", 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:1", 2, ["cuda:1", "cuda:1", "cuda:1"]),
        ("cuda,cpu", 1, ["cuda:0", "cpu", "cuda:0"]),
        ("cpu,cuda", 2, ["cpu", "cuda:0", "cpu", "cuda:1", "cpu", "cuda:0"]),
        ("cuda:0, cuda:0, cpu", 2, ["cuda:0", "cuda:0", "cpu", "cuda:0"]),
        ("cpu,cpu", 0, ["cpu", "cpu", "cpu"]),
    ],
)
def test_workers_have_devices_in_turn(
    monkeypatch: pytest.MonkeyPatch, setting: str, count: int, expected: list[str]
) -> None:
    gpus(monkeypatch, count)
    assert devices(setting, len(expected)) == expected


def test_a_host_may_offer_some_of_its_gpus_and_say_which_worker_has_which(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 8)
    assert [str(device_of("cuda", rank, nth=nth, most=2)) for rank, nth in ((4, 0), (9, 1), (11, 2))] == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
    ]
    assert str(device_of("auto", 3, nth=1, most=0)) == "cpu"
    with pytest.raises(ConfigError, match="gpus=0"):
        device_of("cuda", 3, nth=1, most=0)


@pytest.mark.parametrize("setting", ["", "gpu", "cuda,", "cuda:", "cuda:x", "cuda,auto", "cpu;cuda"])
def test_what_is_no_device_is_refused_before_anything_starts(setting: str) -> None:
    with pytest.raises(ConfigError, match="device must be 'cpu', 'cuda', 'cuda:N' or 'auto'"):
        RunConfig(device=setting)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"device=cpu,cuda: PyTorch sees no GPU here"):
        device_of("cpu,cuda", 1)
    gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"sees 2 GPUs here, numbered from 0, got cuda:2"):
        device_of("cuda:2", 0)


def test_unlike_devices_need_processes() -> None:
    for launcher in ("threads", "virtual"):
        with pytest.raises(ConfigError, match="must be processes of their own"):
            RunConfig(device="cuda,cpu", launcher=launcher)
        assert devices_in(RunConfig(device="cuda:0,cuda:1", launcher=launcher).device) == ("cuda:0", "cuda:1")
    assert devices_in(RunConfig(device="cuda,cpu").device) == ("cuda", "cpu")


def node(first: int, count: int, world: int) -> list[Environment]:
    """What torchrun tells the processes of a node whose ranks begin here."""
    return [Environment(first + i, world, i, count, "127.0.0.1", 1, True, "0") for i in range(count)]


def test_nodes_with_unequal_numbers_of_processes_share_gpus_and_cores_each_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = RunConfig(device="cuda", workers=5)
    cores = len(os.sched_getaffinity(0))
    gpus(monkeypatch, 2)
    many = [own_settings(config, one) for one in node(0, 3, world=6)]
    assert [own["device"] for own in many] == ["cuda:0", "cuda:1", "cuda:0"]
    assert {own["threads"] for own in many} == {max(1, cores // 3)}
    gpus(monkeypatch, 8)
    few = [own_settings(config, one) for one in node(3, 2, world=6)]
    assert [own["device"] for own in few] == ["cuda:0", "cuda:1"]
    gpus(monkeypatch, 0)
    (server,) = [own_settings(config, one) for one in node(5, 1, world=6)]
    assert server == {"threads": cores}


def test_where_all_processes_are_on_one_node_the_settings_are_the_runs() -> None:
    assert [own_settings(RunConfig(device="cuda"), one) for one in node(0, 2, world=2)] == [{}, {}]
