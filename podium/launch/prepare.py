"""From a configuration to a job that launchers can start: resolved once, checked, with its own folder."""

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
"""Data that `check_data` has opened: a comparison would open the same many times."""


def plan_script(config: RunConfig, *, chosen: Path | None = None, place: bool = True) -> ScriptPlan:
    """Check a run of the user's own script, which `config.task` names, and choose its folder.

    `chosen`: the folder, if another rank of the run has chosen it; `place`: whether to choose one at all.
    """
    if not Path(config.task).is_file():
        raise ConfigError(f"{config.task}: no such script")
    check_script(dataclasses.replace(config, task=RunConfig.task))
    strategy = check(config)
    if isinstance(balancer_of(config), Steal):
        raise ConfigError("a script's own loop takes its part of a step at once, so it cannot use balance=steal")
    if not place:
        return ScriptPlan(config, strategy, None)
    run_dir = chosen or choose_run_dir(config)
    return ScriptPlan(dataclasses.replace(config, run_dir=str(run_dir)), strategy, run_dir)


def resolve_job(config: RunConfig, task: Task | None = None, *, open_data: bool = True) -> Job:
    """The job of this configuration, with task and strategy made, once, and all settings filled in.

    Checks all that can be checked before anything starts; every error here is an error of the request. Writes nothing,
    and opens the data of a built-in task unless `open_data` is false, as where another rank of the run has done it.
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
                f"task {found.name}: workers that draw from a step do not know the weight of the whole step, so "
                "balance=steal cannot be used with weigh; use equal-finish"
            )
        return Job(config, found, strategy, task_is_named=task is None)


def place_job(job: Job, *, chosen: Path | None = None) -> Job:
    """The job with its own folder, and with the checkpoint or the recorded run that it starts from. Writes nothing.

    `chosen`: the folder, if another rank of the run has chosen it.
    """
    with as_request():
        run_dir = chosen or choose_run_dir(job.config)
        config, warnings, strategy = dataclasses.replace(job.config, run_dir=str(run_dir)), job.warnings, job.strategy
        if config.resume is not None:  # fixed now: all ranks load the same one, even if the folder gets a newer one
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
    """Open the data of a built-in task in `data_dir` once, so that a fault shows before ranks start.

    Opening maps files and loads none. The data of a user's own task are opened by its ranks only: the effects of
    opening them, and the meaning of the folder, are not known here.
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
    """The configured folder, which must have no run yet; a new one where none is set."""
    if not config.run_dir:
        task = Path(config.task.partition(":")[0]).stem
        return new_folder(config.out, f"{task}-{config.strategy.rpartition(':')[2]}")
    run_dir = Path(config.run_dir)
    refuse_taken(run_dir)
    return run_dir
