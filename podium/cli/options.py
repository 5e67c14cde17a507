"""Options that several verbs share, and how they become a run's configuration."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from podium.config import LAUNCHERS, RunConfig, resolve
from podium.errors import as_request

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "strategy": click.option(
        "--strategy",
        metavar="NAME[:K=V,…]",
        help="How replicas come to agree; in phases: 'A until TRIGGER | B'. [all-reduce]",
    ),
    "codec": click.option("--codec", metavar="NAME[:K=V,…]", help="How gradients are packed for the wire. [dense]"),
    "balance": click.option("--balance", metavar="NAME[:K=V,…]", help="How a step is divided among workers. [equal]"),
    "collective": click.option(
        "--collective", metavar="NAME[:K=V,…]", help="How workers sum gradients and parameters. [default]"
    ),
    "workers": click.option("--workers", "-n", type=int, metavar="N", help="How many replicas. [1; in compare: 2]"),
    "seed": click.option("--seed", type=int, metavar="N", help="Fixes parameters and the order of samples. [0]"),
    "epochs": click.option("--epochs", type=int, metavar="N", help="Passes over the training data."),
    "steps": click.option("--steps", type=int, metavar="N", help="End after this many global steps."),
    "batch_size": click.option("--batch-size", type=int, metavar="N", help="Samples per step over all workers."),
    "launcher": click.option("--launcher", metavar="NAME", help=f"Where ranks live: {', '.join(LAUNCHERS)}. [local]"),
    "hosts": click.option("--hosts", metavar="FILE", help="Launcher ssh: a file with a line per host, or a,b,c."),
    "nodes": click.option("--nodes", type=int, metavar="N", help="Launchers slurm and ray: hosts to ask for."),
    "cluster": click.option("--cluster", metavar="FILE", help="A cluster file (TOML): nodes and links."),
    "device": click.option("--device", metavar="NAME", help="cpu, cuda, auto; or one per worker: cuda,cpu. [cpu]"),
    "data_dir": click.option("--data-dir", metavar="DIR", help="Where the task's data files are."),
    "out": click.option("--out", metavar="DIR", help="Where results are written."),
    "resume": click.option("--resume", metavar="DIR", help="Resume from a run's folder or one checkpoint."),
    "replay": click.option("--replay", metavar="DIR", help="Repeat a run's order of arrivals, in virtual time."),
    "checkpoint_every": click.option(
        "--checkpoint-every", type=int, metavar="STEPS", help="Steps between checkpoints; 0: at the end only. [0]"
    ),
    "config": click.option("--config", "config_file", metavar="FILE", help="A run file (TOML); options win over it."),
    "set": click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set anything: strategy.servers=2, task.lr=0.1."
    ),
    "json": click.option(
        "--json", is_flag=True, expose_value=False, help="Print one JSON document on standard output, nothing else."
    ),
    "log": click.option(
        "--log",
        "logs",
        multiple=True,
        metavar="NAME[:WHERE]",
        help="Also write numbers for tensorboard[:DIR] or mlflow[:URI]. Repeatable.",
    ),
    "dry_run": click.option("--dry-run", is_flag=True, help="Print the resolved configuration and run nothing."),
    "quiet": click.option("--quiet", "-q", is_flag=True, help="Show no progress."),
}


_NAMING = ("task", "strategy", "codec", "balance", "collective")
"""Options by which a user may name code. Folders are not among them: one called `x.py:1` names no code."""


def options(*names: str) -> Callable[[F], F]:
    """Give a verb these shared options; its help lists them in this order."""

    def add(verb: F) -> F:
        for name in reversed(names):
            verb = _OPTIONS[name](verb)
        return verb

    return add


def resolve_run(config_file: str | None, overrides: Sequence[str], given: Mapping[str, Any]) -> RunConfig:
    """The configuration from a verb's options.

    A resumed or replayed run keeps its earlier configuration, unless a run file or an option changes it.
    """
    asked = {name: value for name, value in given.items() if value is not None}
    with as_request():
        if config_file is None:
            for name, changes in (("resume", {}), ("replay", {"launcher": "virtual"})):
                if name in asked:
                    asked = {**_asked_before(Path(asked[name]), asked), **changes, **asked}
        return resolve(config_file, overrides, asked)


@contextmanager
def code_of_earlier_run(config_file: str | None, overrides: Sequence[str], given: Mapping[str, Any]) -> Iterator[None]:
    """Inside, importing code that only the folder of a resumed or replayed run names is reported, or refused if the
    code lies in that folder."""
    from podium.imports import names_of_folders

    places = [] if config_file is not None else [Path(given[name]) for name in ("replay", "resume") if given.get(name)]
    folders = [folder for place in places if (folder := _run_folder(place)) is not None]
    said = [*overrides, *(given[name] for name in _NAMING if given.get(name))]
    with names_of_folders(folders, said, _tell):
        yield


def _tell(text: str) -> None:
    print(f"podium: {text}", file=sys.stderr, flush=True)


def _run_folder(place: Path) -> Path | None:
    """The folder of a run, from its path or that of one of its checkpoints; None where there is no manifest."""
    folders = (place, *place.absolute().parents[:2])
    return next((folder for folder in folders if (folder / "manifest.json").is_file()), None)


def _asked_before(place: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of an earlier run, from the folder of the run or of one of its checkpoints."""
    folder = _run_folder(place)
    if folder is None:
        return {}
    from podium.records.manifest import read_manifest

    before = dict(read_manifest(folder)["config"])
    dropped = ["run_dir", "resume", "replay"]
    # Another task or strategy has its own options. A user may have to name the same task again, where its name in the
    # folder is not trusted (`podium.imports`); it keeps its options.
    dropped += ["strategy_options"] if "strategy" in asked else []
    dropped += ["task_options"] if asked.get("task", before.get("task")) != before.get("task") else []
    return {name: value for name, value in before.items() if name not in dropped}


def changed(config: RunConfig) -> dict[str, Any]:
    """The fields whose values are not the default."""
    plain = RunConfig()
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if value != getattr(plain, name)}
