"""`podium list`: the names that other verbs take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

from podium.cli.options import options
from podium.cli.output import Output


@click.command("list")
@options("json")
@click.pass_obj
def list_names(out: Output) -> None:
    """List tasks, strategies, codecs, collectives and launchers."""
    from podium.codecs import CODECS, find_codec
    from podium.collectives import COLLECTIVES, find_collective
    from podium.config import LAUNCHERS
    from podium.strategies import STRATEGIES, find_strategy
    from podium.tasks import describe_tasks

    found = {
        "tasks": describe_tasks(),
        "strategies": _described(STRATEGIES, find_strategy),
        "codecs": _described(CODECS, find_codec),
        "collectives": _described(COLLECTIVES, find_collective),
    }
    out.document({**found, "launchers": list(LAUNCHERS)})
    for what, lines in found.items():
        out.say(what.capitalize(), *_table(lines), "")
    out.say(f"Launchers: {', '.join(LAUNCHERS)}")


def _described(names: Iterable[str], find: Callable[[str], type[Any]]) -> dict[str, str]:
    """Each name with the first line of what its class says of itself."""
    return {name: (inspect.getdoc(find(name)) or "").partition("\n")[0] for name in names}


def _table(lines: Mapping[str, str]) -> list[str]:
    return [f"  {name:<18} {text}".rstrip() for name, text in lines.items()]
