"""`podium demo`: a first comparison, for new users."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import click

import podium
from podium.cli.compare import STRATEGIES, WORKERS, describe, exit_code, run_shown
from podium.cli.options import options
from podium.cli.output import Output

TASK = "digits-mlp"
SEEDS = 5


@click.command(short_help="Compare four strategies here: offline, under a minute.")
@click.option("--quick", is_flag=True, help=f"One seed instead of {SEEDS}: a few seconds, no intervals.")
@options("out", "quiet", "json")
@click.pass_obj
def demo(out: Output, /, quick: bool, quiet: bool, **where: str | None) -> int:
    """Compare four ways to train a small model on this machine: offline, in under a minute."""
    seeds = 1 if quick else SEEDS
    out.say(*header(seeds))
    # One thread per rank: on so small a model a second thread costs more than it gains, and times vary more.
    from podium.lab.study.study import strategies_study

    settings = {"workers": WORKERS, "launcher": "local", "threads": 1}
    study = strategies_study(TASK, STRATEGIES, seeds, settings, retries=0)
    comparison = run_shown(study, where["out"], quiet=quiet or out.json)
    out.document(comparison.to_dict())
    out.say(*describe(comparison))
    out.say(
        f"next     podium train {TASK} --strategy all-reduce --workers {WORKERS}",
        f"         podium compare {TASK} --strategies solo,all-reduce --seeds 10",
        "         podium list",
    )
    return exit_code(comparison)


def header(seeds: int) -> list[str]:
    """Versions and the planned runs: two lines, printed before anything heavy is imported."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = f"Podium {podium.__version__} · torch {metadata.version('torch')} · Python {platform.python_version()}"
    runs = f"{len(STRATEGIES)} strategies × {seeds} seed{'s' * (seeds > 1)}, {WORKERS} workers, one thread each"
    return [f"{versions} · {cores} cores", f"{TASK}: {runs}"]
