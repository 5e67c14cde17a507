"""`podium list`: the names that other verbs take."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import click

from podium.cli.options import options
from podium.cli.output import Output


@click.command("list")
@options("json")
@click.pass_obj
def list_names(out: Output) -> None:
    """List tasks, strategies and launchers."""
    from podium.config import LAUNCHERS
    from podium.strategies import STRATEGIES, find_strategy
    from podium.tasks import describe_tasks

    tasks = describe_tasks()
    strategies = {name: (inspect.getdoc(find_strategy(name)) or "").partition("\n")[0] for name in STRATEGIES}
    out.document({"tasks": tasks, "strategies": strategies, "launchers": list(LAUNCHERS)})
    out.say("Tasks", *_table(tasks), "", "Strategies", *_table(strategies), "", f"Launchers: {', '.join(LAUNCHERS)}")


def _table(lines: Mapping[str, str]) -> list[str]:
    return [f"  {name:<18} {text}".rstrip() for name, text in lines.items()]
