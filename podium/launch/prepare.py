"""From a configuration to a job that launchers can start: resolved once, checked, with a folder of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from podium.balance import balancer_of
from podium.balance.steal import Steal
from podium.config import RunConfig, check_script
from podium.engine.build import Job
from podium.engine.checkpoint import find_checkpoint
from podium.errors import ConfigError, as_request
from podium.launch.base import ScriptPlan
from podium.launch.checks import check
from podium.launch.clusters.description import read_cluster
from podium.launch.replay import as_recorded, check_replay
from podium.launch.run_folder_lock import refuse_taken
from podium.records.folder_name import new_folder
from podium.records.recorder import to_json
from podium.task import Task, load_task
from podium.tasks import takes_data_dir

_OPENED: set[tuple[str, str, str]] = set()
"""The data that were opened by `check_data`: a comparison asks for the same many times."""


def plan_script(config: RunConfig, *, chosen: Path | None = None) -> ScriptPlan:
    """Check a run of the user's own script, which `config.task` names, and choose its folder.

    `chosen` is the folder where another rank of the same run has chosen it already.
    """
    if not Path(config.task).is_file():
        raise ConfigError(f"{config.task}: no such script")
    check_script(dataclasses.replace(config, task=RunConfig.task))
    strategy = check(config)
    if isinstance(balancer_of(config), Steal):
        raise ConfigError("a loop of one's own takes its part of a step at once: balance=steal cannot go with it")
    run_dir = chosen or choose_run_dir(config)
    return ScriptPlan(dataclasses.replace(config, run_dir=str(run_dir)), strategy, run_dir)


def resolve_job(config: RunConfig, task: Task | None = None, *, open_data: bool = True) -> Job:
    """The job of this configuration: task and strategy are made, once, and nothing is left open.

    Checks all that can be checked before anything starts, so all that is wrong is wrong with the request. Writes
    nothing, and opens the data of a built-in task unless `open_data` is false: another rank of the run has done it.
    """
    with as_request():
        strategy = check(config)
        if config.launcher == "shaped" and config.cluster is None:
            raise ConfigError("launcher shaped needs a cluster file: --cluster FILE")
        if config.cluster is not None:
            read_cluster(config.cluster)
        found = task or load_task(config.task, config.task_options, config.data_dir)
        if config.replay is not None and config.launcher != "virtual":
            raise ConfigError(f"replay runs in virtual time: launcher must be 'virtual', got {config.launcher!r}")
        if task is None and open_data:
            check_data(config, found)
        if found.weigh is not None and isinstance(balancer_of(config), Steal):
            raise ConfigError(
                f"task {found.name}: what a step weighs is not known to workers that draw from it: "
                "balance=steal cannot go with weigh; use equal-finish"
            )
        return Job(config, found, strategy, task_is_named=task is None)


def place_job(job: Job, *, chosen: Path | None = None) -> Job:
    """The job with a folder of its own, and with the checkpoint or the recorded run that it starts from.

    `chosen` is the folder where another rank of the same run has chosen it already. Writes nothing.
    """
    with as_request():
        run_dir = chosen or choose_run_dir(job.config)
        config, warnings, strategy = dataclasses.replace(job.config, run_dir=str(run_dir)), job.warnings, job.strategy
        if config.resume is not None:  # all ranks load the same checkpoint, even if the folder gets a newer one
            saved = find_checkpoint(Path(config.resume))
            config, warnings = dataclasses.replace(config, resume=str(saved.path)), saved.warnings
        if config.replay is not None:
            strategy = as_recorded(job.strategy, Path(config.replay))
            check_replay(config, job.strategy, strategy, Path(config.replay))
        return dataclasses.replace(job, config=config, strategy=strategy, run_dir=run_dir, warnings=warnings)


def prepare(config: RunConfig, task: Task | None = None, *, chosen: Path | None = None) -> Job:
    """`resolve_job` and `place_job` together."""
    return place_job(resolve_job(config, task, open_data=chosen is None), chosen=chosen)


def check_data(config: RunConfig, task: Task) -> None:
    """Open the data of a built-in task in `data_dir` once, which maps files and loads none: ranks would all fail alike.

    A task of the user's own is opened by its ranks alone: what that does, and what it takes the folder for, is its own.
    """
    if config.data_dir is None or ":" in config.task or not takes_data_dir(config.task):
        return
    asked = (config.task, config.data_dir, to_json(dict(config.task_options)))
    if asked in _OPENED:
        return
    if not Path(config.data_dir).is_dir():
        what = "a file" if Path(config.data_dir).exists() else "no such folder"
        raise ConfigError(f"data_dir must be a folder, got {config.data_dir}: {what}")
    task.data()
    _OPENED.add(asked)


def choose_run_dir(config: RunConfig) -> Path:
    """The folder that was asked for, unless a run is in it already; a new one where none was."""
    if not config.run_dir:
        task = Path(config.task.partition(":")[0]).stem
        return new_folder(config.out, f"{task}-{config.strategy.rpartition(':')[2]}")
    run_dir = Path(config.run_dir)
    refuse_taken(run_dir)
    return run_dir
