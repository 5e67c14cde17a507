"""The outer optimizer: Nesterov momentum where the delay is 1, the mean of what arrived where it is more."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from podium.engine.flat import Flat
from podium.errors import ConfigError
from podium.servers.outer import DelayedNesterov, make_outer
from podium.servers.ranges import lay_out
from podium.servers.shard import Shard
from podium.servers.wire.moments import pack, unpack


def deltas(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(7, generator=generator) for _ in range(count)]


def moved(make: Any, arrivals: list[Tensor]) -> Tensor:
    """Where a parameter of ones has come to."""
    p = nn.Parameter(torch.ones(7))
    optimizer = make([p])
    for delta in arrivals:
        p.grad = delta.clone()
        optimizer.step()
        assert torch.equal(p.grad, delta), "deltas lie in a worker's memory and are only read"
    return p.detach()


@settings(deadline=None, max_examples=50)
@given(st.floats(0.01, 2.0), st.floats(0.01, 0.99), st.integers(1, 12), st.integers(0, 1000))
def test_with_a_delay_of_one_it_is_torchs_nesterov_in_bits(lr: float, momentum: float, count: int, seed: int) -> None:
    mine = moved(partial(DelayedNesterov, lr=lr, momentum=momentum), deltas(count, seed))
    assert torch.equal(mine, moved(partial(SGD, lr=lr, momentum=momentum, nesterov=True), deltas(count, seed)))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5), st.integers(0, 4), st.floats(0.1, 0.99), st.integers(0, 1000))
def test_so_many_arrivals_are_one_outer_step_along_their_mean(
    delay: int, rounds: int, momentum: float, seed: int
) -> None:
    """As soon as a round is whole, momentum has taken up its mean; the plain part has been applied bit by bit."""
    arrivals = deltas(delay * rounds, seed)
    means = [torch.stack(arrivals[i * delay : (i + 1) * delay]).mean(dim=0) for i in range(rounds)]
    mine = moved(partial(DelayedNesterov, lr=0.5, momentum=momentum, delay=delay), arrivals)
    torch.testing.assert_close(mine, moved(partial(SGD, lr=0.5, momentum=momentum, nesterov=True), means))


@pytest.mark.parametrize("delay", [1, 3])
def test_without_momentum_it_is_plain_and_keeps_nothing(delay: int) -> None:
    p = nn.Parameter(torch.ones(7))
    optimizer = DelayedNesterov([p], lr=0.5, momentum=0.0, delay=delay)
    for p.grad in deltas(4):
        optimizer.step()
    torch.testing.assert_close(p.detach(), 1 - 0.5 / delay * sum(deltas(4)))
    assert not optimizer.state


def test_between_two_uses_of_momentum_deltas_are_applied_plainly() -> None:
    arrivals = deltas(5)
    mine = moved(partial(DelayedNesterov, lr=0.5, momentum=0.9, delay=3), arrivals)
    after_three = moved(partial(DelayedNesterov, lr=0.5, momentum=0.9, delay=3), arrivals[:3])
    torch.testing.assert_close(mine, after_three - 0.5 / 3 * (arrivals[3] + arrivals[4]))


@pytest.mark.parametrize("servers", [1, 3])
def test_it_runs_on_any_range_as_on_the_whole_and_goes_on_from_its_state(servers: int) -> None:
    """Ranges cut through parameters; halfway the state goes to other servers, as it does between two segments."""
    model = nn.Linear(5, 4)
    flat = Flat(model, SGD(model.parameters(), lr=1.0), bucket_bytes=1 << 20)
    began = [p.clone() for p in flat.params]
    options = [{"lr": 0.5, "momentum": 0.9, "delay": 3}]
    shards = [Shard(flat, make_outer(1, {}), layout) for layout in lay_out(flat, servers, 16)]
    generator = torch.Generator().manual_seed(1)
    arrivals = [[torch.randn(p.shape, generator=generator) for p in flat.params] for _ in range(8)]
    for n, arrival in enumerate(arrivals):
        if n == 4:
            shards = [_anew(flat, shard) for shard in shards]
        for shard in shards:
            for u, unit in enumerate(shard.units):
                shard.step(u, [r.of(arrival) for r in unit.of(shard.ranges)], options, ())
    whole = [nn.Parameter(p) for p in began]
    optimizer = DelayedNesterov(whole, lr=0.5, momentum=0.9, delay=3)
    for arrival in arrivals:
        for p, grad in zip(whole, arrival, strict=True):
            p.grad = grad
        optimizer.step()
    for shard in shards:
        for r, mine in zip(shard.ranges, shard.params, strict=True):
            assert torch.equal(mine, r.of([p.detach() for p in whole]))


def _anew(flat: Flat, shard: Shard) -> Shard:
    """The same on another server, from what travels."""
    meta, state = shard.dump()
    again = Shard(flat, make_outer(1, {}), type(lay_out(flat, 1, 16)[0])(shard.ranges, shard.units))
    kept = unpack(shard.ranges, meta, state)
    again.load(shard.params, *pack(shard.ranges, kept, [p.dtype for p in flat.params]))
    return again


def test_what_it_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="delay"):
        DelayedNesterov([nn.Parameter(torch.ones(1))], delay=0)
    with pytest.raises(ConfigError, match="came with the seed"):
        make_outer(1, {"beta": 1})
