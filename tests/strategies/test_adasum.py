"""Adasum: the sum of what is orthogonal, the mean of what is parallel, and the paper's tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from podium.errors import ConfigError
from podium.strategies.adasum import Adasum, adasum, adasum_tree
from podium.strategies.base import Strategy
from podium.task import Task
from podium.testing.strategies import OneWorkerContract, RoundsContract
from podium.testing.toys import assert_same_bits, toy, train
from tests.strategies.test_local_sgd import Replicas, flat_of


class TestAdasum(RoundsContract, OneWorkerContract):
    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return Adasum()


def vector(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(17, generator=torch.Generator().manual_seed(seed)) * scale


scales = st.floats(1e-3, 1e3)


class TestTwoMoves:
    @given(seed=st.integers(0, 999), scale=scales)
    @settings(max_examples=50, deadline=None)
    def test_orthogonal_ones_add_up(self, seed: int, scale: float) -> None:
        a, b = vector(seed), vector(seed + 1000, scale)
        b = b - a * (torch.dot(a, b) / torch.dot(a, a))
        torch.testing.assert_close(adasum(a, b), a + b, rtol=1e-4, atol=1e-4 * scale)

    @given(seed=st.integers(0, 999), scale=scales)
    @settings(max_examples=50, deadline=None)
    def test_parallel_ones_are_averaged(self, seed: int, scale: float) -> None:
        a = vector(seed)
        torch.testing.assert_close(adasum(a, scale * a), (a + scale * a) / 2, rtol=1e-4, atol=1e-4)

    @given(seed=st.integers(0, 999), scale=scales)
    @settings(max_examples=50, deadline=None)
    def test_order_does_not_matter_and_nothing_adds_nothing(self, seed: int, scale: float) -> None:
        a, b = vector(seed), vector(seed + 1000, scale)
        torch.testing.assert_close(adasum(a, b), adasum(b, a))
        assert torch.equal(adasum(a, torch.zeros_like(a)), a)
        assert torch.equal(adasum(torch.zeros_like(a), a), a)
        assert torch.equal(adasum(torch.zeros_like(a), torch.zeros_like(a)), torch.zeros_like(a))


class TestManyMoves:
    @pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
    def test_equal_ones_come_to_one_and_orthogonal_ones_to_their_sum(self, workers: int) -> None:
        a = vector(3)
        torch.testing.assert_close(adasum_tree([a] * workers), a)
        axes = list(torch.eye(8)[:workers])
        torch.testing.assert_close(adasum_tree(axes), sum(axes, torch.zeros(8)))

    def test_the_tree_goes_by_neighbours(self) -> None:
        a, b, c, d, e = (vector(i) for i in range(5))
        assert torch.equal(adasum_tree([a, b, c]), adasum(adasum(a, b), c))
        assert torch.equal(adasum_tree([a, b, c, d, e]), adasum(adasum(adasum(a, b), adasum(c, d)), e))


def combined_by_hand(task: Task, workers: int, shares: Any = None) -> Tensor:
    """Plain replicas whose moves are combined after every step, tensor by tensor."""
    replicas = Replicas(task, workers, shares)
    while not replicas.is_over:
        before = [p.detach().clone() for p in replicas.models[0].parameters()]
        replicas.step()
        after = [list(model.parameters()) for model in replicas.models]
        for i, start in enumerate(before):
            moves = [params[i].detach() - start for params in after]
            for params in after:
                params[i].data.copy_(start + adasum_tree(moves))
    return replicas.flats()[0]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize(("workers", "shares"), [(2, None), (3, (1.0, 0.0, 2.0)), (4, None)])
def test_it_combines_the_moves_of_the_workers_own_optimizers(optimizer: str, workers: int, shares: Any) -> None:
    task = toy(optimizer=optimizer)
    trained = train(task, Adasum(), workers, shares=shares)
    torch.testing.assert_close(flat_of(trained[0]), combined_by_hand(task, workers, shares), rtol=1e-5, atol=5e-6)


def test_buckets_do_not_change_the_bits() -> None:
    assert_same_bits(train(toy(), Adasum(), 3)[0].state, train(toy(), Adasum(bucket_bytes=1), 3)[0].state)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="bucket_bytes must be at least 1, got 0"):
        Adasum(bucket_bytes=0)
