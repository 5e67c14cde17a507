"""`podium compare`: several strategies on one task, several seeds each, and what may be concluded."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import click

from podium.cli.interrupt import stop_on_interrupt
from podium.cli.options import changed, check_names, options, resolve_run
from podium.cli.output import Output, wrapped
from podium.config import RunConfig

if TYPE_CHECKING:
    from podium.study.run import Comparison

STRATEGIES = ("solo", "all-reduce", "parameter-server", "parameter-server:mode=async")
"""What is compared when nobody says."""
WORKERS = 2
OWN = ("workers", "launcher")
"""Fields of a run that a comparison has arguments for."""
WIDE = 100
"""Columns that a table with lines around it needs; below that, names would be cut in the middle of a word."""


@click.command(short_help="Train a task with several strategies and seeds.")
@click.argument("task", required=False)
@click.option("--strategies", "listed", metavar="A,B,…", help=f"With commas between them. [{','.join(STRATEGIES)}]")
@click.option(
    "--strategy", "single", multiple=True, metavar="NAME[:K=V,…]", help="One more strategy; may be given repeatedly."
)
@click.option("--seeds", type=click.IntRange(min=1), default=3, metavar="N", help="Runs of each strategy. [3]")
@click.option("--target", type=float, metavar="X", help="The value of the metric that time to target waits for.")
@options(
    "codec",
    "collective",
    "balance",
    "workers",
    "epochs",
    "steps",
    "batch_size",
    "launcher",
    "cluster",
    "device",
    "data_dir",
)
@options("out", "config", "set", "dry_run", "quiet", "json")
@click.pass_obj
def compare(
    out: Output, /, listed: str | None, single: tuple[str, ...], dry_run: bool, quiet: bool, **given: Any
) -> int:
    """Train TASK with each strategy and each seed; print a table and write a report.

    Ctrl-C once saves the run in progress and reports what there is; the same command with the same --out goes on from
    there.

    \b
    podium compare digits-mlp --strategies solo,all-reduce --seeds 5
    podium compare digits-mlp --strategy solo \\
        --strategy parameter-server:mode=async,servers=2
    """
    strategies = (*split_strategies(listed or ""), *single) or STRATEGIES
    seeds, target = given.pop("seeds"), given.pop("target")
    config = _resolve(**given)
    shared = {name: value for name, value in changed(config).items() if name not in ("task", "out", *OWN)}
    fields = {"workers": config.workers, "launcher": config.launcher, "target": target}
    from podium.study.design import make_design

    design = make_design(config.task, strategies, seeds, shared, **fields)
    for cell in design.strategies:
        check_names(design.config(cell, seed=0))
    if dry_run:
        out.document(design.to_dict())
        out.say(*(f"{name}: {value}" for name, value in design.to_dict().items() if value is not None))
        return 0
    settings = {**shared, **fields, "strategies": strategies, "seeds": seeds, "out": given["out"]}
    comparison = run_comparison(config.task, quiet=quiet or out.json, **settings)
    out.document(comparison.to_dict())
    out.say(*describe(comparison))
    return exit_code(comparison)


def _resolve(*, config_file: str | None, overrides: tuple[str, ...], **given: Any) -> RunConfig:
    config = resolve_run(config_file, overrides, given)
    # One worker is what a run has when nobody says; a comparison of ways to share work then takes two.
    unsaid = given["workers"] is None and config.workers == RunConfig.workers
    return dataclasses.replace(config, workers=WORKERS) if unsaid else config


def split_strategies(text: str) -> tuple[str, ...]:
    """The strategies of a comma list. A part that is `key=value` goes with the strategy before it."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if found and "=" in part.partition(":")[0]:
            found[-1] += ("," if ":" in found[-1] else ":") + part
        else:
            found.append(part)
    return tuple(found)


def run_comparison(task: str, *, quiet: bool, **settings: Any) -> Comparison:
    """`podium.compare` with progress shown and Ctrl-C heeded."""
    from podium.study.run import compare as compare_strategies
    from podium.ui import progress

    with stop_on_interrupt() as stop, progress(quiet=quiet, many=True) as shown:
        return compare_strategies(task, on_event=shown, stop=stop, **settings)


def describe(comparison: Comparison) -> list[Any]:
    """The table, the answer with what may not be concluded, and where the rest lies."""
    from podium.study.table import format_plain, format_table
    from podium.ui import console

    table = format_table(comparison) if console(sys.stdout).width >= WIDE else format_plain(comparison)
    lines: list[Any] = ["", table, "", wrapped(comparison.answer), ""]
    if comparison.status == "stopped":
        lines.append(f"stopped early; the same command with --out {comparison.out} goes on")
    return [*lines, f"report   {comparison.report}"]


def exit_code(comparison: Comparison) -> int:
    """130 when it was stopped, 1 when a run failed."""
    return 130 if comparison.status == "stopped" else 1 if comparison.failed else 0
