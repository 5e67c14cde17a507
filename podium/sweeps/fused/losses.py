"""Losses whose numbers may differ from trial to trial.

Cross entropy's label smoothing is a number in a function call. Rows of a fused array share one call, so there it must
be a tensor; `lifted` returns a form that takes a tensor, and each trial's number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from podium.errors import ConfigError
from podium.sweeps.fused.structure import callable_key, module_key

_IGNORED = -100
"""Targets that do not count: torch's default `ignore_index`."""
_FEW_CLASSES = 64

Loss = Callable[[Any, Any], Tensor]


class Lifted(NamedTuple):
    """A loss in a form that all rows share."""

    key: Any  # equal for losses that can share a call
    call: Callable[[Any, Any, Tensor], Tensor]  # (outputs, targets, the row's number)
    number: float  # this trial's


def smoothed(loss: Loss, amount: float, who: str) -> Loss:
    """The same loss with this label smoothing; only cross entropy has one."""
    if not 0 <= amount < 1:
        raise ConfigError(f"{who}: label_smoothing must be from 0 up to but not 1, got {amount}")
    plain = _cross_entropy(loss)
    if plain is None:
        raise ConfigError(f"{who}: label_smoothing needs cross entropy, got the loss {loss!r}")
    return functools.partial(F.cross_entropy, **{**plain, "label_smoothing": amount})


def lifted(loss: Loss, *, varies: bool = False) -> Lifted:
    """A form in which trials that differ only in label smoothing share one call; `varies`: it may be above 0."""
    options = _cross_entropy(loss)
    if options is not None and not options.keys() - {"label_smoothing"}:
        amount = float(options.get("label_smoothing", 0.0))
        if amount or varies:
            return Lifted("smoothed cross entropy", _smoothed_cross_entropy, amount)
        return Lifted("cross entropy", _plain_cross_entropy, 0.0)
    key = module_key(loss, values=True) if isinstance(loss, nn.Module) else callable_key(loss)
    return Lifted(key, lambda outputs, targets, _: loss(outputs, targets), 0.0)


def _cross_entropy(loss: Loss) -> dict[str, Any] | None:
    """The options of cross entropy; None for another loss."""
    if loss is F.cross_entropy:
        return {}
    if isinstance(loss, functools.partial) and loss.func is F.cross_entropy and not loss.args:
        return dict(loss.keywords)
    if type(loss) is nn.CrossEntropyLoss:
        found: dict[str, Any] = {"label_smoothing": loss.label_smoothing}
        if loss.weight is not None or loss.ignore_index != -100 or loss.reduction != "mean":
            found.update(weight=loss.weight, ignore_index=loss.ignore_index, reduction=loss.reduction)
        return found
    return None


def _plain_cross_entropy(outputs: Tensor, targets: Tensor, amount: Tensor) -> Tensor:
    if outputs.is_cuda or outputs.dim() != 2 or targets.is_floating_point() or outputs.shape[1] > _FEW_CLASSES:
        return F.cross_entropy(outputs, targets)
    # Classes first: a CPU then vectorises over many samples, four times faster than over few classes.
    surprise = -F.log_softmax(outputs.T.contiguous(), dim=0)
    counts = targets != _IGNORED
    hit = surprise.gather(0, targets.clamp(min=0).unsqueeze(0)).squeeze(0)
    return torch.where(counts, hit, 0.0).sum() / counts.sum()


def _smoothed_cross_entropy(outputs: Tensor, targets: Tensor, amount: Tensor) -> Tensor:
    """(1 - a) times the loss of the target plus a times the mean over classes; classes along dimension 1.

    Targets of -100 do not count, as in torch.
    """
    surprise = -F.log_softmax(outputs, dim=1)
    amount = amount.to(surprise.dtype)
    if targets.is_floating_point():
        share = targets * (1 - amount) + amount / outputs.shape[1]
        return (surprise * share).sum(dim=1).mean()
    counts = targets != _IGNORED
    hit = surprise.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    spread = torch.where(amount > 0, amount * surprise.mean(dim=1), 0.0)  # 0 times infinity would be nan
    return torch.where(counts, (1 - amount) * hit + spread, 0.0).sum() / counts.sum()
