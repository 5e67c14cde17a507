"""Launchers without processes: a rank that hangs in its own code is found out and named."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import podium
from podium.data.base import ArrayDataset, Data
from podium.errors import DeadlineExceeded
from podium.task import Task

LIMIT_S = 1.0
STRATEGIES = ["all-reduce", "parameter-server:mode=sync", "parameter-server:mode=ssp", "parameter-server:mode=async"]


class Snag:
    """Lets one rank hang, or take its time, in a step or in validation, until the test is over."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.rank, self.step, self.seconds, self.where = 1, 3, 60.0, "step"
        self._visits = 0

    def at(self, where: str) -> None:
        if threading.current_thread().name == f"rank-{self.rank}" and where == self.where:
            self._visits += 1
            if self._visits == self.step:
                self.over.wait(self.seconds)


@pytest.fixture
def snag() -> Iterator[Snag]:
    found = Snag()
    yield found
    found.over.set()


def task(snag: Snag) -> Task:
    draw = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(48, 4, generator=draw).numpy(), torch.randn(48, 1, generator=draw).numpy()

    def loss(outputs: Tensor, wanted: Tensor) -> Tensor:
        snag.at("step" if outputs.requires_grad else "validation")
        return nn.functional.mse_loss(outputs, wanted)

    return Task(
        name="snag",
        model=lambda: nn.Linear(4, 1),
        data=lambda: Data(ArrayDataset(inputs, targets), ArrayDataset(inputs[:8], targets[:8])),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        batch_size=6,
        epochs=2,
    )


@pytest.mark.parametrize("launcher", ["threads", "virtual"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_hangs_ends_the_run_within_the_deadline_and_is_named(
    tmp_path: Path, snag: Snag, launcher: str, strategy: str
) -> None:
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"rank 1 hung for .* while the others waited \(at .* in wait\)"):
        podium.train(
            task(snag), strategy=strategy, workers=3, launcher=launcher, deadline_s=LIMIT_S, out=tmp_path, threads=1
        )
    assert time.monotonic() - began < 20 * LIMIT_S
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("rank-")]
    assert left == ["rank-1"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["threads", "virtual"])
def test_a_rank_that_validates_has_a_dozen_deadlines(tmp_path: Path, snag: Snag, launcher: str) -> None:
    snag.rank, snag.where, snag.step, snag.seconds = 0, "validation", 1, 2.5 * LIMIT_S
    result = podium.train(task(snag), workers=2, launcher=launcher, deadline_s=LIMIT_S, out=tmp_path, threads=1)
    assert result.status == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["threads", "virtual"])
def test_a_rank_alone_may_take_its_time(tmp_path: Path, snag: Snag, launcher: str) -> None:
    """Nobody waits for it."""
    snag.rank, snag.seconds = 0, 2.5 * LIMIT_S
    result = podium.train(task(snag), strategy="solo", launcher=launcher, deadline_s=LIMIT_S, out=tmp_path, threads=1)
    assert result.status == "finished"
