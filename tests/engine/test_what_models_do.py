"""What a model may do to itself while it trains: each row of the table against plain PyTorch at the same global batch.

Each row is trained on one and on two workers under all-reduce, synchronous parameter servers and local SGD with a
period of 1. A worker must come to what plain PyTorch comes to, or training must be refused with a clear error; which of
the two is part of the row.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import SGD, Adam, Optimizer

from podium.comm.base import Communicator
from podium.config import RunConfig
from podium.data.order import GlobalOrder
from podium.engine.build import Job
from podium.engine.training import Training, run_server
from podium.errors import PodiumError
from podium.records.recorder import Recorder
from podium.servers.build import make_server
from podium.strategies.all_reduce import AllReduce
from podium.strategies.base import Strategy
from podium.strategies.local_sgd import LocalSGD
from podium.strategies.parameter_server import ParameterServer
from podium.task import Task
from podium.testing.toys import CLASSES, FEATURES, Uncontrolled, toy
from podium.testing.worlds import Memory, Real, World

STRATEGIES: dict[str, Strategy[Any]] = {
    "all-reduce": AllReduce(),
    "servers": ParameterServer(servers=2),
    "local-sgd": LocalSGD(period=1, average="parameters+moments"),
}
SERVED = "servers hold the parameters"
HOOKED = "the optimizer must have no step hooks"


# Models. Passes are counted where gradients are on, so that a validation counts none.


class Acting(nn.Module):
    """Two layers and, before each training pass, something that it does to itself."""

    def __init__(self, act: Callable[[Acting], None] | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.act, self.turn = act or _nothing, 0
        self.optimizers: list[Optimizer] = []

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.turn += 1
            self.act(self)
        return self.last(self.middle(torch.tanh(self.first(x.to(self.first.weight.dtype)))))

    def middle(self, x: Tensor) -> Tensor:
        return x


def _nothing(_model: Acting) -> None:
    pass


def at(turn: int, act: Callable[[Acting], Any], model: Acting) -> None:
    if model.turn == turn:
        act(model)


class Layered(Acting):
    """With one layer more in between."""

    def __init__(self, make: Callable[[], nn.Module], act: Callable[[Acting], None] | None = None) -> None:
        super().__init__(act)
        self.between = make()

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = self.between(x)
        return out


def layered(make: Callable[[], nn.Module], act: Callable[[Acting], None] | None = None) -> nn.Module:
    return Layered(make, act)


# Modes.


def frozen_batch_norm() -> nn.Module:
    model = Layered(partial(nn.BatchNorm1d, 8))
    model.between.running_mean += 0.3
    model.between.running_var *= 1.7
    model.between.eval()
    return model


def dropout_in_eval() -> nn.Module:
    model = Layered(partial(nn.Dropout, 0.5))
    model.between.eval()
    return model


def all_in_eval() -> nn.Module:
    return nn.Sequential(frozen_batch_norm(), nn.Dropout(0.9)).eval()


class Adapter(nn.Module):
    """Merges its correction into its weight for evaluation, in a `train` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.correction = nn.Parameter(torch.eye(8)), nn.Parameter(torch.full((8, 8), 0.01))
        self.merged = False

    def train(self, mode: bool = True) -> Adapter:
        super().train(mode)
        if mode == self.merged:
            with torch.no_grad():
                self.weight += -self.correction if mode else self.correction
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight if self.merged else self.weight + self.correction)


# Buffers.


