"""What a loop of the user's own may do to its model between two steps: against plain PyTorch, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from podium.comm.base import Communicator
from podium.config import RunConfig
from podium.data.order import GlobalOrder
from podium.engine.flat import Flat
from podium.engine.training import run_server
from podium.errors import PodiumError
from podium.launch.join import Options, Parts, make_run
from podium.records.recorder import Recorder
from podium.servers.server import Server
from podium.strategies.base import Strategy
from podium.testing.toys import BATCH, SAMPLES, Uncontrolled, plain_model, toy_data
from podium.testing.worlds import Memory, Real, World
from tests.engine.test_what_models_do import HOOKED, SERVED, STRATEGIES

EPOCHS = 3
Act = Callable[[nn.Module, Optimizer, int], None]
"""What the loop does after a step, given how many there have been."""


def nothing(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    pass


def new_storages(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def clamped_data(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for p in model.parameters():
        p.data = p.data.clamp(-0.25, 0.25)


def clamped_in_place(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.25, 0.25)


def gradual(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """All can be trained when training begins; the first layer waits for its turn, and rests again later."""
    model[0].requires_grad_(4 <= step < 8)


def unfreeze(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    model[0].weight.requires_grad_(step >= 4)


def unfreeze_with_a_group(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 4:
        model[0].weight.requires_grad_(True)
        optimizer.add_param_group({"params": [model[0].weight], "lr": 0.01})


def tie(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 4:
        model[2].bias.data = model[0].bias.data[:3]


def replace(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 4:
        model[2] = nn.Linear(8, 3)


def hook(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 4:
        optimizer.register_step_pre_hook(lambda owner, _args, _kwargs: None)


def other_modes(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    model.train(step % 2 == 0)


TABLE: dict[str, tuple[Act, bool, dict[str, str]]] = {
    # name: what the loop does, whether the first weight is frozen when training begins, refusals by strategy
    "nothing unusual": (nothing, False, {}),
    "new storages with the same values": (new_storages, False, {}),
    "new storages with other values": (clamped_data, False, {"servers": SERVED}),
    "values changed in .data": (clamped_in_place, False, {"servers": SERVED}),
    "unfrozen and frozen again": (gradual, False, {}),
    "frozen weights stay frozen": (nothing, True, {}),
    "unfrozen later": (unfreeze, True, dict.fromkeys(STRATEGIES, r"0\.weight was frozen when training began")),
    "unfrozen, in a new group": (unfreeze_with_a_group, True, dict.fromkeys(STRATEGIES, "frozen when training began")),
    "tied through .data": (tie, False, dict.fromkeys(STRATEGIES, "share memory|left its flat buffer")),
    "a layer replaced": (replace, False, dict.fromkeys(STRATEGIES, "replaced by another object")),
    "a hook on the optimizer": (hook, False, {"servers": HOOKED}),
    "train() and eval() by the loop": (other_modes, False, {}),
}


def parts(*, frozen: bool) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = plain_model()
    model[0].weight.requires_grad_(not frozen)
    return model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def plainly(act: Act, *, frozen: bool) -> dict[str, Tensor]:
    model, optimizer = parts(frozen=frozen)
    data, order, position = toy_data(SAMPLES).train, GlobalOrder(SAMPLES, 0), 0
    act(model, optimizer, 0)
    for step in range(order.steps(BATCH, EPOCHS)):
        piece = order.slice_at(position, BATCH)
        x, y = data.gather(order.indices(piece), order.keys(piece))
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        act(model, optimizer, step + 1)
        position += piece.count
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def looping(comm: Communicator, name: str, strategy: Strategy[Any]) -> dict[str, Tensor] | None:
    """One rank: a worker with its own loop, or a server."""
    act, frozen, _ = TABLE[name]
    with comm.computing():
        model, optimizer = parts(frozen=frozen)
    recorder = Recorder(comm.rank)
    if comm.rank in comm.servers:
        own_model, own_optimizer = copy.deepcopy((model, optimizer))
        flat = Flat(own_model, own_optimizer, strategy.bucket_bytes)
        run_server(Server(comm, flat, own_optimizer, recorder=recorder))
        return None
    run = make_run(Parts(model, optimizer), Options(), comm, strategy, RunConfig(), recorder, Uncontrolled())
    if comm.shares_process:
        run.worker.generators.fork(numpy_and_python=False)
    act(model, optimizer, 0)
    batches = run.batches(toy_data(SAMPLES).train, batch_size=BATCH, epochs=EPOCHS)
    for step, (x, y) in enumerate(batches, start=1):
        run.step(lambda x=x, y=y: cross_entropy(model(x), y))
        act(model, optimizer, step)
    return {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}


def check(world: World, name: str, strategy: str, workers: int) -> None:
    act, frozen, refused = TABLE[name]
    main = partial(looping, name=name, strategy=STRATEGIES[strategy])
    if strategy in refused:
        with pytest.raises(PodiumError, match=refused[strategy]):
            world.run(main, workers, STRATEGIES[strategy].server_spec.count)
        return
    expected = plainly(act, frozen=frozen)
    for state in world.run(main, workers, STRATEGIES[strategy].server_spec.count)[:workers]:
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=1e-5, atol=2e-6, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", TABLE)
def test_a_loop_may_do_this_or_is_told_that_it_may_not(name: str, strategy: str, workers: int) -> None:
    check(Memory(), name, strategy, workers)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_in_processes(strategy: str) -> None:
    check(Real(), "unfrozen and frozen again", strategy, 2)
