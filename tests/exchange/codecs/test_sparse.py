"""Choosing the largest elements, top-k, and deep gradient compression."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from podium.errors import ConfigError
from podium.exchange.codecs import make_codec
from podium.exchange.codecs.base import Memory, Span, StepContext
from podium.exchange.codecs.dgc import DGC
from podium.exchange.codecs.sparse import Select, choose, pack, room_for, unpack
from tests.exchange.codecs.spans import decode, memory_of, noise, span_of

SHAPES: dict[str, Callable[[int, int], Tensor]] = {
    "normal": noise,
    "heavy": lambda n, seed: noise(n, seed) ** 15,
    "constant": lambda n, seed: torch.full((n,), 0.5),
    "few levels": lambda n, seed: noise(n, seed).round(),
    "rows": lambda n, seed: noise(n, seed) * (torch.arange(n) // 1000 % 50 == seed % 50),
    "growing": lambda n, seed: torch.linspace(0, 1, n),
}


@pytest.mark.parametrize("ratio", (0.001, 0.01, 0.25))
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=12)
@given(numel=st.integers(1, 400_000), seed=st.integers(0, 1000))
def test_a_sample_never_keeps_more_than_wanted_and_seldom_less(shape: str, ratio: float, numel: int, seed: int) -> None:
    tensor, k = SHAPES[shape](numel, seed), room_for(numel, ratio)
    chosen = choose(tensor, k, "sampled")
    assert len(chosen) <= k and len(chosen) >= 0.8 * min(k, int(tensor.count_nonzero()))
    assert (chosen.diff() > 0).all() and tensor[chosen].all()
    left = tensor.index_fill(0, chosen, 0.0)
    if len(chosen):  # nothing that stays is larger than what goes
        assert left.abs().max() <= tensor[chosen].abs().min()


@pytest.mark.parametrize("select", ("exact", "sampled"))
def test_of_zeros_nothing_is_kept(select: Select) -> None:
    assert choose(torch.zeros(100_000), 1000, select).numel() == 0


@pytest.mark.parametrize("select", ("exact", "sampled"))
def test_a_sample_that_sees_nothing_is_not_believed(select: Select) -> None:
    tensor = torch.zeros(1_000_000)
    tensor[7::101] = 1.0  # between the sampled places
    assert choose(tensor, 8000, select).numel() == 8000


@pytest.mark.parametrize("small", (0.0, 1.0))
def test_a_sample_that_sees_only_the_large_is_not_believed(small: float) -> None:
    tensor = noise(1_000_000) * small
    tensor[::101] = 50.0
    chosen = choose(tensor, 20_000, "sampled")
    assert chosen.numel() == (20_000 if small else 9901)
    assert tensor[chosen].eq(50.0).sum() == 9901


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_means_the_largest(shape: str) -> None:
    tensor = SHAPES[shape](30_011, 3)
    chosen = choose(tensor, 300, "exact")
    largest = tensor.abs().sort(descending=True, stable=True)
    assert chosen.tolist() == sorted(largest.indices[:300][largest.values[:300] > 0].tolist())


def test_what_is_not_finite_is_largest() -> None:
    tensor = noise(200_000)
    tensor[[5, 70_000, 199_999]] = torch.tensor([math.nan, math.inf, -math.inf])
    assert {5, 70_000, 199_999} <= set(choose(tensor, 2000, "exact").tolist())
    assert {5, 70_000, 199_999} <= set(choose(tensor, 2000, "sampled").tolist())


@settings(max_examples=30)
@given(numel=st.integers(1, 200_000), data=st.data())
def test_what_is_packed_is_unpacked(numel: int, data: st.DataObject) -> None:
    places = sorted(data.draw(st.sets(st.integers(0, numel - 1), max_size=50)))
    k = data.draw(st.integers(max(1, len(places)), max(1, len(places)) + 3))
    tensor, chosen = noise(numel), torch.tensor(places, dtype=torch.int64)
    got_places, values = unpack(pack(tensor, chosen, k), numel, k)
    assert got_places[: len(places)].tolist() == places
    torch.testing.assert_close(values[: len(places)], tensor[chosen], rtol=2.0**-10, atol=1e-6)
    assert not values[len(places) :].any()


def test_top_k_sends_the_largest_and_nothing_else() -> None:
    codec, span, tensor = make_codec("top-k", {"ratio": 0.05}), span_of(100_003), noise(100_003)
    got = decode(codec, codec.encode(tensor, span, StepContext(), memory_of(span)), span, StepContext())
    threshold = tensor.abs().sort(descending=True).values[4999]
    torch.testing.assert_close(got, tensor * (tensor.abs() >= threshold), rtol=1e-3, atol=1e-4)


class TestDGC:
    @pytest.mark.parametrize("clip", (None, 3.0))
    @pytest.mark.parametrize("nesterov", (False, True))
    def test_it_is_the_loop_of_the_paper(self, nesterov: bool, clip: float | None) -> None:
        numel, m, workers = 5003, 0.8, 4
        codec = DGC(ratio=0.1, warmup_epochs=0, momentum=m, nesterov=nesterov, clip=clip, select="exact")
        span, turn = span_of(numel), StepContext(workers=workers)
        memory = memory_of(span)
        u, v = np.zeros(numel), np.zeros(numel)
        for step in range(6):
            tensor = noise(numel, step)
            wire = codec.encode(tensor, span, turn, memory)
            memory.commit()

            g = tensor.double().numpy()
            if clip is not None:
                g = g * min(1.0, clip / math.sqrt(workers) / np.linalg.norm(g))
            u = m * u + g
            v = v + (g + m * u if nesterov else u)
            mask = np.abs(v) >= np.sort(np.abs(v))[-500]
            sent = decode(codec, wire, span, turn).double().numpy()
            scale = np.abs(v).max()
            np.testing.assert_allclose(sent, (v / scale).astype(np.float16) * scale * mask, rtol=2e-3, atol=1e-6)
            v, u = v - sent, u * ~mask
            np.testing.assert_allclose(memory_at(memory, "velocity", span), u, atol=1e-5)
            np.testing.assert_allclose(memory_at(memory, "unsent", span), v, atol=1e-5)

    def test_warm_up_divides_by_four(self) -> None:
        codec = DGC()
        ratios = [codec.ratio_at(epoch) for epoch in (0.0, 0.99, 1.0, 2.5, 3.0, 4.0, 100.0)]
        assert ratios == [0.25, 0.25, 0.0625, 0.015625, 0.00390625, 0.001, 0.001]
        assert DGC(ratio=0.1).ratio_at(2.0) == 0.1
        assert DGC(warmup_epochs=0).ratio_at(0.0) == 0.001

    def test_it_needs_momentum_to_take_over(self) -> None:
        model = nn.Linear(2, 2)
        DGC().check(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9).param_groups[0])
        with pytest.raises(ConfigError, match="momentum"):
            DGC().check(torch.optim.Adam(model.parameters()).param_groups[0])
        with pytest.raises(ConfigError, match="dampening"):
            DGC().check(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.5).param_groups[0])


def memory_at(memory: Memory, name: str, span: Span) -> npt.NDArray[np.float64]:
    kept = memory.get(name, span)
    assert kept is not None
    return np.asarray(kept.double().numpy())
