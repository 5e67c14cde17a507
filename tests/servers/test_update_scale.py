"""Moments in the unit of the updates that they are kept over: carried over, they push on as before."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, RMSprop

from podium.servers.wire.optimizer_settings import options_of
from podium.servers.worker_side.update_scale import per_step, per_update

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(Adam, lr=0.01),
    "rmsprop": partial(RMSprop, lr=0.01, momentum=0.5),
}
GRADIENT = torch.tensor([1.0, -2.0, 0.5])


def after(make: Any, updates: int) -> tuple[nn.Parameter, Optimizer]:
    p = nn.Parameter(torch.zeros(3))
    optimizer = make([p])
    _step(p, optimizer, updates)
    return p, optimizer


def _step(p: nn.Parameter, optimizer: Optimizer, updates: int) -> Tensor:
    before = p.detach().clone()
    for _ in range(updates):
        p.grad = GRADIENT.clone()
        optimizer.step()
    return p.detach() - before


@pytest.mark.parametrize("share", [0.125, 0.5, 1.0])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_moments_that_are_carried_over_move_parameters_as_before(kind: str, share: float) -> None:
    p, optimizer = after(OPTIMIZERS[kind], 200)  # the moments are at their limit
    by_step = _step(p, optimizer, 1)
    momentum = optimizer.param_groups[0].get("momentum", 0.0)
    (options,) = options_of(optimizer, share)
    optimizer.state[p] = per_update(optimizer.state[p], momentum, share)
    optimizer.param_groups[0].update(options)
    by_updates = _step(p, optimizer, round(1 / share))
    torch.testing.assert_close(by_updates, by_step, rtol=0.01, atol=0)


def test_without_care_momentum_would_nearly_stop() -> None:
    p, optimizer = after(OPTIMIZERS["momentum"], 200)
    by_step = _step(p, optimizer, 1)
    (options,) = options_of(optimizer, 0.125)
    optimizer.param_groups[0].update(options)
    assert (_step(p, optimizer, 8) / by_step).max() < 0.3


@given(momentum=st.floats(0, 0.999), share=st.floats(0.001, 1), count=st.integers(1, 10**6))
def test_there_and_back_is_where_it_was(momentum: float, share: float, count: int) -> None:
    state = {"momentum_buffer": torch.tensor([1.0, -3.0]), "step": torch.tensor(float(count)), "exp_avg": GRADIENT}
    back = per_step(per_update(state, momentum, share), momentum, share)
    assert back.keys() == state.keys()
    for key, value in state.items():
        torch.testing.assert_close(back[key], value, rtol=1e-5, atol=0)


def test_an_update_of_a_whole_step_leaves_the_bits_alone() -> None:
    state = {"momentum_buffer": torch.rand(5), "step": 7}
    same = per_update(state, 0.9, 1.0)
    assert same["momentum_buffer"] is state["momentum_buffer"]
    assert same["step"] == 7
