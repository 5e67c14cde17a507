"""The order of a ring: the best where it can be known, and a good one beyond."""

from __future__ import annotations

from itertools import pairwise, permutations
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from podium.errors import ConfigError
from podium.exchange.collectives.order import EXACT, best_ring, ring_cost, searched_ring, solved_ring

Kind = Literal["any", "distances", "racks", "few values"]
KINDS: tuple[Kind, ...] = ("any", "distances", "racks", "few values")


def links(p: int, seed: int, kind: Kind) -> NDArray[np.float64]:
    """What links could cost: any, by distance, in racks of four in no order, with many alike."""
    chance = np.random.default_rng(seed)
    if kind == "distances":
        places = chance.random((p, 2))
        return np.asarray(np.linalg.norm(places[:, None] - places[None], axis=2))
    if kind == "racks":
        rack = chance.permutation(p) // 4
        return np.where(rack[:, None] == rack[None], 1.0, 10.0) * chance.uniform(1, 1.1, (p, p))
    if kind == "few values":
        return chance.integers(1, 4, (p, p)).astype(float)
    return chance.random((p, p))


def by_trying_all(cost: NDArray[np.float64]) -> tuple[float, float]:
    return min(ring_cost(cost, (0, *rest)) for rest in permutations(range(1, len(cost))))


class TestSolved:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(1, 6), st.integers(0, 1 << 32), st.sampled_from(KINDS))
    def test_nothing_is_better(self, p: int, seed: int, kind: Kind) -> None:
        cost = links(p, seed, kind)
        order = solved_ring(cost)
        assert sorted(order) == list(range(p)) and order[0] == 0
        assert ring_cost(cost, order) == pytest.approx(by_trying_all(cost), rel=1e-12)

    @pytest.mark.parametrize("kind", KINDS)
    def test_nothing_is_better_among_seven(self, kind: Kind) -> None:
        cost = links(7, 7, kind)
        assert ring_cost(cost, best_ring(cost)) == pytest.approx(by_trying_all(cost), rel=1e-12)

    def test_the_direction_counts(self) -> None:
        cost = np.full((4, 4), 9.0)
        for a, b in ((0, 3), (3, 2), (2, 1), (1, 0)):
            cost[a, b] = 1.0
        assert best_ring(cost) == (0, 3, 2, 1)

    def test_the_slowest_link_comes_before_the_sum(self) -> None:
        cost = np.full((4, 4), 100.0)
        for a, b in ((0, 1), (1, 2), (2, 3), (3, 0)):
            cost[a, b] = 5.0  # slowest 5, sum 20
        cost[0, 2], cost[2, 1], cost[1, 3] = 6.0, 1.0, 1.0  # and on to 0: slowest 6, sum 13
        assert best_ring(cost) == (0, 1, 2, 3)

    def test_a_plain_list_will_do(self) -> None:
        assert best_ring([[0.0]]) == (0,)
        assert best_ring([[0.0, 1.0], [1.0, 0.0]]) == (0, 1)


class TestSearched:
    @pytest.mark.parametrize("kind", KINDS)
    def test_it_is_near_the_best_among_nine(self, kind: Kind) -> None:
        for seed in range(6):
            cost = links(9, seed, kind)
            slowest, total = ring_cost(cost, searched_ring(cost))
            best, least = ring_cost(cost, solved_ring(cost))
            assert slowest <= 1.1 * best
            assert slowest > best or total <= 1.1 * least

    @pytest.mark.slow
    @settings(max_examples=25, deadline=None)
    @given(st.integers(1, 30), st.integers(0, 1 << 32), st.sampled_from(KINDS))
    def test_it_is_an_order_no_worse_than_that_of_the_indices(self, p: int, seed: int, kind: Kind) -> None:
        cost = links(p, seed, kind)
        order = searched_ring(cost)
        assert sorted(order) == list(range(p)) and order[0] == 0
        assert ring_cost(cost, order) <= ring_cost(cost, range(p))

    @pytest.mark.slow
    def test_hundreds_of_members_in_a_plane(self) -> None:
        cost = links(300, 1, "distances")
        order = best_ring(cost)
        assert sorted(order) == list(range(300))
        slowest, total = ring_cost(cost, order)
        # Each member has two links at least as long as those to the nearest two; a random order is ten times as long.
        nearest = np.sort(cost, axis=1)[:, 1:3]
        assert total < 1.5 * nearest.sum() / 2
        assert slowest < 2 * nearest.max()

    @pytest.mark.slow
    def test_hundreds_of_members_in_racks(self) -> None:
        cost = links(300, 1, "racks")
        order = best_ring(cost)
        assert sorted(order) == list(range(300))
        links_out = [cost[a, b] for a, b in pairwise([*order, order[0]]) if cost[a, b] > 5]
        assert 75 <= len(links_out) < 1.2 * 75  # each of 75 racks is left once at least
        assert max(links_out) < 10.2

    def test_the_same_links_give_the_same_order(self) -> None:
        cost = links(EXACT + 10, 3, "any")
        assert best_ring(cost) == best_ring(cost.tolist())

    def test_links_that_are_all_alike(self) -> None:
        assert sorted(best_ring(np.ones((20, 20)))) == list(range(20))


class TestRefusals:
    def test_costs_must_be_square_and_finite(self) -> None:
        with pytest.raises(ConfigError, match=r"a row and a column for each member, got shape \(2, 3\)"):
            best_ring([[0.0, 1.0, 2.0], [1.0, 0.0, 2.0]])
        with pytest.raises(ConfigError, match="finite"):
            best_ring([[0.0, float("inf")], [1.0, 0.0]])
