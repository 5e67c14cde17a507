"""The flat optimizer: the same bits as stepping parameter by parameter, whatever happens in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import podium.engine.optim
from podium.engine.flat import Flat
from podium.engine.optim import ELEMENTWISE, FlatOptimizer, is_elementwise
from podium.testing.toys import OPTIMIZERS, UNUSUAL, assert_same_bits, make_optimizer, plain_model, two_groups


class Pair:
    """A model stepped flat beside a twin that is stepped parameter by parameter, on the same gradients."""

    def __init__(self, make: Callable[[nn.Module], Optimizer], model: Callable[[], nn.Module] = plain_model) -> None:
        torch.manual_seed(0)
        self.model = model()
        self.twin = copy.deepcopy(self.model)
        self.optimizer, self.reference = make(self.model), make(self.twin)
        self.flat = Flat(self.model, self.optimizer, 1 << 20, 1 << 20)
        self.fast = FlatOptimizer(
            self.optimizer, self.flat.parameters, self.flat.pieces, self.flat.params, self.flat.grads
        )
        self.generator = torch.Generator().manual_seed(1)

    def step(self, count: int = 1, unused: tuple[str, ...] = ()) -> None:
        twins = dict(self.twin.named_parameters())
        for _ in range(count):
            for p, piece, view in zip(self.flat.parameters, self.flat.pieces, self.flat.views, strict=True):
                used = piece.name not in unused
                view.copy_(torch.randn(p.shape, generator=self.generator, dtype=p.dtype))
                p.grad = view if used else None
                twins[piece.name].grad = view.clone() if used else None
            self.fast.step(all_used=not unused)
            self.reference.step()

    def assert_same(self) -> None:
        """Parameters, and the state dict that the owner would save."""
        assert_same_bits(dict(self.model.state_dict()), dict(self.twin.state_dict()))
        mine, theirs = self.optimizer.state_dict(), self.reference.state_dict()
        assert mine["param_groups"] == theirs["param_groups"]
        assert mine["state"].keys() == theirs["state"].keys()
        for key, kept in theirs["state"].items():
            assert_same_bits(mine["state"][key], kept)


def of(kind: str) -> Callable[[nn.Module], Optimizer]:
    return lambda model: make_optimizer(model, kind)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_flat_steps_equal_steps_parameter_by_parameter(kind: str) -> None:
    pair = Pair(of(kind))
    for _ in range(5):
        pair.step()
        pair.assert_same()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("cut", [1, 7, 60])
def test_where_a_block_is_cut_changes_nothing(kind: str, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(podium.engine.optim, "CUT_ELEMENTS", cut)
    pair = Pair(of(kind))
    pair.step(2)
    pair.step(1, unused=("2.bias",))
    pair.step(2)
    pair.assert_same()


@pytest.mark.parametrize("model", UNUSUAL)
@pytest.mark.parametrize("kind", ["momentum", "adamw", "adagrad"])
def test_any_model_is_stepped_alike(kind: str, model: str) -> None:
    pair = Pair(of(kind), UNUSUAL[model])
    pair.step(4)
    pair.assert_same()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_switching_to_single_parameters_and_back_changes_nothing(kind: str) -> None:
    pair = Pair(of(kind))
    pair.step(2)
    pair.step(2, unused=("2.bias",))
    pair.assert_same()
    pair.step(2)
    pair.assert_same()
    pair.step(1, unused=("0.weight", "0.bias"))
    pair.step(2)
    pair.assert_same()


def test_step_counts_that_came_to_differ_are_kept_apart() -> None:
    """After a step without it, a parameter's count is behind, and so is its bias correction."""
    pair = Pair(of("adamw"))
    pair.step(1, unused=("2.bias",))
    pair.step(3)
    pair.assert_same()
    counts = {int(state["step"]) for state in pair.optimizer.state.values()}
    assert counts == {3, 4}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_loaded_midway_is_taken_up(kind: str) -> None:
    pair = Pair(of(kind))
    pair.step(3)
    kept, values = copy.deepcopy(pair.optimizer.state_dict()), copy.deepcopy(pair.model.state_dict())
    pair.step(2)
    for optimizer, model in ((pair.optimizer, pair.model), (pair.reference, pair.twin)):
        optimizer.load_state_dict(copy.deepcopy(kept))
        model.load_state_dict(values)
    pair.fast.reload()
    pair.step(2)
    pair.assert_same()


def test_a_saved_state_goes_on_in_plain_pytorch() -> None:
    """What the owner saves must not share step counts, or a plain optimizer would count each step several times."""
    pair = Pair(of("adamw"))
    pair.step(3)
    other = make_optimizer(pair.twin, "adamw")
    other.load_state_dict(copy.deepcopy(pair.optimizer.state_dict()))
    pair.reference = other
    pair.step(2)
    pair.assert_same()


def test_hyper_parameters_changed_by_a_scheduler_are_followed() -> None:
    def rate(step: int) -> float:
        return 1.0 / (1 + step)

    pair = Pair(of("adamw"))
    schedules = [LambdaLR(optimizer, rate) for optimizer in (pair.optimizer, pair.reference)]
    for _ in range(4):
        pair.step()
        for schedule in schedules:
            schedule.step()
    pair.assert_same()
    assert pair.optimizer.param_groups[0]["lr"] == pytest.approx(0.02 / 5)


def test_groups_keep_their_own_hyper_parameters() -> None:
    pair = Pair(two_groups)
    pair.step(3)
    pair.assert_same()
    pair.optimizer.param_groups[1]["lr"] = pair.reference.param_groups[1]["lr"] = 0.5
    pair.step(2)
    pair.assert_same()


def test_many_parameters_are_stepped_as_one() -> None:
    """Otherwise all of the above would hold and nothing would be gained."""
    pair = Pair(of("adamw"))
    pair.step()
    moments = {state["exp_avg"].untyped_storage().data_ptr() for state in pair.optimizer.state.values()}
    assert len(moments) == 1


def test_an_optimizer_that_is_not_elementwise_steps_by_itself() -> None:
    pair = Pair(lambda model: NAdam(model.parameters(), lr=0.01))
    assert not is_elementwise(pair.optimizer)
    pair.step(3)
    pair.assert_same()


def test_what_counts_as_elementwise() -> None:
    class Mine(SGD):
        """Somebody's own variant, of which nothing is known."""

    params = [nn.Parameter(torch.zeros(3))]
    for cls in ELEMENTWISE:
        assert is_elementwise(cls(params, lr=0.1))
    for optimizer in (Mine(params, lr=0.1), Adam(params, fused=True), NAdam(params)):
        assert not is_elementwise(optimizer)


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}, {"foreach": True}, {"foreach": False}])
def test_options_of_the_optimizer_hold_on_blocks_too(options: dict[str, Any]) -> None:
    pair = Pair(lambda model: AdamW(model.parameters(), lr=0.01, **options))
    pair.step(3)
    pair.assert_same()


@pytest.mark.parametrize("options", [{"centered": True, "momentum": 0.5}, {"centered": True}])
def test_centred_rmsprop_holds_on_blocks_too(options: dict[str, Any]) -> None:
    pair = Pair(lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, **options))
    pair.step(3)
    pair.assert_same()


def test_a_hook_on_the_optimizer_still_runs_once_per_step() -> None:
    pair = Pair(of("sgd"))
    calls: list[int] = []
    pair.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    pair.step(3)
    assert len(calls) == 3
