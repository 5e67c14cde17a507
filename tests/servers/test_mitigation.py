"""What servers do about stale gradients, against the papers' formulas, written out number by number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from podium.errors import UnknownName
from podium.servers.pushes.mitigation import (
    ADAPTIVE_STRENGTH,
    CONSTANT_STRENGTH,
    MITIGATIONS,
    DelayCompensation,
    make_mitigation,
)

NUMBER = st.floats(-50, 50, allow_subnormal=False)


def vectors(length: int) -> st.SearchStrategy[tuple[list[float], ...]]:
    """A gradient, the parameters as they are, and as they were given."""
    return st.tuples(*[st.lists(NUMBER, min_size=length, max_size=length)] * 3)


def double(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def assert_equal(mended: Tensor, by_hand: Sequence[float]) -> None:
    torch.testing.assert_close(mended, double(by_hand), rtol=1e-13, atol=1e-13)


@given(st.integers(1, 6).flatmap(vectors), st.floats(0.001, 10))
def test_delay_compensation_is_the_papers_formula(numbers: tuple[list[float], ...], strength: float) -> None:
    gradient, now, then = numbers
    mitigation = make_mitigation("dc-asgd", strength)
    mitigation.gave(3, 0, [double(then)])
    (mended,) = mitigation.mend(3, 0, [double(gradient)], [double(now)])
    assert_equal(mended, [g + strength * g * g * (w - b) for g, w, b in zip(gradient, now, then, strict=True)])


@given(st.lists(vectors(2), min_size=1, max_size=6))
def test_adaptive_compensation_is_the_papers_formula_push_after_push(pushes: list[tuple[list[float], ...]]) -> None:
    """The mean square is one for all workers: each push of any of them moves it."""
    mitigation, squares = make_mitigation("dc-asgd-adaptive"), [0.0, 0.0]
    for worker, (gradient, now, then) in enumerate(pushes):
        mitigation.gave(worker % 2, 0, [double(then)])
        (mended,) = mitigation.mend(worker % 2, 0, [double(gradient)], [double(now)])
        squares = [0.95 * m + (1 - 0.95) * g * g for m, g in zip(squares, gradient, strict=True)]
        by_hand = [
            g + 2.0 / math.sqrt(m + 1e-7) * g * g * (w - b)
            for g, w, b, m in zip(gradient, now, then, squares, strict=True)
        ]
        assert_equal(mended, by_hand)


def test_the_constants_are_the_papers() -> None:
    assert (CONSTANT_STRENGTH, ADAPTIVE_STRENGTH) == (0.04, 2.0)
    mitigation = make_mitigation("dc-asgd-adaptive")
    assert isinstance(mitigation, DelayCompensation)
    assert (mitigation.decay, mitigation.epsilon) == (0.95, 1e-7)


@pytest.mark.parametrize("name", ["dc-asgd", "dc-asgd-adaptive"])
def test_a_first_push_is_carried_from_where_all_began(name: str) -> None:
    """It was computed from there, however far others have gone meanwhile."""
    begin, now, gradient = double([1.0, -2.0]), double([1.5, -1.0]), double([0.5, 2.0])
    known, unknown = make_mitigation(name), make_mitigation(name)
    for mitigation in (known, unknown):
        mitigation.mend(0, 0, [gradient], [begin])
        mitigation.gave(0, 0, [now])
    known.gave(1, 0, [begin])
    expected, mended = (m.mend(1, 0, [gradient], [now])[0] for m in (known, unknown))
    assert torch.equal(mended, expected)
    assert not torch.equal(mended, gradient)


@pytest.mark.parametrize("name", MITIGATIONS)
def test_a_gradient_that_is_not_stale_is_left_as_it_is(name: str) -> None:
    mitigation = make_mitigation(name)
    gradient, params = torch.randn(50), torch.randn(50)
    mitigation.gave(0, 0, [params])
    assert torch.equal(mitigation.mend(0, 0, [gradient], [params])[0], gradient)
    assert mitigation.rate(0) == 1.0


@pytest.mark.parametrize("name", MITIGATIONS)
def test_neither_gradients_nor_parameters_are_written_to(name: str) -> None:
    mitigation = make_mitigation(name)
    gradient, then, now = torch.randn(3, 50).unbind()
    kept = [t.clone() for t in (gradient, then, now)]
    for _ in range(2):
        mitigation.gave(0, 0, [then])
        mitigation.mend(0, 0, [gradient], [now])
    assert all(torch.equal(t, k) for t, k in zip((gradient, then, now), kept, strict=True))


def test_what_was_given_is_remembered_as_it_was_then() -> None:
    """The server goes on in place."""
    mitigation = make_mitigation("dc-asgd", 1.0)
    params = double([1.0])
    mitigation.gave(0, 0, [params])
    params += 4.0
    assert mitigation.mend(0, 0, [double([3.0])], [params])[0].tolist() == [3.0 + 9.0 * 4.0]
    mitigation.gave(0, 0, [params])
    assert mitigation.mend(0, 0, [double([3.0])], [params])[0].tolist() == [3.0]


def test_workers_and_units_are_kept_apart() -> None:
    mitigation = make_mitigation("dc-asgd", 1.0)
    for worker in range(2):
        for unit in range(2):
            mitigation.gave(worker, unit, [double([10.0 * worker + unit])])
    for worker in range(2):
        for unit in range(2):
            (mended,) = mitigation.mend(worker, unit, [double([1.0])], [double([100.0])])
            assert mended.tolist() == [1.0 + 100.0 - (10.0 * worker + unit)]


def test_the_adaptive_mean_square_is_each_units_own() -> None:
    """A unit sees the same numbers whatever comes for another, whatever its size."""
    alone, beside = make_mitigation("dc-asgd-adaptive"), make_mitigation("dc-asgd-adaptive")
    zero, gradient = double([0.0, 0.0]), double([0.3, -0.7])
    for mitigation in (alone, beside):
        mitigation.gave(0, 1, [zero])
    for n in range(4):
        beside.mend(0, 0, [double([9.0 * n] * 5)], [double([0.0] * 5)])
        expected, mended = (m.mend(0, 1, [gradient * n], [zero + n])[0] for m in (alone, beside))
        assert torch.equal(mended, expected)


def test_a_unit_of_several_ranges_is_mended_range_by_range() -> None:
    mitigation = make_mitigation("dc-asgd", 0.5)
    mitigation.gave(0, 0, [double([0.0]), double([0.0, 1.0])])
    mended = mitigation.mend(0, 0, [double([2.0]), double([1.0, 1.0])], [double([1.0]), double([2.0, 2.0])])
    assert [m.tolist() for m in mended] == [[4.0], [2.0, 1.5]]


@pytest.mark.parametrize(("staleness", "rate"), [(0, 1.0), (1, 1.0), (2, 1 / 2), (3, 1 / 3), (40, 1 / 40)])
def test_the_rate_is_divided_by_the_staleness(staleness: int, rate: float) -> None:
    assert make_mitigation("staleness-lr").rate(staleness) == rate
    for other in set(MITIGATIONS) - {"staleness-lr"}:
        assert make_mitigation(other).rate(staleness) == 1.0


@pytest.mark.parametrize("name", ["dc-asgd", "dc-asgd-adaptive"])
def test_the_memory_of_a_lost_worker_is_freed_and_no_other(name: str) -> None:
    mitigation = make_mitigation(name)
    assert isinstance(mitigation, DelayCompensation)
    for worker in range(3):
        for unit in range(2):
            mitigation.gave(worker, unit, [torch.full((4,), float(worker))])
    mitigation.forget(1)
    assert sorted(mitigation._given) == [(w, u) for w in (0, 2) for u in range(2)]
    mitigation.forget(1)
    gradient, now = torch.ones(4), torch.full((4,), 2.0)
    assert torch.equal(mitigation.mend(2, 0, [gradient], [now])[0], gradient)


def test_an_unknown_mitigation_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownName, match="dc-asgd"):
        make_mitigation("dc-sgd")
