"""DiLoCo: against local SGD, and against replicas with torch's SGD as the outer optimizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from podium.comm.base import Communicator
from podium.config import RunConfig
from podium.engine.build import Job
from podium.engine.training import Training
from podium.errors import ConfigError
from podium.records.recorder import Recorder
from podium.strategies.base import Strategy
from podium.strategies.diloco import MOMENTUM, DiLoCo
from podium.strategies.local_sgd import LocalSGD
from podium.task import Task
from podium.testing.strategies import BetweenRoundsContract, RoundsContract
from podium.testing.toys import (
    BATCH,
    Uncontrolled,
    assert_close,
    assert_same_bits,
    samples_used,
    toy,
    train,
    train_in,
    train_plainly,
)
from podium.testing.worlds import Memory, Virtual
from tests.strategies.test_local_sgd import UNEVEN, Replicas, flat_of, waiting


class TestDiLoCo(RoundsContract, BetweenRoundsContract):
    period = 2

    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return DiLoCo(sync_every=2)


def outer_by_hand(task: Task, workers: int, sync_every: int, **outer: Any) -> Tensor:
    """The paper's box, with plain replicas; a round that the end cuts short is merged plainly."""
    replicas, steps = Replicas(task, workers), 0
    anchor = torch.nn.Parameter(replicas.flats()[0])
    optimizer = torch.optim.SGD([anchor], **outer)
    while not replicas.is_over:
        replicas.step()
        steps += 1
        if steps % sync_every == 0:
            anchor.grad = anchor.detach() - replicas.mean()
            optimizer.step()
            replicas.put_all(anchor.detach())
    if steps % sync_every:
        replicas.put_all(replicas.mean())
    return replicas.flats()[0]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.0, False)])
def test_it_is_torchs_sgd_on_the_mean_drift(workers: int, momentum: float, nesterov: bool) -> None:
    task = toy(optimizer="adamw", epochs=3)  # 12 steps
    strategy = DiLoCo(sync_every=5, outer_momentum=momentum, nesterov=nesterov)
    expected = outer_by_hand(task, workers, 5, lr=0.7, momentum=momentum, nesterov=nesterov)
    torch.testing.assert_close(flat_of(train(task, strategy, workers)[0]), expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("steps", ["equal", "2,1,1"])
@pytest.mark.parametrize("codec", ["dense", "int8", "top-k:ratio=0.2"])
def test_a_unit_outer_step_without_momentum_is_local_sgd(steps: str, codec: str) -> None:
    task, outer = toy(optimizer="adamw"), {"outer_lr": 1.0, "outer_momentum": 0.0}
    mine = train(task, DiLoCo(sync_every=3, steps=steps, **outer), 3, codec=codec)  # type: ignore[arg-type]  # numbers
    local = train(task, LocalSGD(period=3, steps=steps), 3, codec=codec)
    for a, b in zip(mine, local, strict=True):
        assert_same_bits(a.state, b.state)


def test_one_worker_with_a_unit_outer_step_is_plain_training_to_rounding() -> None:
    task = toy(optimizer="adamw")
    (mine,) = train(task, DiLoCo(sync_every=3, outer_lr=1.0, outer_momentum=0.0))
    assert_close(mine.state, train_plainly(task).state)


def test_the_outer_momentum_survives_a_checkpoint(tmp_path: Path) -> None:
    """Checkpoints that lie where rounds end change nothing, where the inner optimizer has no moments to average."""
    task, strategy = toy(samples=48, epochs=3, optimizer="sgd"), DiLoCo(sync_every=4)
    often = train(task, strategy, 2, run_dir=tmp_path, checkpoint_every=4)
    assert_same_bits(often[0].state, train(task, DiLoCo(sync_every=4), 2)[0].state)
    found = Memory().run(partial(momentum_of_resumed, task=task, strategy=strategy, resume=str(tmp_path)), 2)
    assert torch.equal(found[0], found[1])
    assert found[0].abs().max() > 0


def momentum_of_resumed(comm: Communicator, task: Task, strategy: DiLoCo, resume: str) -> Tensor:
    config = RunConfig(task=task.name, workers=comm.size, eval_every=0, resume=resume)
    training = Training(
        Job(config, task, strategy, None, task_is_named=False), comm, Recorder(comm.rank), Uncontrolled()
    )
    training._begin_alike()
    strategy.init(training.worker)
    return torch.cat(training.worker.strategy_state[MOMENTUM])


def test_unequal_nodes_are_through_with_a_round_together() -> None:
    task = toy(samples=BATCH * 16)
    paced = train_in(Virtual(UNEVEN), task, DiLoCo(sync_every=8, steps="speed"), 3)
    equal = train_in(Virtual(UNEVEN), task, DiLoCo(sync_every=8), 3)
    assert waiting(paced) < 0.1 < 0.2 < waiting(equal)
    assert samples_used(paced) == 2 * BATCH * 16


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sync_every": 0}, "sync_every must be at least 1, got 0"),
    ({"outer_lr": 0.0}, "outer_lr must be above 0, got 0"),
    ({"outer_momentum": 1.0}, "outer_momentum must be from 0 to below 1, got 1"),
    ({"steps": "fast"}, "steps must be equal, speed or numbers"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DiLoCo(**options)
