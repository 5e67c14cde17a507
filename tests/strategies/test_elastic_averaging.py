"""Elastic averaging: against replicas by hand, and at the ends of the spring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from podium.errors import ConfigError
from podium.strategies.base import Strategy
from podium.strategies.elastic_averaging import ElasticAveraging
from podium.strategies.local_sgd import LocalSGD
from podium.task import Task
from podium.testing.strategies import RoundsContract
from podium.testing.toys import assert_close, toy, train
from tests.strategies.test_local_sgd import Replicas, flat_of


class TestElasticAveraging(RoundsContract):
    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return ElasticAveraging(period=2)


def elastic_by_hand(task: Task, workers: int, period: int, elasticity: float, shares: Any = None) -> Tensor:
    """The paper's box with plain replicas; what it comes to is the centre."""
    replicas, steps = Replicas(task, workers, shares), 0
    centre = replicas.flats()[0]
    while not replicas.is_over:
        replicas.step()
        steps += 1
        if steps % period == 0 or replicas.is_over:
            flats = replicas.flats()
            pulls = [elasticity * w * (x - centre) for w, x in zip(replicas.take_weights(), flats, strict=True)]
            for i, (x, pull) in enumerate(zip(flats, pulls, strict=True)):
                replicas.put(i, x - pull)
            centre = centre + sum(pulls, torch.zeros(()))
    return centre


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov"])  # the latter is EAMSGD
@pytest.mark.parametrize(
    ("workers", "period", "elasticity", "shares"),
    [(1, 2, 0.9, None), (3, 3, 0.9, None), (3, 1, 0.5, (2.0, 1.0, 1.0)), (3, 3, 1.0, (1.0, 0.0, 1.0))],
)
def test_it_is_the_papers_box(
    optimizer: str, workers: int, period: int, elasticity: float, shares: tuple[float, ...] | None
) -> None:
    task = toy(optimizer=optimizer)
    trained = train(task, ElasticAveraging(period=period, elasticity=elasticity), workers, shares=shares)
    expected = elastic_by_hand(task, workers, period, elasticity, shares)
    torch.testing.assert_close(flat_of(trained[0]), expected, rtol=1e-5, atol=5e-6)


def test_without_elasticity_workers_never_meet_and_the_centre_stays() -> None:
    task, losses = toy(optimizer="momentum"), []

    def noted(out: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = task.loss(out, y)
        losses.append(float(loss.detach()))
        return loss

    trained = train(task, ElasticAveraging(period=2, elasticity=0.0), 3)
    by_hand = Replicas(toy(optimizer="momentum", loss=noted), 3)
    start = by_hand.flats()[0]
    while not by_hand.is_over:
        by_hand.step()
    for i, worker in enumerate(trained):
        assert worker.losses == pytest.approx(losses[i::3])
        assert torch.equal(flat_of(worker), start)


def test_in_one_round_full_elasticity_is_local_sgd() -> None:
    """Until they first meet, replicas go the same ways; then the centre is their mean."""
    task = toy(samples=36, epochs=1)  # three steps
    for shares in (None, (3, 1, 2)):
        elastic = train(task, ElasticAveraging(period=3, elasticity=1.0), 3, shares=shares)
        local = train(task, LocalSGD(period=3), 3, shares=shares)
        assert_close(elastic[0].state, local[0].state)


def test_one_worker_with_full_elasticity_swaps_places_with_its_centre() -> None:
    task = toy(optimizer="sgd", samples=24, epochs=1)  # two steps
    once = train(toy(optimizer="sgd", samples=24, epochs=1), ElasticAveraging(period=2, elasticity=1.0))
    assert_close(once[0].state, train(task, LocalSGD(period=2))[0].state)
    torch.manual_seed(0)
    start = task.model().state_dict()
    twice = train(task, ElasticAveraging(period=1, elasticity=1.0))  # out, back to the start, and out again
    moved = Replicas(task, 1)
    moved.step()
    first = moved.flats()[0]
    moved.put(0, torch.cat([value.reshape(-1) for value in start.values()]))
    moved.step()
    second = moved.flats()[0]
    assert not torch.allclose(first, second)
    torch.testing.assert_close(flat_of(twice[0]), second, rtol=1e-5, atol=2e-6)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"period": 0}, "period must be at least 1, got 0"),
    ({"elasticity": 1.5}, "elasticity must be from 0 to 1, got 1.5"),
    ({"elasticity": -0.1}, "elasticity must be from 0 to 1, got -0.1"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ElasticAveraging(**options)
