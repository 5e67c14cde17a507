"""Evaluation that leaves the model unchanged.

Each module gets back the mode that it had: a BatchNorm or a Dropout that the user put into evaluation mode for training
(`model.backbone.eval()`) stays in it. Buffers are restored too, and the parameters of modules whose `train` method does
more than set the mode (an adapter that merges its weights for evaluation). Only the first worker of a run validates, so
any change that its validation left would make it differ from the other workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from podium.engine.buffers import Snapshot, same_bits


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every module's mode and every buffer are restored at the end."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = Snapshot(model)
    busy = [module for module in model.modules() if type(module).train is not nn.Module.train]
    params = {p: p.detach().clone() for module in busy for p in module.parameters()}
    model.eval()
    try:
        yield
    finally:
        _restore(model, modes)
        buffers.restore()
        for p, value in params.items():
            if not same_bits(p, value):  # adding and subtracting a weight again leaves a rounding error
                p.data.copy_(value)


def _restore(model: nn.Module, modes: list[tuple[nn.Module, bool]]) -> None:
    model.train(modes[0][1])
    for module, was_training in modes:
        # A module's own `train` may do more than set the mode: an adapter merges its weights there.
        if module.training != was_training and type(module).train is not nn.Module.train:
            module.train(was_training)
    for module, was_training in modes:
        if module.training != was_training:
            module.training = was_training
