"""`podium compare`: several strategies on one task, with several seeds each, or a study."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from podium.cli.interrupt import stop_on_interrupt
from podium.cli.options import changed, options, resolve_run
from podium.cli.output import Output, wrapped
from podium.config import RunConfig
from podium.errors import ConfigError, as_request

if TYPE_CHECKING:
    from podium.lab.study.run import Comparison
    from podium.lab.study.study import Study

STRATEGIES = ("solo", "all-reduce", "parameter-server", "parameter-server:mode=async")
"""What is compared by default."""
WORKERS = 2
SEEDS = 3
OWN = ("workers", "launcher")
"""Fields of a run that a comparison has arguments for."""
WIDE = 100
"""Columns that a table with borders needs; in fewer, names would be cut in the middle of a word."""


@click.command(short_help="Compare strategies, or run a study.")
@click.argument("task", required=False, metavar="[TASK|STUDY]")
@click.option("--strategies", "listed", metavar="A,B,…", help=f"With commas between them. [{','.join(STRATEGIES)}]")
@click.option(
    "--strategy", "single", multiple=True, metavar="NAME[:K=V,…]", help="One more strategy; may be given repeatedly."
)
@click.option("--seeds", type=click.IntRange(min=1), metavar="N", help="Runs of each cell. [3, or the study's own]")
@click.option("--target", type=float, metavar="X", help="The value of the metric that time to target waits for.")
@click.option("--maximize/--minimize", default=None, help="Which way the metric is better. [by its name]")
@click.option("--size", metavar="NAME", help="One of the sizes that a study file has, as small.")
@click.option("--only", multiple=True, metavar="FACTOR=LEVEL", help="Only these cells in this call; may be repeated.")
@click.option("--budget-s", type=float, metavar="S", help="Begin no run after S seconds.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, metavar="N", help="Runs at once, in virtual time. [1]")
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
@options("log", "out", "config", "set", "dry_run", "quiet", "json")
@click.pass_obj
def compare(
    out: Output,
    /,
    listed: str | None,
    single: tuple[str, ...],
    dry_run: bool,
    quiet: bool,
    jobs: int,
    only: tuple[str, ...],
    budget_s: float | None,
    logs: tuple[str, ...],
    **given: Any,
) -> int:
    """Train TASK with each strategy and each seed, or run the study in a file; print a table and write a report.

    A STUDY is a file that ends in .toml or .py: factors, levels, replications and settings; options override its
    settings for all runs.

    Ctrl-C once saves the run in progress and reports what there is; the same command with the same --out resumes.
    A study goes to a folder of its own name, so the same command alone resumes it.

    \b
    podium compare digits-mlp --strategies solo,all-reduce --seeds 5
    podium compare digits-mlp --strategy solo \\
        --strategy parameter-server:mode=async,servers=2
    podium compare studies/strategies.toml --size small
    """
    from podium.lab.study.file import is_study_file

    strategies = (*split_strategies(listed or ""), *single)
    where, size = given.pop("out"), given.pop("size")
    if is_study_file(given["task"] or ""):
        study = _from_file(strategies, size, **given)
        where = where or study_folder_of(study)
    else:
        if size is not None:
            raise ConfigError(f"compare: --size is for study files, which end in .toml or .py; got {given['task']!r}")
        study = _of_strategies(strategies or STRATEGIES, **given)
    trainings = study.runs == "trainings"
    configs = [study.config(cell, study.seeds[0]) for cell in study.names] if trainings else []
    from podium.launch.prepare import resolve_job  # with torch

    jobs_asked = [resolve_job(config) for config in configs]
    if not (quiet or out.json):
        from podium.launch.notices import notices

        out.note(*(text for job in jobs_asked for text in notices(job)))
    if dry_run:
        planned = _planned(study, _levels(only))
        out.document(planned)
        out.say(*(f"{name}: {value}" for name, value in planned.items() if value is not None))
        return 0
    if logs and jobs > 1:
        raise ConfigError(
            f"compare: --log follows runs one by one, got --jobs {jobs}; `podium export` writes them later"
        )
    part = {"only": _levels(only), "budget_s": budget_s}
    comparison = run_shown(study, where, quiet=quiet or out.json, jobs=jobs, logs=logs, **part)
    out.document(comparison.to_dict())
    out.say(*describe(comparison))
    return exit_code(comparison)


def _planned(study: Study, only: dict[str, list[str]]) -> dict[str, Any]:
    """The study; its `order` holds the runs that this call would do."""
    from podium.lab.study.run_all import Part

    cells = Part.of(study, only, None).cells
    described = study.to_dict()
    return {**described, "order": [run for run in described["order"] if run["cell"] in cells]}


def _levels(only: Sequence[str]) -> dict[str, list[str]]:
    """`--only FACTOR=LEVEL`, by factor."""
    found: dict[str, list[str]] = {}
    for text in only:
        factor, equals, level = text.partition("=")
        if not equals:
            raise ConfigError(f"--only takes FACTOR=LEVEL, got {text!r}")
        found.setdefault(factor, []).append(level)
    return found


def _of_strategies(
    strategies: Sequence[str], seeds: int | None, target: float | None, maximize: bool | None, **given: Any
) -> Study:
    from podium.lab.study.study import strategies_study

    config = _resolve(**given)
    shared = {name: value for name, value in changed(config).items() if name not in ("task", "out", *OWN)}
    settings = {**shared, "workers": config.workers, "launcher": config.launcher}
    return strategies_study(
        config.task, strategies, seeds or SEEDS, settings, target=target, maximize=maximize, retries=0
    )


def _from_file(
    strategies: Sequence[str],
    size: str | None,
    *,
    task: str,
    seeds: int | None,
    target: float | None,
    maximize: bool | None,
    config_file: str | None,
    overrides: tuple[str, ...],
    **given: Any,
) -> Study:
    from podium.lab.study.file import read_study

    for name, value in (("--strategies", strategies), ("--config", config_file)):
        if value:
            raise ConfigError(f"compare: {name} is not for a study file, which has its own; got {value}")
    study = read_study(task, size)
    settings = {name: value for name, value in given.items() if value is not None}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, got {override!r}")
        settings[key.strip()] = text.strip()
    return study.changed(settings, seeds=seeds, target=target, maximize=maximize).resolved()


def study_folder_of(study: Study) -> str:
    from podium.lab.study.run import study_folder

    return str(study_folder(study))


def _resolve(*, config_file: str | None, overrides: tuple[str, ...], **given: Any) -> RunConfig:
    config = resolve_run(config_file, overrides, given)
    # A run has one worker by default; a comparison of ways to share work takes two.
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


def run_shown(
    study: Study, out: str | None, *, quiet: bool, jobs: int = 1, logs: Sequence[str] = (), **part: Any
) -> Comparison:
    """Run a study with progress shown and Ctrl-C handled."""
    from podium.cli.progress import progress
    from podium.lab.study.run import run_resolved
    from podium.records.folder_name import new_folder
    from podium.records.writers import Together, open_log

    folder = out or str(new_folder("runs", f"compare-{study.name}"))
    with as_request():
        writers = [open_log(text, folder) for text in logs]
    with (
        stop_on_interrupt() as stop,
        progress(quiet=quiet, many=True) as shown,
        Together(shown, *writers) as heard,
    ):
        return run_resolved(study, folder, on_event=heard, stop=stop, jobs=jobs, **part)


def describe(comparison: Comparison) -> list[Any]:
    """The table, the answer with its limits, and the report's path."""
    from podium.cli.display import console
    from podium.lab.study.terminal import format_plain, format_table

    table = format_table(comparison) if console(sys.stdout).width >= WIDE else format_plain(comparison)
    lines: list[Any] = ["", table, "", wrapped(comparison.answer), ""]
    if any(row.get("sent_bytes") and row.get("launcher") in ("local", "threads") for row in comparison.rows):
        lines += [
            wrapped("MB: as a ring would send them; all ranks were on this host, so no network carried them."),
            "",
        ]
    if comparison.status == "stopped":
        lines.append(f"stopped early; the same command with --out {comparison.out} resumes")
    return [*lines, f"report   {comparison.report}"]


def exit_code(comparison: Comparison) -> int:
    """130 when the comparison was stopped, 1 when a run failed."""
    return 130 if comparison.status == "stopped" else 1 if comparison.failed else 0