class Averaging(Acting):
    """Keeps a moving average of its inputs, in one way or another."""

    def __init__(self, keep: Callable[[Averaging, Tensor], None], **buffers: Tensor | None) -> None:
        super().__init__()
        self.keep = keep
        persistent = buffers.pop("hidden", None) is None
        for name, value in {"ema": torch.zeros(FEATURES), **buffers}.items():
            shares = value is not None and value.stride() == (0,)
            self.register_buffer(name, value if value is None or shares else value.clone(), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.turn += 1
            self.keep(self, x)
        return self.last(torch.tanh(self.first(x)))


def reassigned(model: Averaging, x: Tensor) -> None:
    model.ema = 0.9 * model.ema + 0.1 * x.mean(0)


def with_a_graph(model: Averaging, x: Tensor) -> None:
    model.ema = 0.9 * model.ema.detach() + 0.1 * (x.mean(0) + 0 * model.first.bias.sum())


def in_place(model: Averaging, x: Tensor) -> None:
    model.ema.mul_(0.9).add_(0.1 * x.mean(0))


def in_double(model: Averaging, x: Tensor) -> None:
    model.ema = 0.9 * model.ema.double() + 0.1 * x.mean(0).double()


def growing(model: Averaging, x: Tensor) -> None:
    model.ema = torch.cat([model.ema, x.mean().reshape(1)])


def counting(model: Averaging, x: Tensor) -> None:
    in_place(model, x)
    model.count += 1
    model.seen = model.count > 2


def adding(model: Averaging, x: Tensor) -> None:
    reassigned(model, x)
    if model.turn == 3:
        model.register_buffer("late", torch.ones(2))
    if model.turn > 3:
        model.late = model.late + x.mean()


def removing(model: Averaging, x: Tensor) -> None:
    in_place(model, x)
    if model.turn == 3:
        del model.spare


def as_the_batch(model: Averaging, x: Tensor) -> None:
    model.ema = x.sum(dim=1).detach()


def complex_average(model: Averaging, x: Tensor) -> None:
    model.ema = 0.9 * model.ema + 0.1j * x.mean(0)


class Codebook(Averaging):
    """Keeps its moving average in a parameter that nobody trains."""

    def __init__(self, keep: Callable[[Averaging, Tensor], None]) -> None:
        super().__init__(keep)
        self.code = nn.Parameter(torch.zeros(FEATURES), requires_grad=False)


def codes_in_place(model: Averaging, x: Tensor) -> None:
    with torch.no_grad():
        model.code.lerp_(x.mean(0), 0.1)


def codes_anew(model: Averaging, x: Tensor) -> None:
    model.code.data = 0.9 * model.code.data + 0.1 * x.mean(0)


class Teacher(Acting):
    """Has a copy of its first layer that follows it, as self-supervised training does."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(FEATURES, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            for mine, its in zip(self.first.parameters(), self.teacher.parameters(), strict=True):
                its.data = 0.9 * its.data + 0.1 * mine.data
        return super().forward(x)


class SetByData(Acting):
    """Takes the first values of a parameter from its first batch, which is another one on each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def middle(self, x: Tensor) -> Tensor:
        if self.turn == 1 and torch.is_grad_enabled():
            with torch.no_grad():
                self.scale.copy_(1 / (x.std(0) + 0.1))
        return x * self.scale


def only_validated(model: Averaging, x: Tensor) -> None:
    pass


class TouchedByValidation(Averaging):
    """Counts all passes, those of a validation too, which only the first worker does."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if not torch.is_grad_enabled():
            self.ema += 1
            self.extra = self.ema * 2
        return out


class MovedByValidation(Acting):
    """Gives its parameters new storages where it is validated, as cuDNN's recurrent nets do."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            cloned(self)
        return super().forward(x)


MASK = torch.full((4, 4), -torch.inf).triu(1)
ODD = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e-45, 3e38])
THIRDS = torch.tensor([1 / 3, -2 / 3, 1e300, -torch.inf, torch.nan, -0.0, 5e-324], dtype=torch.float64)


# Storages, freezing, ties, parametrizations.


def cloned(model: Acting) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def other_strides(model: Acting) -> None:
    model.first.weight.data = model.first.weight.data.t().contiguous().t()


def clamped_data(model: Acting) -> None:
    model.first.weight.data = model.first.weight.data.clamp(-0.2, 0.2)


def clamped_in_data(model: Acting) -> None:
    model.first.weight.data.clamp_(-0.2, 0.2)


def clamped_in_place(model: Acting) -> None:
    with torch.no_grad():
        model.first.weight.clamp_(-0.2, 0.2)


