"""How replicas come to agree: one file per strategy, and a plain dict from name to where it lives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.config import build
from podium.errors import ConfigError
from podium.names import find_class

STRATEGIES: dict[str, str] = {
    "solo": "podium.strategies.solo:Solo",
    "all-reduce": "podium.strategies.all_reduce:AllReduce",
    "parameter-server": "podium.strategies.parameter_server:ParameterServer",
}


def find_strategy(name: str) -> type[Any]:
    """The class of a strategy: a name from the list, or `file.py:Class` / `module:Class` of the user's own."""
    return find_class("strategy", name, STRATEGIES)


def make_strategy(name: str, options: Mapping[str, Any] | None = None, workers: int = 1) -> Any:
    """An instance with these options, checked against the number of workers."""
    cls = find_strategy(name)
    strategy = build(cls, options or {}, who=f"strategy {name}")
    if cls.max_workers is not None and workers > cls.max_workers:
        raise ConfigError(f"strategy {name} runs with {cls.max_workers} worker, got workers={workers}")
    return strategy
