"""Algorithms for all-reduce: one file per collective, and a plain dict from name to where it lives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from podium.config import build
from podium.errors import ConfigError, UnknownName
from podium.names import load_named

if TYPE_CHECKING:
    from podium.collectives.base import Collective

COLLECTIVES: dict[str, str] = {
    "default": "podium.collectives.auto:Default",
    "auto": "podium.collectives.auto:Auto",
    "backend": "podium.collectives.backend:Backend",
    "shared": "podium.collectives.shared:Shared",
    "ring": "podium.collectives.ring:Ring",
    "halving-doubling": "podium.collectives.halving_doubling:HalvingDoubling",
    "tree": "podium.collectives.tree:DoubleTree",
    "hierarchical": "podium.collectives.hierarchical:Hierarchical",
    "reduce-to-one": "podium.collectives.reduce_to_one:ReduceToOne",
    "butterfly": "podium.collectives.butterfly:Butterfly",
    "task-graph": "podium.collectives.task_graph:TaskGraph",
}


def find_collective(name: str) -> type[Any]:
    """The class of a collective: a name from the list, or `file.py:Class` / `module:Class` of the user's own."""
    if name not in COLLECTIVES and ":" not in name:
        raise UnknownName("collective", name, COLLECTIVES)
    first, _, second = name.partition(":")
    if first in COLLECTIVES and second:
        raise ConfigError(f"collective {first}: options are key=value, got {second!r}")
    cls = load_named(COLLECTIVES.get(name, name))
    if not isinstance(cls, type):
        raise ConfigError(f"{name} must be a collective class, got {type(cls).__name__}")
    return cls


def make_collective(name: str, options: Mapping[str, Any] | None = None) -> Collective:
    """An instance with these options."""
    from podium.collectives.base import Collective  # here, since the command line lists names without torch

    cls = find_collective(name)
    if not issubclass(cls, Collective):
        raise ConfigError(f"{name} must be a collective class, got {cls.__name__}")
    return build(cls, options or {}, who=f"collective {name}")
