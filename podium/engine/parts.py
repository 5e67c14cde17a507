"""Checks a task's model, optimizer and schedule before the first step."""

from __future__ import annotations

from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from podium.errors import ConfigError


def check_parts(who: str, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"{who}: optimizer must make a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, LBFGS):
        raise ConfigError(f"{who}: LBFGS evaluates the loss several times a step, which no strategy here does")
    if isinstance(schedule, ReduceLROnPlateau):
        raise ConfigError(f"{who}: ReduceLROnPlateau needs a metric at every step; use a schedule of steps")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{who}: model must make a torch.nn.Module, got {type(model).__name__}")
