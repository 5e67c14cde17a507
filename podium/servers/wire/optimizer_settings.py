"""An optimizer's settings that travel with a push: the rate and the decays of one update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from podium.comm.base import Meta


def options_of(optimizer: Optimizer, share: float = 1.0, lr_scale: float | None = None) -> list[Meta]:
    """Each group's numbers, to travel with a push: they depend on the push's position in the order, not its arrival.

    For an update of this `share` of a global batch. Factors of decay per step (momentum, Adam's betas, RMSprop's alpha)
    are raised to that power, so that they decay over the same number of samples; the rate is multiplied by the share,
    and by a factor that keeps the total effect of momentum. `lr_scale` replaces the share in the rate.
    """
    options = []
    for group in optimizer.param_groups:
        plain = {k: _plain(v) for k, v in group.items() if k != "params"}
        numbers = {k: v for k, v in plain.items() if _is_number(v)}
        several = {k: v for k, v in plain.items() if isinstance(v, tuple) and all(map(_is_number, v))}
        rate = share if lr_scale is None else lr_scale
        if share != 1.0:
            if (m := numbers.get("momentum", 0)) > 0:
                numbers["momentum"] = m**share
                rate *= (1 - m**share) / (1 - m)
            if "alpha" in numbers:
                numbers["alpha"] **= share
            if "betas" in several:
                several["betas"] = tuple(beta**share for beta in several["betas"])
        options.append({**numbers, **several, "lr": float(numbers["lr"]) * rate})
    return options


def scaled(options: Sequence[Meta], factor: float) -> list[Meta]:
    """These hyper-parameters with the learning rate multiplied by `factor`."""
    return [{**group, "lr": group["lr"] * factor} for group in options] if factor != 1.0 else list(options)


def _plain(value: Any) -> Any:
    """A setting as Python numbers, also where numpy or torch made it."""
    if isinstance(value, np.generic) or (isinstance(value, Tensor | np.ndarray) and value.ndim == 0):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
