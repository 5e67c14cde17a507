"""The outer optimizer: how servers move the parameters by the result of workers' many local steps.

Workers push not a gradient but a delta: the parameters they began with minus those they reached. Deltas are stale when
they arrive, and momentum that adds each of them at once prolongs their staleness. Delayed Nesterov updates momentum
only every `delay` arrivals; in between, deltas are applied without momentum:

    sum += delta
    at every delay-th arrival:   m = momentum m + sum / delay,  p -= lr (momentum m + delta / delay),  sum = 0
    at any other:                p -= lr delta / delay

So `delay` deltas together move the parameters by their mean, as one synchronous outer step of that many workers would.
With a delay of 1 it is Nesterov momentum as torch's SGD has it; without momentum it is plain.

Liu et al., 2024, arXiv 2401.09135 (its algorithm with c = 0: no momentum at all in between).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from podium.errors import ConfigError

if TYPE_CHECKING:
    from podium.comm.base import Meta


@final
class DelayedNesterov(Optimizer):
    """Elementwise, so it runs on any range. State: `momentum`, the `sum` of deltas not yet in it, their `count`."""

    def __init__(self, params: Iterable[Any], lr: float = 0.7, momentum: float = 0.9, delay: int = 1) -> None:
        if delay < 1:
            raise ConfigError(f"DelayedNesterov: delay must be at least 1, got {delay}")
        super().__init__(params, {"lr": lr, "momentum": momentum, "delay": delay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch passes none here
        """One delta has arrived. Gradients are only read: they may lie in a worker's own memory."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._arrived(p, p.grad, group["lr"], group["momentum"], max(1, int(group["delay"])))

    def _arrived(self, p: Tensor, delta: Tensor, lr: float, momentum: float, delay: int) -> None:
        part = delta if delay == 1 else delta / delay
        if momentum == 0:
            p.add_(part, alpha=-lr)
            return
        state = self.state[p]
        if not state:
            state.update(momentum=torch.zeros_like(p), sum=torch.zeros_like(p), count=torch.tensor(0.0))
        state["count"] += 1
        state["sum"] += delta
        if state["count"] < delay:
            p.add_(part, alpha=-lr)
            return
        # By the count, not the delay, which may have changed because workers have joined or left.
        state["momentum"].mul_(momentum).add_(state["sum"] / state["count"])
        p.add_(part.add(state["momentum"], alpha=momentum), alpha=-lr)
        state["sum"].zero_()
        state["count"].zero_()


def make_outer(groups: int, settings: Meta) -> DelayedNesterov:
    """The seed's outer optimizer, with as many parameter groups as the task's own has, and no parameters."""
    empty = [{"params": [torch.nn.Parameter(torch.empty(0))]} for _ in range(groups)]
    try:
        return DelayedNesterov(empty, **settings)
    except TypeError as error:
        raise ConfigError(f"the outer optimizer that came with the seed does not fit: {error}") from None
