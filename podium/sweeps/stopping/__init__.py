"""When trials are stopped early: one file per rule, and a plain dict from name to where it lives."""

from __future__ import annotations

import dataclasses
from typing import Any

from podium.config import build, parse_spec
from podium.errors import ConfigError
from podium.imports import find_class
from podium.sweeps.stopping.base import Stopping

STOPPINGS: dict[str, str] = {
    "none": "podium.sweeps.stopping.base:NoStopping",
    "asha": "podium.sweeps.stopping.asha:ASHA",
    "median": "podium.sweeps.stopping.median:Median",
    "wilcoxon": "podium.sweeps.stopping.wilcoxon:Wilcoxon",
    "optuna": "podium.sweeps.stopping.optuna:OptunaPruner",
    "pbt": "podium.sweeps.stopping.pbt:PBT",
}


def find_stopping(name: str) -> type[Stopping]:
    """The class of a rule: a name from the list, or `file.py:Class` / `module:Class` of the user's own."""
    cls = find_class("stopping", name, STOPPINGS)
    if not issubclass(cls, Stopping):
        raise ConfigError(f"{name} must be a stopping class, got {cls!r}")
    if not dataclasses.is_dataclass(cls):
        raise ConfigError(f"stopping {name}: must be a dataclass, whose fields are its options, got a plain class")
    return cls


def make_stopping(given: str | Stopping | None, *, space: Any = None) -> Stopping:
    """From `name[:key=value,…]`, as `asha:grace=2,factor=3`; an instance is returned as it is, None stops no trial.

    `space` is the sweep's, for rules that draw from it.
    """
    if isinstance(given, Stopping):
        return given
    name, options = parse_spec(given or "none", "stopping")
    cls = find_stopping(name)
    takes = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # all rules are dataclasses
    values = {"space": space} if space is not None and "space" in takes else {}
    return build(cls, {**values, **options}, who=f"stopping {name}")
