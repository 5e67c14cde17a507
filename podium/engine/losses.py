"""Checks whether a loss is a mean over samples, as `Task.loss` must be: once, on the first batch.

A step's samples are divided among the workers, and each worker's loss counts by its samples. That adds up to the loss
of the whole step if the loss is a mean over samples. It does not where the loss is a sum, where classes have weights,
where some targets are ignored, or where samples are compared with each other: then results change with the number of
workers.

The outputs of the first batch are cut in two, and the mean loss of the parts is compared with the loss of the whole.
The model is not run again, so dropout and batch normalisation do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from podium.engine.generators import undrawn
from podium.engine.pytree import map_tensors
from podium.errors import TrainingError

if TYPE_CHECKING:
    from podium.engine.batch import Batch
    from podium.engine.flat import Flat
    from podium.engine.worker import Worker

Loss = Callable[[Any, Any], Tensor]

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""By the dtype of the loss: the relative rounding error allowed in a mean of means."""


def try_once(worker: Worker, say: Callable[[str], None]) -> None:
    """Check this worker's loss when it is first called; `say` gets a warning, if any."""
    gradients = worker.gradients
    loss, weigh = gradients.loss, gradients.options.weigh

    def tried(outputs: Any, targets: Any) -> Tensor:
        gradients.use_loss(loss)
        found = loss(outputs, targets)
        if isinstance(found, Tensor) and found.dim() == 0:
            text = changes_with_cut(loss, weigh, outputs, targets, found.detach())
            if text is not None:
                say(text)
        return found

    gradients.use_loss(tried)


def check_loss(loss: float, batch: Batch, *, rank: int, step: int) -> None:
    """Raise where a loss is not finite."""
    if not math.isfinite(loss):
        raise TrainingError(
            f"rank {rank}: the loss became {loss} at step {step} (sample position {batch.slice.position}); lower the "
            "rate, clip gradients (--set clip_norm=1), check the data"
        )


@torch.no_grad()
def check_parameters(flat: Flat, *, rank: int, step: int) -> None:
    """Raise where a parameter is not finite, though no loss has shown it yet."""
    for p, piece in zip(flat.parameters, flat.pieces, strict=True):
        if not torch.isfinite(p).all():
            raise TrainingError(
                f"rank {rank}: parameter {piece.name} is not finite after step {step}: a gradient was not; lower the "
                "rate, clip gradients (--set clip_norm=1), check the data"
            )


@torch.no_grad()
def changes_with_cut(
    loss: Loss, weigh: Callable[[Any], float] | None, outputs: Any, targets: Any, whole: Tensor
) -> str | None:
    """A warning where the loss depends on how a batch is divided; None where it does not, or cannot be checked."""
    count = _rows(targets)
    if count < 2 or _rows(outputs) != count or not math.isfinite(float(whole)):
        return None
    outputs, tolerance = map_tensors(Tensor.detach, outputs), TOLERANCE.get(whole.dtype, 1e-4)
    try:
        with undrawn(loss):
            loss = deepcopy(loss)  # it may have state that a call changes
            again = float(loss(outputs, targets))
    except Exception:  # a user's class may raise anything when it is copied
        return None
    if abs(again - float(whole)) > tolerance * max(abs(float(whole)), 1e-12):
        return None  # it draws random numbers, or changes from call to call
    for cut in sorted({count // 2, max(1, count // 4), 1 if count < 4 else 2}):
        parts = [(slice(0, cut), cut), (slice(cut, count), count - cut)]
        try:
            with undrawn(loss):
                means = [float(loss(_cut(outputs, rows), _cut(targets, rows))) for rows, _ in parts]
                weights = [float(size if weigh is None else weigh(_cut(targets, rows))) for rows, size in parts]
        except Exception:  # a user's loss may raise anything on parts of a batch
            return None
        text = _judged(float(whole), means, weights, tolerance, weighed=weigh is not None)
        if text is not None:
            return text
    return None


def _judged(whole: float, means: list[float], weights: list[float], tolerance: float, *, weighed: bool) -> str | None:
    used = [(mean, weight) for mean, weight in zip(means, weights, strict=True) if weight > 0 or not weighed]
    total = sum(weight for _, weight in used)
    together = sum(mean * weight for mean, weight in used) / total if total else whole
    scale = max(abs(whole), *(abs(mean) for mean, _ in used), 1e-12) if used else 1.0
    if abs(together - whole) <= tolerance * scale:
        return None
    told = f"the loss of the first batch is {whole:.6g} as a whole and {together:.6g} from two parts of it"
    if abs(sum(means) - whole) <= tolerance * scale:
        return (
            f"{told}: it is a sum over samples, so it grows with a worker's part of a step, and results change with "
            "the number of workers; use a mean (reduction='mean')"
        )
    if weighed:
        return f"{told}, although each part counts as much as weigh says: weigh must say what the loss divides by"
    return (
        f"{told}: it is no mean over samples, so results change with the number of workers. Where classes have weights "
        "or targets are ignored, give the task weigh, what the loss divides by: weigh=lambda y: (y != -100).sum(), "
        "weigh=lambda y: class_weights[y].sum()"
    )


def _rows(nest: Any) -> int:
    """How many samples a batch holds: the common length of its tensors; 0 where they have none in common."""
    lengths: set[int] = set()

    def look(tensor: Tensor) -> Tensor:
        lengths.add(len(tensor) if tensor.dim() else 0)
        return tensor

    map_tensors(look, nest)
    return lengths.pop() if len(lengths) == 1 else 0


def _cut(nest: Any, rows: slice) -> Any:
    return map_tensors(lambda tensor: tensor[rows], nest)
