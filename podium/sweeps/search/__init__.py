"""Where the trials of a sweep come from: one file per source, and a plain dict from name to where it lives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from podium.config import build, parse_spec
from podium.errors import ConfigError
from podium.imports import find_class
from podium.sweeps.search.base import Source
from podium.sweeps.search.crossed import CrossedSource
from podium.sweeps.search.space import Space, read_space

SOURCES: dict[str, str] = {
    "grid": "podium.sweeps.search.grid:Grid",
    "random": "podium.sweeps.search.random:RandomDraws",
    "list": "podium.sweeps.search.listed:PointList",
    "optuna": "podium.sweeps.search.optuna:OptunaSearch",
}


def find_source(name: str) -> type[Source]:
    """The class of a source: a name from the list, or `file.py:Class` / `module:Class` of the user's own."""
    cls = find_class("search", name, SOURCES)
    if not issubclass(cls, Source):
        raise ConfigError(f"{name} must be a search class, got {cls!r}")
    if not dataclasses.is_dataclass(cls):
        raise ConfigError(f"search {name}: must be a dataclass, whose fields are its options, got a plain class")
    return cls


def make_source(
    how: str | Source | None,
    space: Space | Mapping[str, Any] | Iterable[str] | None = None,
    *,
    points: int | None = None,
    seed: int = 0,
    maximize: bool = False,
    parallel: int | None = None,
    seeds: Sequence[int] = (0,),
    folds: int | None = None,
) -> CrossedSource:
    """All trials of a sweep, from `name[:key=value,…]` or a source: each point once per fold and seed.

    None is a grid where every name has a list of values, and random draws otherwise. Options in the text override
    `points` (how many), `seed` (of the draws) and `parallel` (how many points at once).
    """
    space = read_space(space)
    if isinstance(how, Source):
        if space or points is not None:
            raise ConfigError(f"search: a {type(how).__name__} that is made already takes neither a space nor points")
        if not isinstance(how, CrossedSource):
            return CrossedSource(how, seeds=seeds, folds=folds)
        if folds is not None or tuple(seeds) != (0,):
            raise ConfigError("search: a CrossedSource has its own seeds and folds, and takes no others")
        return how
    name, options = parse_spec(how or ("random" if space.ranges() else "grid"), "search")
    cls = find_source(name)
    fields = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # all sources are dataclasses
    if space and "space" not in fields:
        raise ConfigError(f"search {name}: has its own points, and takes no space, got {', '.join(space.texts())}")
    if points is not None and "points" not in fields:
        raise ConfigError(f"search {name}: the number of its points is fixed and must not be given, got {points}")
    if "points" in fields and points is None and "points" not in options:
        raise ConfigError(f"search {name}: how many points must be given (`{name}:points=20`), got none")
    if name in ("random", "optuna") and not space:
        raise ConfigError(f"search {name}: what is searched must be given (`--space lr=1e-4..1e-1:log`), got nothing")
    offered = {"space": space, "points": points, "seed": seed, "maximize": maximize, "parallel": parallel}
    given = {key: value for key, value in offered.items() if key in fields and value is not None}
    return CrossedSource(build(cls, {**given, **options}, who=f"search {name}"), seeds=seeds, folds=folds)
