"""Names of strategies: for users in tables, and for other processes that must find the class."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from podium.config import LIFTED, RunConfig
from podium.strategies import STRATEGIES
from podium.strategies.base import Strategy


def label_of(name: str, strategy: Strategy[Any], config: RunConfig | None = None) -> str:
    """The strategy's name and the options that differ from the default, as `parameter-server(mode=async)`."""
    options = []
    if config is not None and strategy.payload.is_sent:
        options = [f"{k}={getattr(config, k)}" for k in LIFTED if getattr(config, k) != getattr(RunConfig, k)]
    filled = {} if config is None else _filled_in(strategy, config.workers)
    for field in dataclasses.fields(strategy):  # type: ignore[arg-type]  # all strategies are dataclasses
        value, make = getattr(strategy, field.name), field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        if value not in (default, filled.get(field.name, default)):
            options.append(f"{field.name}={value}")
    return f"{name}({', '.join(options)})" if options else name


def _filled_in(strategy: Strategy[Any], workers: int) -> dict[str, Any]:
    """A strategy's defaults once the number of workers is known."""
    try:
        plain = type(strategy)()
    except TypeError:  # an option without a default: nothing else is filled in then
        return {}
    return dataclasses.asdict(plain.for_workers(workers))  # type: ignore[call-overload,no-any-return]  # all strategies are dataclasses


def name_of(strategy: Strategy[Any]) -> str:
    """The name by which other processes find this strategy's class."""
    cls = type(strategy)
    for name, place in STRATEGIES.items():
        if place == f"{cls.__module__}:{cls.__qualname__}":
            return name
    module = cls.__module__
    if module == "__main__":
        module = str(getattr(sys.modules["__main__"], "__file__", "__main__"))
    return f"{module}:{cls.__qualname__}"
