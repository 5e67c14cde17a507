"""Rules that end a phase: one file per rule, and a plain dict from name to class."""

from __future__ import annotations

import dataclasses
from typing import Any

from podium.config import build, parse_spec
from podium.errors import ConfigError
from podium.imports import find_class, load_named
from podium.strategies.triggers.base import Trigger

TRIGGERS: dict[str, str] = {
    "plateau": "podium.strategies.triggers.plateau:Plateau",
    "step": "podium.strategies.triggers.fixed:AtStep",
    "epoch": "podium.strategies.triggers.fixed:AtEpoch",
    "share": "podium.strategies.triggers.fixed:AtShare",
    "rate-decay": "podium.strategies.triggers.rate:RateDecay",
    "noise": "podium.strategies.triggers.noise:NoiseScale",
    "straggler": "podium.strategies.triggers.straggler:Straggler",
    "advice": "podium.strategies.triggers.advice:Advice",
    "function": "podium.strategies.triggers.function:Function",
}

WATCHED = (
    "plateau",
    "plateau:on=validation",
    "plateau:against=last;threshold=0.01;floor=0;fallen=1",
    "share:at=0.0625",
    "share:at=0.125",
    "share:at=0.5",
    "rate-decay",
    "noise",
    "straggler",
    "advice",
)
"""Rules that every run with phases evaluates besides its own, to record when they would have fired."""


def make_trigger(text: str) -> Trigger:
    """From `name[:key=value;…]`, or the user's own `file.py:function` or `file.py:Class`."""
    name, options = parse_spec(text, "trigger")
    if name not in TRIGGERS and ":" in name and not isinstance(load_named(name), type):
        name, options = "function", {"of": name, **options}
    cls: type[Any] = find_class("trigger", name, TRIGGERS)
    if not issubclass(cls, Trigger):
        raise ConfigError(f"trigger {name} must be a subclass of podium.Trigger, got {cls.__name__}")
    return build(cls, options, who=f"trigger {name}")


def format_trigger(trigger: Trigger) -> str:
    """The inverse of `make_trigger`: the name and the options that differ from the default."""
    fields = dataclasses.fields(trigger)  # type: ignore[arg-type]  # all triggers are dataclasses
    changed = {f.name: getattr(trigger, f.name) for f in fields if getattr(trigger, f.name) != f.default}
    options = [f"{name}={value}" for name, value in changed.items()]
    cls = type(trigger)
    ours = TRIGGERS.get(cls.name) == f"{cls.__module__}:{cls.__qualname__}"
    name = cls.name if ours else f"{cls.__module__}:{cls.__qualname__}"
    return f"{name}:{';'.join(options)}" if options else name
