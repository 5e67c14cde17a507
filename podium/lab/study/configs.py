"""The configuration of each run of a study, checked before the first run starts."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.config import RunConfig, lift, parse_strategy, resolve
from podium.errors import ConfigError, UnknownName
from podium.lab.study.parts import Plan, as_text
from podium.lab.study.responses import TO_TARGET, is_response, known_responses
from podium.lab.study.results import judged_by
from podium.lab.study.run_sweep import sweep_arguments
from podium.records.manifest import hardware

if TYPE_CHECKING:
    from podium.lab.study.study import Study


def config_of(study: Study, name: str, seed: int) -> RunConfig:
    """The configuration of one run. A strategy's `max_workers` (1 for solo) caps the study's workers."""
    from podium.strategies import find_strategy, make_strategy  # imports torch

    values = {**study.settings, **study.at(name).settings}
    strategy, given = parse_strategy(str(values.get("strategy", RunConfig.strategy)))
    options, lifted = lift(given)
    values.update(lifted)
    values.update(strategy=strategy, strategy_options=options, seed=seed)
    most, workers = find_strategy(strategy).max_workers, int(values.get("workers", RunConfig.workers))
    if most is not None and workers > most:
        values["workers"] = workers = most
        values.pop("shares", None)
    dotted = {name: value for name, value in values.items() if "." in name}
    plain = {name.replace("-", "_"): value for name, value in values.items() if "." not in name}
    config = resolve(None, [f"{name}={as_text(value)}" for name, value in dotted.items()], plain)
    make_strategy(config.strategy, config.strategy_options, workers)
    return config


def nodes_of(config: RunConfig) -> int:
    """The number of machines of a run: its workers, and servers that are not colocated with workers."""
    from podium.strategies import make_strategy

    strategy = make_strategy(config.strategy, config.strategy_options, config.workers)
    return config.workers + int(strategy.server_spec.processes)


def checked(study: Study) -> Study:
    """Check every run's configuration; returns the study with equal threads for all workers."""
    if len(set(study.names)) != len(study.names):
        twice = sorted({name for name in study.names if study.names.count(name) > 1})
        raise ConfigError(f"compare: cells must differ from each other, got {', '.join(twice)} more than once")
    if study.runs != "trainings":
        if study.runs == "sweeps":
            for cell in study.cells:
                sweep_arguments({**study.settings, **cell.settings}, study.seeds[0])
        return study
    study = _with_equal_threads(study)
    configs = [study.config(name, study.seeds[0]) for name in study.names]
    _check_metrics(study, configs)
    return replace(study, plan=_with_common(study.plan, configs))


def _with_common(plan: Plan, configs: Sequence[RunConfig]) -> Plan:
    """The plan with the settings that all runs have in common."""
    names = [cell.cell for cell in plan.cells]
    return replace(
        plan,
        task=_only({config.task for config in configs}),
        workers=_only({config.workers for config in configs if config.strategy != "solo"}),
        launcher=_only({config.launcher for config in configs}),
        same_batch=len({(config.batch_size, config.task_options.get("batch_size")) for config in configs}) == 1,
        clusters={name: _digest(config.cluster) for name, config in zip(names, configs, strict=True)},
    )


def _check_metrics(study: Study, configs: Sequence[RunConfig]) -> None:
    """Refuse responses that no run can have, and tasks that are judged by different metrics.

    Tasks are built only if the checks need them. A task that cannot be built here fails when it is run.
    """
    if study.own_task:
        return
    unknown = [name for name in (*study.responses, study.repeated.response) if not is_response(name)]
    if study.measure is not None:  # it may add any number
        unknown = []
    several = len({config.task for config in configs}) > 1
    judged: dict[str, str] = {}
    seen: list[tuple[Any, ...]] = []
    metrics: set[str] = set()
    all_made = True
    for config in configs:
        kind = (config.task, config.task_options, config.data_dir)  # a task's options may change its metrics
        if kind in seen or not (unknown or (several and config.task not in judged)):
            continue
        seen.append(kind)
        names = _metrics(config)
        all_made &= names is not None
        if names is not None:
            judged.setdefault(config.task, judged_by(names))
            unknown = [name for name in unknown if not is_response(name, names)]
            metrics.update(names)
    if len(set(judged.values())) > 1:
        told = ", ".join(f"{metric} of {task}" for task, metric in judged.items())
        raise ConfigError(
            f"study {study.name}: all tasks must be judged by the same metric, since a study has one target and one "
            f"metric; got {told}. Make a study of each"
        )
    if unknown and all_made:
        raise UnknownName(f"response of study {study.name}:", unknown[0], [TO_TARGET, *known_responses(), *metrics])


def _metrics(config: RunConfig) -> list[str] | None:
    """The names of a task's metrics; None if the task cannot be built here."""
    from podium.task import load_task  # imports torch

    try:
        return list(load_task(config.task, config.task_options, config.data_dir).metrics)
    except (Exception, SystemExit):  # the user's code may raise anything; its runs will report it
        return None


def _with_equal_threads(study: Study) -> Study:
    """Give every worker the same number of threads under every strategy, unless the caller chose one.

    By default a run divides the cores by its ranks, so solo's one worker would get more than the workers of other
    strategies, and the comparison would also be one of threads: on a small model and busy cores two threads took 37
    times as long as one.
    """
    configs = [study.config(name, 0) for name in study.names]
    if {config.launcher for config in configs} != {"local"} or any(config.threads is not None for config in configs):
        return study
    threads = max(1, hardware()["cores"] // max(config.workers for config in configs))
    return replace(study, settings={**study.settings, "threads": threads})


def _digest(path: str | None) -> str | None:
    """A checksum of a file; None if there is none."""
    if path is None or not Path(path).is_file():
        return None
    return f"{zlib.crc32(Path(path).read_bytes()):08x}"


def _only(values: set[Any]) -> Any:
    """The one value that all runs share; None if they differ or there is none."""
    return values.pop() if len(values) == 1 else None
