"""Optimizers for many trials at once: one row per trial, each with its own numbers and its own count of steps.

All trainable parameters of a trial are side by side in one flat row, so a step is a handful of operations on matrices
[rows, parameters], and a trial's whole state is one row of each. The formulas are torch's own, in its order; only the
numbers (lr, betas …) are columns instead of scalars. Bias corrections are computed in double precision, as in torch.

An optimizer without such a form here steps row by row (`OwnOptimizers`): torch's own object for each trial, on views of
its row. Exact for any optimizer, also one that needs whole tensors, but with as many calls as trials.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LRScheduler

from podium.sweeps.fused.structure import MAY_BE_ABSENT, is_number
from podium.sweeps.parts import Parts


class Place(NamedTuple):
    """Where a parameter is in a row."""

    name: str
    start: int
    stop: int
    shape: torch.Size
    group: int


class Span(NamedTuple):
    """Parameters of one group that are stepped at once: a large one by itself, small ones side by side."""

    first: int  # the first of its places
    last: int  # one after the last
    start: int
    stop: int
    group: int


LARGE = {"cpu": 1 << 14, "cuda": 1 << 20}
"""A parameter with at least this many elements, over all rows, is stepped by itself: joining its gradient to others
costs a copy, which is cheap compared to a launch on a GPU, and not on a CPU."""


def spans_of(places: Sequence[Place], flat: Tensor, *, compiled: bool = False) -> list[Span]:
    """Cut rows into spans; where the step is compiled, one span per group.

    Compiled code reads gradients in place, so that cutting saves nothing; and it turns a write to a part of a row into
    a write of the whole row, once per part.
    """
    found: list[Span] = []
    alone = False
    least = math.inf if compiled else LARGE[flat.device.type]
    for i, place in enumerate(places):
        stop = places[i + 1].start if i + 1 < len(places) else flat.shape[1]
        large = (place.stop - place.start) * len(flat) >= least
        before = found[-1] if found else None
        if before is None or large or alone or before.group != place.group:
            found.append(Span(i, i + 1, place.start, stop, place.group))
        else:
            found[-1] = before._replace(last=i + 1, stop=stop)
        alone = large
    return found


ALIGN = 32
"""Parameters begin at multiples of this many elements: matrix kernels need aligned addresses."""


class Column(NamedTuple):
    """One number of an optimizer: its group, its option, its index in a tuple."""

    group: int
    option: str
    part: int | None


Numbers = Mapping[str, Tensor]
"""A group's numbers for this step, each [rows, 1]; `betas` is `betas.0` and `betas.1`."""


def columns_of(optimizer: Optimizer) -> list[Column]:
    """Every number of the optimizer's groups, in a fixed order."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for option in sorted(k for k, v in group.items() if k != "params" and is_number(v)):
            value = group[option]
            parts = range(len(value)) if isinstance(value, tuple | list) else [None]
            found += [Column(number, option, part) for part in parts]
    return found


def values_of(optimizer: Optimizer, columns: Sequence[Column]) -> list[float]:
    """The current values of these numbers."""
    groups = optimizer.param_groups
    return [float(groups[c.group][c.option] if c.part is None else groups[c.group][c.option][c.part]) for c in columns]


class Timetable:
    """A trial's numbers at each step, found by running its schedule ahead."""

    def __init__(self, parts: Parts, columns: Sequence[Column]) -> None:
        """`columns`: the numbers that steps use. A schedule adds others (`initial_lr`), which no step uses."""
        self._optimizer, self._steps, self.columns = parts.optimizer, parts.steps, columns
        self._schedule: LRScheduler | None = parts.schedule()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # or the scheduler warns
        self._rows = np.array([values_of(self._optimizer, self.columns)])
        self._known = 1

    def rows(self, start: int, count: int) -> Tensor:
        """The numbers of `count` steps from `start`, one row each; beyond the end the last row repeats."""
        if self._schedule is None:
            return torch.from_numpy(self._rows)
        end = min(start + count, self._steps)  # many schedules raise beyond their end
        if end > len(self._rows):
            more = np.empty((max(end, 2 * len(self._rows)) - len(self._rows), self._rows.shape[1]))
            self._rows = np.concatenate([self._rows, more])
        while self._known < end:
            self._schedule.step()
            self._rows[self._known] = values_of(self._optimizer, self.columns)
            self._known += 1
        places = np.minimum(np.arange(start, start + count), self._known - 1)
        return torch.from_numpy(self._rows[places])


