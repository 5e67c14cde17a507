"""`podium bench`: Podium beside its peers, in one run."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from podium.cli.options import options
from podium.cli.output import Output
from podium.errors import ConfigError, UnknownName


@click.command(short_help="Measure Podium beside its peers.")
@click.argument("name", required=False)
@click.option("--peers", metavar="A,B", default="", help="What to measure beside Podium.")
@click.option("--rounds", type=click.IntRange(min=1), metavar="N", help="How often each is measured, in turn.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="An option of the measurement.")
@options("json")
@click.pass_obj
def bench(out: Output, name: str | None, peers: str, rounds: int | None, overrides: tuple[str, ...]) -> None:
    """Measure NAME; without one, list what can be measured.

    \b
    podium bench step --peers ddp
    """
    from podium.bench import BENCHES

    if name is None:
        out.document({"benches": sorted(BENCHES)})
        out.say(*sorted(BENCHES))
        return
    if name not in BENCHES:
        raise UnknownName("bench", name, BENCHES)
    module, _, function = BENCHES[name].partition(":")
    measure = getattr(importlib.import_module(module), function)
    result = measure(peers=tuple(filter(None, peers.split(","))), rounds=rounds, **_read_options(overrides))
    out.document(result)
    out.say(*_lines(result))


def _read_options(overrides: Iterable[str]) -> dict[str, Any]:
    from podium.config import parse_value

    chosen = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, got {override!r}")
        chosen[key.strip().replace("-", "_")] = parse_value(text.strip())
    return chosen


def _lines(value: Mapping[str, Any], indent: str = "") -> list[str]:
    """A result of any shape as aligned lines: a table inside it is indented, a list of tables is numbered by line."""
    lines: list[str] = []
    for name, item in value.items():
        if isinstance(item, Mapping):
            lines += [f"{indent}{name}", *_lines(item, indent + "  ")]
        elif isinstance(item, Sequence) and not isinstance(item, str) and any(isinstance(x, Mapping) for x in item):
            lines += [f"{indent}{name}", *(indent + "  " + "  ".join(_row(row)) for row in item)]
        else:
            lines.append(f"{indent}{name:<14} {_text(item)}")
    return lines


def _row(row: Mapping[str, Any]) -> list[str]:
    return [f"{name} {_text(item)}" for name, item in row.items()]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value)
    return str(value)
