"""How replicas come to agree: one file per strategy, and a plain dict from name to class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.config import build
from podium.errors import ConfigError
from podium.imports import find_class

STRATEGIES: dict[str, str] = {
    "solo": "podium.strategies.solo:Solo",
    "all-reduce": "podium.strategies.all_reduce:AllReduce",
    "parameter-server": "podium.strategies.parameter_server:ParameterServer",
    "local-sgd": "podium.strategies.local_sgd:LocalSGD",
    "diloco": "podium.strategies.diloco:DiLoCo",
    "streaming-diloco": "podium.strategies.streaming_diloco:StreamingDiLoCo",
    "elastic-averaging": "podium.strategies.elastic_averaging:ElasticAveraging",
    "adasum": "podium.strategies.adasum:Adasum",
    "gossip": "podium.strategies.gossip:Gossip",
    "ad-psgd": "podium.strategies.ad_psgd:ADPSGD",
    "async-local-sgd": "podium.strategies.async_local_sgd:AsyncLocalSGD",
    "async-elastic": "podium.strategies.async_elastic:AsyncElastic",
    "phases": "podium.strategies.phases:Phases",
    "strategy-switch": "podium.strategies.strategy_switch:StrategySwitch",
    "sync-switch": "podium.strategies.sync_switch:SyncSwitch",
    "post-local-sgd": "podium.strategies.post_local_sgd:PostLocalSGD",
}


def find_strategy(name: str) -> type[Any]:
    """The class of a strategy: a name from the list, or the user's own `file.py:Class` or `module:Class`."""
    return find_class("strategy", name, STRATEGIES)


def make_strategy(name: str, options: Mapping[str, Any] | None = None, workers: int = 1) -> Any:
    """Build a strategy and check it against the number of workers."""
    from podium.strategies.base import Strategy  # here, since the command line lists names without torch

    cls = find_strategy(name)
    if not issubclass(cls, Strategy):
        raise ConfigError(f"{name} must be a subclass of podium.Strategy, got {cls.__name__}")
    if not isinstance(getattr(cls, "name", None), str):
        raise ConfigError(
            f"{name}: {cls.__name__} must have a name for messages and checkpoints: name: ClassVar[str] = …"
        )
    strategy = build(cls, options or {}, who=f"strategy {name}").for_workers(workers)
    strategy.check(workers)
    return strategy