class StackedOptimizer(ABC):
    """Steps all rows of `flat` [rows, parameters] at once."""

    capturable = True

    def __init__(self, flat: Tensor, spans: Sequence[Span], first: Parts, columns: Sequence[Column]) -> None:
        self.flat, self.spans, self._columns = flat, spans, columns
        self.count = torch.zeros(len(flat), dtype=torch.int64, device=flat.device)
        """Steps that each row has done."""
        self.groups = [dict(group) for group in first.optimizer.param_groups]
        for group in self.groups:
            for name in MAY_BE_ABSENT:
                if name in first.may_vary and group.get(name) == 0:
                    group[name] = 1.0  # other rows may have some: `fixed` only tells whether it is 0
        self.state: dict[str, Tensor] = {name: torch.zeros_like(flat) for name in self.moments()}

    @abstractmethod
    def moments(self) -> Sequence[str]:
        """Names of the tensors stored for each parameter."""

    @abstractmethod
    def update(self, cut: slice, grad: Tensor, fixed: Mapping[str, Any], now: Numbers) -> None:
        """Step one span of a group, `cut` of every row."""

    def step(self, grads: Sequence[Tensor], numbers: Tensor) -> None:
        """One step of every row, with the gradients of each span and the numbers [rows, columns] of this step."""
        for span, grad in zip(self.spans, grads, strict=True):
            cut = slice(span.start, span.start + grad.shape[1])
            self.update(cut, grad, self.groups[span.group], self._now(span.group, numbers))
        self.count.add_(1)

    def load(self, row: int, parts: Parts) -> None:
        """A new trial begins in this row."""
        self.count[row] = 0
        for moment in self.state.values():
            moment[row].zero_()

    def release(self, row: int) -> None:
        """The row's trial is over."""

    def tensors(self) -> list[Tensor]:
        """All tensors that a step changes besides the parameters; the first dimension is rows."""
        return [self.count, *self.state.values()]

    def _now(self, group: int, numbers: Tensor) -> Numbers:
        found = {}
        for i, column in enumerate(self._columns):
            if column.group == group:
                name = column.option if column.part is None else f"{column.option}.{column.part}"
                found[name] = numbers[:, i, None]
        return found

    def _decayed(self, grad: Tensor, params: Tensor, fixed: Mapping[str, Any], now: Numbers) -> Tensor:
        """The gradient plus weight decay."""
        return grad + params * self._as(now["weight_decay"]) if fixed["weight_decay"] != 0 else grad

    def _add(self, target: Tensor, what: Tensor, number: Tensor) -> None:
        """target += what × number, in place."""
        if target.is_cuda:
            target.addcmul_(what, self._as(number))
        else:  # on a CPU `addcmul_` with a column is not vectorised
            target.add_(what * self._as(number))

    def _as(self, number: Tensor) -> Tensor:
        return number.to(self.flat.dtype)

    @property
    def _steps(self) -> Tensor:
        """The number of this step, from 1, per row, [rows, 1] in double precision."""
        return (self.count + 1).to(torch.float64)[:, None]


@final
class StackedSgd(StackedOptimizer):
    """torch.optim.SGD: momentum, dampening, Nesterov, weight decay."""

    def moments(self) -> Sequence[str]:
        return ["momentum_buffer"] if any(group["momentum"] != 0 for group in self.groups) else []

    def update(self, cut: slice, grad: Tensor, fixed: Mapping[str, Any], now: Numbers) -> None:
        params = self.flat[:, cut]
        if fixed["maximize"]:
            grad = -grad
        grad = self._decayed(grad, params, fixed, now)
        if fixed["momentum"] != 0:
            momentum = self._as(now["momentum"])
            buffer = self.state["momentum_buffer"][:, cut]
            buffer.mul_(momentum)
            if fixed["dampening"] == 0:
                buffer.add_(grad)
            else:  # the first step takes the gradient as it is, undamped
                self._add(buffer, grad, torch.where(self.count[:, None] == 0, 1.0, 1 - now["dampening"]))
            grad = grad + buffer * momentum if fixed["nesterov"] else buffer
        self._add(params, grad, -now["lr"])