def freezing(model: Acting) -> None:
    if model.turn in (1, 3, 5, 7):
        model.first.requires_grad_(model.turn in (3, 7))


def frozen_first(act: Callable[[Acting], None]) -> nn.Module:
    model = Acting(act)
    model.first.weight.requires_grad_(False)
    return model


def unfreeze(model: Acting) -> None:
    model.first.weight.requires_grad_(True)


def square() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def tied() -> nn.Module:
    pair = square()
    pair[2].weight = pair[0].weight
    return pair


def tied_through_data() -> nn.Module:
    pair = square()
    pair[2].weight.data = pair[0].weight.data
    return pair


def tied_late(model: Acting) -> None:
    pair: Any = model.between
    pair[2].weight.data = pair[0].weight.data


def buffer_of_a_parameter() -> nn.Module:
    model = nn.Linear(8, 8)
    model.register_buffer("shown", model.weight.data[2])
    return model


def sparse_buffer() -> nn.Module:
    model = Acting()
    model.register_buffer("links", torch.eye(4).to_sparse())
    return model


def weight_norm() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(8, 8))


def spectral_norm() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(8, 8))


def orthogonal() -> nn.Module:
    return parametrizations.orthogonal(nn.Linear(8, 8))


def parametrize_late(model: Acting) -> None:
    parametrize.register_parametrization(model.first, "weight", nn.Tanh())


def replace_parameter(model: Acting) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())


def replace_module(model: Acting) -> None:
    model.last = nn.Linear(8, CLASSES)


def add_parameter(model: Acting) -> None:
    model.more = nn.Parameter(torch.zeros(3))


def add_frozen_module(model: Acting) -> None:
    model.more = nn.Module()
    model.more.scale = nn.Parameter(torch.ones(2), requires_grad=False)


def cast(model: Acting) -> None:
    model.double()


