"""What a server does about stale gradients, by name.

    staleness-lr       the rate is divided by max(1, staleness): Zhang et al., arXiv 1511.05950
    dc-asgd            the gradient is corrected for the present parameters by a diagonal approximation of the
                       Hessian: g + lambda g g (w - w_then): Zheng et al., ICML 2017, arXiv 1609.08326
    dc-asgd-adaptive   the same with lambda / sqrt(mean square of g), elementwise

The two DC-ASGD variants store the parameters that were last sent to each worker, and those that all began with:
workers + 1 copies of the parameters. The gate drops pushes that are too stale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

from podium.errors import UnknownName


class Mitigation(ABC):
    """Changes a stale gradient, or the rate at which it is applied."""

    compares: ClassVar[bool] = False
    """Whether it compares the parameters that a worker had with the present ones."""

    def rate(self, staleness: int) -> float:
        """Factor of this push's learning rate."""
        return 1.0

    def gave(self, worker: int, unit: int, params: Sequence[Tensor]) -> None:
        """A worker is sent these parameters."""

    def forget(self, worker: int) -> None:
        """A worker is gone."""

    @abstractmethod
    def mend(self, worker: int, unit: int, grads: Sequence[Tensor], params: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradients to apply instead of `grads`, which are not changed."""


@final
class Nothing(Mitigation):
    def mend(self, worker: int, unit: int, grads: Sequence[Tensor], params: Sequence[Tensor]) -> Sequence[Tensor]:
        return grads


@final
class StalenessLR(Mitigation):
    """eta / max(1, staleness)."""

    def rate(self, staleness: int) -> float:
        return 1.0 / max(1, staleness)

    def mend(self, worker: int, unit: int, grads: Sequence[Tensor], params: Sequence[Tensor]) -> Sequence[Tensor]:
        return grads


@final
class DelayCompensation(Mitigation):
    """g + lambda g g (w - w_then), elementwise."""

    compares = True

    def __init__(self, strength: float, adaptive: bool, decay: float = 0.95, epsilon: float = 1e-7) -> None:
        self.strength, self.adaptive, self.decay, self.epsilon = strength, adaptive, decay, epsilon
        self._began: dict[int, list[Tensor]] = {}
        self._given: dict[tuple[int, int], list[Tensor]] = {}
        self._mean_square: dict[int, list[Tensor]] = {}

    def gave(self, worker: int, unit: int, params: Sequence[Tensor]) -> None:
        kept = self._given.get((worker, unit))
        if kept is None:
            self._given[worker, unit] = [p.clone() for p in params]
        else:
            for mine, p in zip(kept, params, strict=True):
                mine.copy_(p)

    def forget(self, worker: int) -> None:
        for key in [key for key in self._given if key[0] == worker]:
            del self._given[key]

    def mend(self, worker: int, unit: int, grads: Sequence[Tensor], params: Sequence[Tensor]) -> Sequence[Tensor]:
        if unit not in self._began:  # its first push
            self._began[unit] = [p.clone() for p in params]
        then = self._given.get((worker, unit), self._began[unit])
        squares = [g * g for g in grads]
        strengths: Sequence[Tensor | float] = [self.strength] * len(squares)
        if self.adaptive:
            strengths = self._strengths(unit, squares)
        return [
            g + s * square * (w - w_then)
            for g, s, square, w, w_then in zip(grads, strengths, squares, params, then, strict=True)
        ]

    def _strengths(self, unit: int, squares: Sequence[Tensor]) -> list[Tensor]:
        means = self._mean_square.setdefault(unit, [torch.zeros_like(square) for square in squares])
        for mean, square in zip(means, squares, strict=True):
            mean.mul_(self.decay).add_(square, alpha=1 - self.decay)
        return [self.strength / (mean + self.epsilon).sqrt() for mean in means]


MITIGATIONS = ("none", "staleness-lr", "dc-asgd", "dc-asgd-adaptive")
CONSTANT_STRENGTH = 0.04
"""DC-ASGD's lambda, constant. The paper's section on CIFAR-10 uses this value."""
ADAPTIVE_STRENGTH = 2.0
"""DC-ASGD's lambda before it is divided by the root of the mean square."""


def make_mitigation(name: str, strength: float | None = None) -> Mitigation:
    """By name; `strength` is DC-ASGD's lambda; None: the paper's."""
    if name == "none":
        return Nothing()
    if name == "staleness-lr":
        return StalenessLR()
    if name == "dc-asgd":
        return DelayCompensation(CONSTANT_STRENGTH if strength is None else strength, adaptive=False)
    if name == "dc-asgd-adaptive":
        return DelayCompensation(ADAPTIVE_STRENGTH if strength is None else strength, adaptive=True)
    raise UnknownName("mitigation", name, MITIGATIONS)