@final
class StackedAdam(StackedOptimizer):
    """torch.optim.Adam and AdamW, with and without amsgrad."""

    def moments(self) -> Sequence[str]:
        largest = ["max_exp_avg_sq"] if any(group["amsgrad"] for group in self.groups) else []
        return ["exp_avg", "exp_avg_sq", *largest]

    def update(self, cut: slice, grad: Tensor, fixed: Mapping[str, Any], now: Numbers) -> None:
        params, mean, square = self.flat[:, cut], self.state["exp_avg"][:, cut], self.state["exp_avg_sq"][:, cut]
        first, second, steps = now["betas.0"], now["betas.1"], self._steps
        if fixed["maximize"]:
            grad = -grad
        if fixed.get("decoupled_weight_decay") and fixed["weight_decay"] != 0:
            params.mul_(self._as(1 - now["lr"] * now["weight_decay"]))
        elif not fixed.get("decoupled_weight_decay"):
            grad = self._decayed(grad, params, fixed, now)
        mean.lerp_(grad, self._as(1 - first))
        square.mul_(self._as(second)).addcmul_(grad, grad * self._as(1 - second))
        if fixed["amsgrad"]:
            largest = self.state["max_exp_avg_sq"][:, cut]
            torch.maximum(largest, square, out=largest)
            square = largest
        denominator = (square.sqrt() / self._as((1 - second**steps).sqrt())).add_(self._as(now["eps"]))
        self._add(params, mean / denominator, -now["lr"] / (1 - first**steps))


@final
class StackedRmsProp(StackedOptimizer):
    """torch.optim.RMSprop, centred or not, with momentum or without."""

    def moments(self) -> Sequence[str]:
        mean = ["grad_avg"] if any(group["centered"] for group in self.groups) else []
        buffer = ["momentum_buffer"] if any(group["momentum"] != 0 for group in self.groups) else []
        return ["square_avg", *mean, *buffer]

    def update(self, cut: slice, grad: Tensor, fixed: Mapping[str, Any], now: Numbers) -> None:
        params, square, alpha = self.flat[:, cut], self.state["square_avg"][:, cut], now["alpha"]
        if fixed["maximize"]:
            grad = -grad
        grad = self._decayed(grad, params, fixed, now)
        square.mul_(self._as(alpha)).addcmul_(grad, grad * self._as(1 - alpha))
        spread = square
        if fixed["centered"]:
            mean = self.state["grad_avg"][:, cut]
            mean.lerp_(grad, self._as(1 - alpha))
            spread = torch.addcmul(square, mean, mean, value=-1)
        grad = grad / spread.sqrt().add_(self._as(now["eps"]))
        if fixed["momentum"] != 0:
            buffer = self.state["momentum_buffer"][:, cut]
            buffer.mul_(self._as(now["momentum"])).add_(grad)
            grad = buffer
        self._add(params, grad, -now["lr"])


@final
class StackedAdagrad(StackedOptimizer):
    """torch.optim.Adagrad."""

    def moments(self) -> Sequence[str]:
        return ["sum"]

    def load(self, row: int, parts: Parts) -> None:
        super().load(row, parts)
        for span in self.spans:
            start = parts.optimizer.param_groups[span.group]["initial_accumulator_value"]
            self.state["sum"][row, span.start : span.stop] = start

    def update(self, cut: slice, grad: Tensor, fixed: Mapping[str, Any], now: Numbers) -> None:
        params, total = self.flat[:, cut], self.state["sum"][:, cut]
        if fixed["maximize"]:
            grad = -grad
        grad = self._decayed(grad, params, fixed, now)
        rate = now["lr"] / (1 + (self._steps - 1) * now["lr_decay"])
        total.addcmul_(grad, grad)
        self._add(params, grad / total.sqrt().add_(self._as(now["eps"])), -rate)