class WithEmpty(Acting):
    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.also = nn.Parameter(torch.zeros(0, FEATURES)), nn.Parameter(torch.zeros(0))

    def middle(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum() + self.also.sum()


# Hooks.


def halve_output(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output / 2


def double_input_gradient(_module: nn.Module, grad_input: Any, _grad_output: Any) -> Any:
    return tuple(None if g is None else g * 2 for g in grad_input)


def with_module_hooks() -> nn.Module:
    model = Acting()
    model.first.register_forward_hook(halve_output)
    model.last.register_full_backward_hook(double_input_gradient)
    return model


def with_gradient_hook() -> nn.Module:
    model = Acting()
    model.first.weight.register_hook(lambda grad: grad * 3)
    return model


def scale_gradient(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(3)


def take_gradient_away(p: Tensor) -> None:
    p.grad = None


def with_accumulated_hook(hook: Callable[[Tensor], None]) -> nn.Module:
    model = Acting()
    model.first.weight.register_post_accumulate_grad_hook(hook)
    return model


def hook_later(model: Acting) -> None:
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(scale_gradient)


def new_storage_in_backward(p: Tensor) -> None:
    p.data = p.data.clone()


# Optimizers.


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained_only(model: nn.Module) -> Optimizer:
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.02)


def scale_all(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.mul_(0.5)


def shrink_all(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data = p.data * 0.99


def pre_hooked(model: nn.Module) -> Optimizer:
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(scale_all)
    return optimizer


def post_hooked(model: nn.Module) -> Optimizer:
    optimizer = sgd(model)
    optimizer.register_step_post_hook(shrink_all)
    return optimizer


def step_and_shrink(optimizer: Optimizer, closure: Any = None) -> None:
    SGD.step(optimizer, closure)
    shrink_all(optimizer, (), {})


def patched(model: nn.Module) -> Optimizer:
    optimizer: Any = sgd(model)
    optimizer.step = types.MethodType(step_and_shrink, optimizer)
    return optimizer


class Shrinking(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        step_and_shrink(self, closure)


def overridden(model: nn.Module) -> Optimizer:
    return Shrinking(model.parameters(), lr=0.1, momentum=0.9)


def known_to_the_model(model: Any) -> Optimizer:
    optimizer = sgd(model)
    model.optimizers.append(optimizer)
    return optimizer


def add_group(model: Acting) -> None:
    model.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 1.0})


def restart_momentum(model: Acting) -> None:
    kept = model.optimizers[0].state_dict()
    model.optimizers[0].load_state_dict({**kept, "state": {}})


# The table.


class Row(NamedTuple):
    """A model, an optimizer, and what must come of it where that is not the same as in plain PyTorch."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    refused: str | Mapping[str, str] = ""  # everywhere, or by strategy
    with_others: str = ""  # refused on two workers only
    means_other: str = ""  # the strategy that means something else by it on two workers
    options: Mapping[str, Any] = {}
    task: Mapping[str, Any] = {}


EDITED = {"servers": SERVED}
IDLE = {"options": {"checkpoint_every": 1}, "task": {"samples": 25}}
"""The last step of an epoch has one sample, and every step ends with buffers made alike: the second worker has none."""

TABLE: dict[str, Row] = {
    "nothing unusual": Row(Acting),
    # Modes.
    "BatchNorm in evaluation mode": Row(frozen_batch_norm),
    "dropout in evaluation mode": Row(dropout_in_eval),
    "a model all in evaluation mode": Row(all_in_eval),
    "a layer that does more in train()": Row(partial(layered, Adapter)),
    # Buffers.
    "a buffer assigned anew": Row(partial(Averaging, reassigned)),
    "a buffer assigned anew, not saved": Row(partial(Averaging, reassigned, hidden=torch.zeros(1))),
    "a buffer assigned with a graph behind it": Row(partial(Averaging, with_a_graph)),
    "a buffer changed in place": Row(partial(Averaging, in_place)),
    "a buffer that becomes double": Row(partial(Averaging, in_double)),
    "a buffer that grows": Row(partial(Averaging, growing, ema=torch.zeros(1))),
    "a buffer that appears": Row(partial(Averaging, adding)),
    "a buffer that goes": Row(partial(Averaging, removing, spare=torch.ones(3))),
    "buffers of whole numbers and truths": Row(
        partial(Averaging, counting, count=torch.tensor(0), seen=torch.tensor(False))
    ),
    "a mask of -inf": Row(partial(Averaging, in_place, mask=MASK), **IDLE),
    "buffers of odd numbers": Row(partial(Averaging, in_place, odd=ODD, thirds=THIRDS), **IDLE),
    "odd numbers, assigned anew": Row(partial(Averaging, reassigned, odd=ODD, thirds=THIRDS)),
    "a buffer whose elements share memory": Row(partial(Averaging, in_place, wide=torch.ones(1).expand(5))),
    "a complex buffer": Row(partial(Averaging, complex_average, ema=torch.zeros(FEATURES, dtype=torch.complex64))),
    "a complex buffer in double precision": Row(
        partial(Averaging, complex_average, ema=torch.zeros(FEATURES, dtype=torch.complex128)), **IDLE
    ),
    "a sparse buffer": Row(sparse_buffer, with_others="buffer links: workers can average dense"),
    "a frozen parameter written in place": Row(partial(Codebook, codes_in_place), trained_only),
    "a frozen parameter written anew": Row(partial(Codebook, codes_anew), trained_only, **IDLE),
    "a frozen copy that follows": Row(Teacher, trained_only),
    "a parameter set by a worker's own samples": Row(
        SetByData, refused={"servers": SERVED}, with_others="scale is not the same on rank", means_other="local-sgd"
    ),
    "a buffer that only validation changes": Row(partial(TouchedByValidation, only_validated, extra=torch.ones(2))),
    "a buffer as long as the batch": Row(
        partial(Averaging, as_the_batch), task={"batch_size": 11}, with_others="must be alike on all workers"
    ),
    # Storages.
    "new storages with the same values": Row(partial(Acting, cloned)),
    "new storages in a validation": Row(MovedByValidation, **IDLE),
    "another order in memory": Row(partial(Acting, other_strides)),
    "new storages with other values": Row(partial(Acting, clamped_data), refused=EDITED),
    "values changed in .data": Row(partial(Acting, clamped_in_data), refused=EDITED),
    "values changed in place": Row(partial(Acting, clamped_in_place), refused=EDITED),
    "values changed once": Row(partial(Acting, partial(at, 3, clamped_in_place)), refused=EDITED),
    "new storages in backward": Row(
        partial(with_accumulated_hook, new_storage_in_backward), refused={"servers": "in the backward pass"}
    ),
    "cast in mid-training": Row(partial(Acting, partial(at, 3, cast)), refused="left its flat buffer"),
    # Freezing.
    "frozen and unfrozen again": Row(partial(Acting, freezing)),
    "frozen and unfrozen again, Adam": Row(partial(Acting, freezing), adam, means_other="local-sgd"),
    "unfrozen later": Row(
        partial(frozen_first, partial(at, 3, unfreeze)), refused=r"first\.weight was frozen when training began"
    ),
    # Ties.
    "tied": Row(partial(layered, tied)),
    "tied through .data": Row(partial(layered, tied_through_data), refused="share memory"),
    "tied through .data later": Row(partial(layered, square, partial(at, 3, tied_late)), refused="share memory"),
    "a buffer in a parameter's memory": Row(partial(layered, buffer_of_a_parameter), refused="share memory"),
    # Parametrizations, other parameters.
    "weight_norm": Row(partial(layered, weight_norm)),
    "spectral_norm": Row(partial(layered, spectral_norm)),
    "orthogonal": Row(partial(layered, orthogonal)),
    "parametrized later": Row(partial(Acting, partial(at, 3, parametrize_late)), refused=r"first\.weight is gone"),
    "a parameter replaced": Row(partial(Acting, partial(at, 3, replace_parameter)), refused="replaced by another"),
    "a module replaced": Row(partial(Acting, partial(at, 3, replace_module)), refused="replaced by another"),
    "a parameter added": Row(partial(Acting, partial(at, 3, add_parameter)), refused="more was added"),
    "empty parameters": Row(WithEmpty),
    "empty parameters, Adam": Row(WithEmpty, adam, means_other="local-sgd"),
    "momentum restarted": Row(
        partial(Acting, partial(at, 3, restart_momentum)), known_to_the_model, refused={"servers": "optimizer's state"}
    ),
    "a frozen module added": Row(partial(Acting, partial(at, 3, add_frozen_module))),
    # Hooks.
    "hooks on modules": Row(with_module_hooks),
    "a hook on a gradient": Row(with_gradient_hook),
    "a hook on an accumulated gradient": Row(partial(with_accumulated_hook, scale_gradient)),
    "a hook that takes the gradient away": Row(partial(with_accumulated_hook, take_gradient_away)),
    "a hook added later": Row(partial(Acting, partial(at, 2, hook_later))),
    # Optimizers.
    "a hook before the step": Row(Acting, pre_hooked, refused={"servers": HOOKED}),
    "a hook after the step": Row(Acting, post_hooked, refused={"servers": HOOKED}),
    "a step put in place of the optimizer's": Row(Acting, patched, refused={"servers": HOOKED}),
    "an optimizer with its own step": Row(Acting, overridden, refused={"servers": "cannot run on ranges"}),
    "a group added later": Row(
        partial(Acting, partial(at, 3, add_group)), known_to_the_model, refused="parameter groups changed"
    ),
}


def task_of(row: Row) -> Task:
    """Three epochs of four steps, with a validation after each."""
    return toy(**{"model": row.model, "optimizer": row.optimizer, "epochs": 3, **row.task})


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those that are not saved too."""
    held: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in held.items()}


def plainly(task: Task) -> dict[str, Tensor]:
    """What anybody's training loop comes to, over the same samples in the same order."""
    torch.manual_seed(0)
    data, model = task.data(), task.model()
    optimizer, order, position = task.optimizer(model), GlobalOrder(len(data.train), 0), 0
    for _ in range(order.steps(task.batch_size, task.epochs)):
        piece = order.slice_at(position, task.batch_size)
        inputs, targets = data.train.gather(order.indices(piece), order.keys(piece))
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
        position += piece.count
    return tensors_of(model)


def train_rank(comm: Communicator, job: Job) -> tuple[dict[str, Tensor], list[bool]] | None:
    """One rank's part: what its model holds at the end, and which modules are in training mode."""
    recorder = Recorder(comm.rank)
    if comm.rank in comm.servers:
        run_server(make_server(job, comm, recorder))
        return None
    training = Training(job, comm, recorder, Uncontrolled())
    training.run()
    model = training.worker.model
    return tensors_of(model), [module.training for module in model.modules()]


def trained(world: World, row: Row, strategy: Strategy[Any], workers: int) -> list[Any]:
    task = task_of(row)
    config = RunConfig(task=task.name, workers=workers, **{"eval_every": 1, **row.options})
    job = Job(config, task, strategy, None, task_is_named=False)
    return world.run(partial(train_rank, job=job), workers, strategy.server_spec.count)[:workers]


def check(world: World, name: str, strategy: str, workers: int) -> None:
    row = TABLE[name]
    refused = row.refused if isinstance(row.refused, str) else row.refused.get(strategy, "")
    refused = refused or (row.with_others if workers > 1 else "")
    if refused:
        with pytest.raises(PodiumError, match=refused):
            trained(world, row, STRATEGIES[strategy], workers)
        return
    expected = plainly(task_of(row))
    modes = [module.training for module in row.model().modules()]
    for held, are_training in trained(world, row, STRATEGIES[strategy], workers):
        assert held.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(
                held[key].to_dense(),
                value.to_dense(),
                rtol=1e-5,
                atol=2e-6,
                equal_nan=True,
                msg=lambda m, key=key: f"{key}: {m}",
            )
        assert are_training[: len(modes)] == modes


CELLS = [
    (name, strategy, 2)
    for name, row in TABLE.items()
    for strategy in STRATEGIES
    if strategy != row.means_other  # the mean of two of Adam's steps is not a step by the mean
]
# One worker alone, under one strategy for each row: what differs between strategies is how workers agree.
CELLS += [(name, strategy, 1) for name, strategy in zip(TABLE, itertools.cycle(STRATEGIES))]


@pytest.mark.parametrize(("name", "strategy", "workers"), CELLS)
def test_a_model_may_do_this_or_is_told_that_it_may_not(name: str, strategy: str, workers: int) -> None:
    check(Memory(), name, strategy, workers)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["BatchNorm in evaluation mode", "buffers of odd numbers", "a buffer that grows"])
def test_the_same_in_processes(name: str, strategy: str) -> None:
    check(Real(), name, strategy, 2)


class FreezingForGood(Acting):
    """Its first layer is frozen after the third pass, and remembers what it was then."""

    def __init__(self) -> None:
        super().__init__()
        self.then: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.turn == 3:
            self.first.requires_grad_(False)
            self.then = self.first.weight.detach().clone()
        return super().forward(x)


def moved_when_frozen(comm: Communicator, job: Job) -> float | None:
    recorder = Recorder(comm.rank)
    if comm.rank in comm.servers:
        run_server(make_server(job, comm, recorder))
        return None
    training = Training(job, comm, recorder, Uncontrolled())
    training.run()
    model: Any = training.worker.model
    return float((model.first.weight - model.then).abs().max())


@pytest.mark.parametrize("codec", ["dense", "top-k:ratio=0.1", "int8"])
@pytest.mark.parametrize("strategy", ["all-reduce", "servers"])
def test_a_frozen_parameter_stays_as_it_is_whatever_a_codec_has_left_out_of_its_gradients(
    strategy: str, codec: str
) -> None:
    job = Job(
        RunConfig(workers=2, eval_every=0, codec=codec),
        task_of(Row(FreezingForGood)),
        STRATEGIES[strategy],
        task_is_named=False,
    )
    servers = STRATEGIES[strategy].server_spec.count
    moved = Memory().run(partial(moved_when_frozen, job=job), 2, servers)[:2]
    assert moved == [0.0, 0.0]
