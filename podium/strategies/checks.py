"""Bounds of options: the error names the strategy and the option, what must hold and what was given.

An option that is None was not given and passes every check.
"""

from __future__ import annotations

from typing import Any

from podium.errors import ConfigError
from podium.strategies.base import Strategy


def at_least(least: int, strategy: Strategy[Any], *names: str) -> None:
    for name in names:
        value = getattr(strategy, name)
        if value is not None and value < least:
            raise ConfigError(f"{strategy.name}: {name} must be at least {least}, got {value}")


def above_zero(strategy: Strategy[Any], *names: str) -> None:
    for name in names:
        value = getattr(strategy, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{strategy.name}: {name} must be above 0, got {value:g}")


def fraction(strategy: Strategy[Any], *names: str, below_one: bool = False) -> None:
    """From 0 to 1; with `below_one`, without 1 itself."""
    for name in names:
        value = getattr(strategy, name)
        if not 0 <= value <= 1 or (below_one and value == 1):
            raise ConfigError(f"{strategy.name}: {name} must be from 0 to {'below ' * below_one}1, got {value:g}")
