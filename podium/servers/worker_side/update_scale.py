"""Optimizer state, rescaled from global steps to the servers' smaller updates and back.

An optimizer's state decays per update. Where an update is made of a share s of a global step's samples, momentum m
becomes m^s (`servers/wire/optimizer_settings.py`), and a buffer that has converged to g / (1 - m) will converge to
g / (1 - m^s). An unscaled buffer would move the parameters (1 - m^s) / (1 - m) times as far as before, about s times,
until it has grown. So workers multiply it when they seed servers that update more often, and divide it when they
collect it. A count of steps becomes a count of updates, so that Adam's bias correction, 1 - beta^n = 1 -
(beta^s)^(n/s), stays the same. Adam's and RMSprop's moments are means and need no scaling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def per_update(state: Mapping[str, Any], momentum: float, share: float) -> dict[str, Any]:
    """A parameter's optimizer state per global step, converted to updates of this share of a step."""
    return _scaled(state, _growth(momentum, share), 1 / share)


def per_step(state: Mapping[str, Any], momentum: float, share: float) -> dict[str, Any]:
    """The inverse of `per_update`."""
    return _scaled(state, 1 / _growth(momentum, share), share)


def _growth(momentum: float, share: float) -> float:
    return (1 - momentum) / (1 - momentum**share) if 0 < momentum < 1 else 1.0


def _scaled(state: Mapping[str, Any], growth: float, counts: float) -> dict[str, Any]:
    if growth == 1.0 and counts == 1.0:
        return dict(state)
    return {key: _one(key, value, growth, counts) for key, value in state.items()}


def _one(key: str, value: Any, growth: float, counts: float) -> Any:
    if key == "momentum_buffer" and isinstance(value, Tensor):
        return value * growth
    if key == "step":
        return value * counts if isinstance(value, Tensor) else float(value) * counts
    return value
