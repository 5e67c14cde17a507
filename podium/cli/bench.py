"""`podium bench`: Podium beside its peers, in one run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints

import click

from podium.cli.options import options
from podium.cli.output import Output
from podium.config import convert
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
    from podium.lab.bench import BENCHES

    if name is None:
        out.document({"benches": sorted(BENCHES)})
        out.say(*sorted(BENCHES))
        return
    if name not in BENCHES:
        raise UnknownName("bench", name, BENCHES)
    module, _, function = BENCHES[name].partition(":")
    measure = getattr(importlib.import_module(module), function)
    chosen = read_options(overrides, measure, f"bench {name}")
    result = measure(peers=tuple(filter(None, peers.split(","))), rounds=rounds, **chosen)
    out.document(result)
    out.say(*_lines(result))


def read_options(overrides: Iterable[str], measure: Callable[..., Any], who: str) -> dict[str, Any]:
    """Each `key=value`, converted by the type hints of `measure`; unknown keys raise."""
    hints = {name: hint for name, hint in get_type_hints(measure).items() if name not in ("peers", "rounds", "return")}
    chosen = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, got {override!r}")
        name = key.strip().replace("-", "_")
        if name not in hints:
            raise UnknownName(f"option of {who}", name, hints)
        chosen[name] = convert(text.strip(), hints[name], f"{who}: {name}")
    return chosen


def _lines(value: Mapping[str, Any], indent: str = "") -> list[str]:
    """A result as lines: plain values aligned, nested ones indented below their name."""
    lines: list[str] = []
    for name, item in value.items():
        nested = [x for x in item if isinstance(x, Mapping)] if isinstance(item, list | tuple) else []
        if isinstance(item, Mapping) and any(isinstance(x, Mapping) for x in item.values()):
            lines += [f"{indent}{name}", *_lines(item, indent + "  ")]
        elif nested:
            lines += [f"{indent}{name}", *(line for x in nested for line in ["", *_lines(x, indent + "  ")])]
        else:
            lines.append(f"{indent}{name:<22} {_text(item)}")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value)
    return str(value)