@final
class OwnOptimizers:
    """torch's own optimizer for each row, on views of it."""

    capturable = False

    def __init__(self, flat: Tensor, places: Sequence[Place], spans: Sequence[Span]) -> None:
        self.flat, self._places, self.spans = flat, places, spans
        self.count = torch.zeros(len(flat), dtype=torch.int64, device=flat.device)
        self._grads = torch.zeros_like(flat)
        self._rows: list[tuple[Optimizer, LRScheduler | None] | None] = [None] * len(flat)

    def step(self, grads: Sequence[Tensor], numbers: Tensor) -> None:
        """One step of every row that holds a trial; the numbers are the optimizers' own."""
        for span, grad in zip(self.spans, grads, strict=True):
            self._grads[:, span.start : span.start + grad.shape[1]].copy_(grad)
        for held in self._rows:
            if held is not None:
                optimizer, schedule = held
                optimizer.step()
                if schedule is not None:
                    schedule.step()
        self.count.add_(1)

    def load(self, row: int, parts: Parts) -> None:
        """A new trial begins in this row: its optimizer now steps the row."""
        optimizer, views = parts.optimizer, self._views(row)
        named = {id(p): name for name, p in parts.model.named_parameters()}
        state: dict[Tensor, Any] = {}
        for group in optimizer.param_groups:
            moved = [(p, views[named[id(p)]]) for p in group["params"] if named.get(id(p)) in views]
            state.update({new: _moved(optimizer.state[old], self.flat) for old, new in moved if old in optimizer.state})
            group["params"] = [new for _, new in moved]
        optimizer.state.clear()
        optimizer.state.update(state)
        self._rows[row] = (optimizer, parts.schedule())
        self.count[row] = 0

    def release(self, row: int) -> None:
        """The row's trial is over: drop its optimizer and schedule, which may raise beyond its end."""
        self._rows[row] = None

    def copy(self, source: int, target: int) -> None:
        """The target's optimizer takes over the source's moments; its numbers stay."""
        one, two = self._rows[source], self._rows[target]
        assert one is not None and two is not None
        for ours, theirs in zip(two[0].param_groups, one[0].param_groups, strict=True):
            for p, q in zip(ours["params"], theirs["params"], strict=True):
                two[0].state[p] = copy.deepcopy(one[0].state[q])

    def change_numbers(self, row: int, parts: Parts, done: int) -> None:
        """The row's optimizer continues with these numbers; its schedule continues from step `done`."""
        held = self._rows[row]
        assert held is not None
        optimizer = held[0]
        for ours, theirs in zip(optimizer.param_groups, parts.optimizer.param_groups, strict=True):
            for name in ours.keys() - theirs.keys():
                del ours[name]  # set by the earlier schedule (`initial_lr`)
            ours.update({k: v for k, v in theirs.items() if k != "params"})
        again = None if parts.task.schedule is None else parts.task.schedule(optimizer, parts.steps)
        for _ in range(0 if again is None else done):
            again.step()  # type: ignore[union-attr]  # as the line above says
        self._rows[row] = (optimizer, again)

    def tensors(self) -> list[Tensor]:
        return [self.count]

    def _views(self, row: int) -> dict[str, nn.Parameter]:
        views = {}
        for place in self._places:
            cut = slice(place.start, place.stop)
            views[place.name] = nn.Parameter(self.flat[row, cut].view(place.shape))
            views[place.name].grad = self._grads[row, cut].view(place.shape)
        return views


STACKED: dict[type[Optimizer], Callable[..., StackedOptimizer]] = {
    SGD: StackedSgd,
    Adam: StackedAdam,
    AdamW: StackedAdam,
    RMSprop: StackedRmsProp,
    Adagrad: StackedAdagrad,
}


def stack_optimizer(
    flat: Tensor, places: Sequence[Place], spans: Sequence[Span], first: Parts, columns: Sequence[Column]
) -> StackedOptimizer | OwnOptimizers:
    """The stacked form of the optimizer of `first`; if it has none, torch's own optimizer for each row."""
    make = STACKED.get(type(first.optimizer))
    if make is None or any(group.get("differentiable") for group in first.optimizer.param_groups):
        return OwnOptimizers(flat, places, spans)
    return make(flat, spans, first, columns)


def _moved(state: Mapping[str, Any], flat: Tensor) -> dict[str, Any]:
    return {k: v.to(flat.device) if isinstance(v, Tensor) and v.dim() else v for k, v in state.items()}
