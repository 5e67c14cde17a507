"""Algorithms for all-reduce: one file per collective, and a plain dict from name to class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from podium.config import RunConfig, build, parse_spec
from podium.errors import ConfigError
from podium.imports import find_class

if TYPE_CHECKING:
    from podium.exchange.collectives.base import Collective

COLLECTIVES: dict[str, str] = {
    "default": "podium.exchange.collectives.auto:Default",
    "auto": "podium.exchange.collectives.auto:Auto",
    "backend": "podium.exchange.collectives.backend:Backend",
    "shared": "podium.exchange.collectives.shared:Shared",
    "rank-order": "podium.exchange.collectives.rank_order:RankOrder",
    "ring": "podium.exchange.collectives.ring:Ring",
    "halving-doubling": "podium.exchange.collectives.halving_doubling:HalvingDoubling",
    "tree": "podium.exchange.collectives.tree:DoubleTree",
    "hierarchical": "podium.exchange.collectives.hierarchical:Hierarchical",
    "reduce-to-one": "podium.exchange.collectives.reduce_to_one:ReduceToOne",
    "butterfly": "podium.exchange.collectives.butterfly:Butterfly",
    "task-graph": "podium.exchange.collectives.task_graph:TaskGraph",
}


def find_collective(name: str) -> type[Any]:
    """The class of a collective: a name from the list, or the user's own `file.py:Class` or `module:Class`."""
    return find_class("collective", name, COLLECTIVES)


def make_collective(name: str, options: Mapping[str, Any] | None = None) -> Collective:
    from podium.exchange.collectives.base import Collective  # here, since the command line lists names without torch

    cls = find_collective(name)
    if not issubclass(cls, Collective):
        raise ConfigError(f"{name} must be a collective class, got {cls.__name__}")
    return build(cls, options or {}, who=f"collective {name}")


def collective_of(config: RunConfig) -> Collective:
    """The run's collective."""
    return make_collective(*parse_spec(config.collective, "collective"))
