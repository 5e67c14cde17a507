"""`podium list`: the names that other verbs take."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

from podium.cli.options import options
from podium.cli.output import Output


@click.command("list", short_help="List the names that other verbs take.")
@options("json")
@click.pass_obj
def list_names(out: Output) -> None:
    """List tasks, strategies, triggers, codecs, collectives, balancers, launchers, and what a sweep takes."""
    from podium.balance import BALANCERS, find_balancer
    from podium.config import LAUNCHERS
    from podium.exchange.codecs import CODECS, find_codec
    from podium.exchange.collectives import COLLECTIVES, find_collective
    from podium.strategies import STRATEGIES, find_strategy
    from podium.strategies.triggers import TRIGGERS
    from podium.sweeps import EXECUTORS
    from podium.sweeps.search import SOURCES, find_source
    from podium.sweeps.stopping import STOPPINGS, find_stopping
    from podium.tasks import describe_tasks

    found = {
        "tasks": describe_tasks(),
        "strategies": _described(STRATEGIES, find_strategy),
        "triggers": _described(TRIGGERS, _find_trigger),
        "codecs": _described(CODECS, find_codec),
        "collectives": _described(COLLECTIVES, find_collective),
        "balancers": _described(BALANCERS, find_balancer),
        "executors": _described(("auto", *(name for name in EXECUTORS if name != "auto")), _find_executor),
        "stopping rules": _described(STOPPINGS, find_stopping),
        "searches": _described(SOURCES, find_source),
    }
    settings = {name: _options(_find_trigger(name)) for name in TRIGGERS}
    document = {what.replace(" ", "_"): lines for what, lines in found.items()}
    out.document({**document, "trigger_options": settings, "launchers": list(LAUNCHERS)})
    for what, lines in found.items():
        out.say(what.capitalize(), *_table(lines, settings if what == "triggers" else {}), "")
    out.say(f"Launchers: {', '.join(LAUNCHERS)}")


def _described(names: Iterable[str], find: Callable[[str], type[Any]]) -> dict[str, str]:
    """Each name with the first line of its class's docstring."""
    return {name: (inspect.getdoc(find(name)) or "").partition("\n")[0] for name in names}


def _find_trigger(name: str) -> type[Any]:
    from podium.imports import find_class
    from podium.strategies.triggers import TRIGGERS

    return find_class("trigger", name, TRIGGERS)


def _find_executor(name: str) -> type[Any]:
    from podium.imports import find_class
    from podium.sweeps import EXECUTORS

    return find_class("executor", name, EXECUTORS)


def _options(cls: type[Any]) -> dict[str, Any]:
    """A class's options with their defaults; None where the default is None or the option is required."""
    missing = dataclasses.MISSING
    return {field.name: None if field.default is missing else field.default for field in dataclasses.fields(cls)}


def _table(lines: Mapping[str, str], settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each name and, if it is in `settings`, another for its options."""
    shown = []
    for name, text in lines.items():
        shown.append(f"  {name:<18} {text}".rstrip())
        if name in settings:
            given = [k if default is None else f"{k}={str(default).lower()}" for k, default in settings[name].items()]
            shown.append(f"  {'':<18} options: {', '.join(given)}")
    return shown
