"""Start a run: from a configuration to a result, through the launcher it names."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from podium.config import ON_HOSTS, RunConfig, RunResult, build, check_script, lift, parse_strategy
from podium.engine.build import Job
from podium.engine.report import Report
from podium.errors import ConfigError, RecordError
from podium.launch.base import Launcher, RunPlan, ScriptPlan
from podium.launch.ending import termination_saves
from podium.launch.event import Event
from podium.launch.labels import label_of, name_of
from podium.launch.notices import notices
from podium.launch.prepare import place_job, plan_script, resolve_job
from podium.launch.run_folder_lock import claimed
from podium.records.disk import write_atomically
from podium.records.manifest import write_manifest
from podium.records.recorder import merge_records, read_records, to_json
from podium.records.summary import Summary
from podium.strategies.base import Strategy
from podium.task import Task

_LAUNCHERS = {
    "local": "podium.launch.local:run_local",
    "threads": "podium.launch.inprocess:run_threads",
    "virtual": "podium.launch.inprocess:run_virtual",
    "shaped": "podium.launch.shaped:run_shaped",
    "ssh": "podium.launch.hosts.launcher:run_job",
    "slurm": "podium.launch.hosts.launcher:run_job",
    "ray": "podium.launch.hosts.launcher:run_job",
}


def train(
    task: str | Task = "digits-mlp",
    *,
    strategy: str | Strategy[Any] = "all-reduce",
    workers: int = 1,
    on_event: Callable[[Event], None] | None = None,
    stop: threading.Event | None = None,
    **options: Any,
) -> RunResult:
    """Train a task under a strategy and return the result.

    `task` is a built-in name, `file.py:function` or a Task; `strategy` a name (with `name:key=value`) or an instance.
    `options` are the other fields of `RunConfig`. A Task object that cannot be pickled runs in threads and in virtual
    time; for processes, name its function instead.
    """
    if not isinstance(task, str | Task):
        raise ConfigError(f"train: task must be a name or a Task, got {_instead(task)}")
    if not isinstance(strategy, str | Strategy):
        raise ConfigError(f"train: strategy must be a name or a Strategy, got {_instead(strategy)}")
    if isinstance(strategy, Strategy):
        name, given = name_of(strategy), dataclasses.asdict(strategy)  # type: ignore[call-overload]  # all strategies are dataclasses
    else:
        name, given = parse_strategy(strategy)
    given, lifted = lift({**given, **options.pop("strategy_options", {})})
    options = {**lifted, **options}
    spec = task if isinstance(task, str) else task.name
    asked = {"task": spec, "strategy": name, "strategy_options": given, "workers": workers, **options}
    config = build(RunConfig, {k: os.fspath(v) if isinstance(v, Path) else v for k, v in asked.items()}, who="train")
    return launch(config, task=None if isinstance(task, str) else task, on_event=on_event, stop=stop)


def launch(
    config: RunConfig,
    *,
    task: Task | None = None,
    on_event: Callable[[Event], None] | None = None,
    stop: threading.Event | None = None,
) -> RunResult:
    """Run this configuration to its end; records and model stay in its folder.

    Setting `stop` lets all workers finish the step, save and return. So does SIGTERM or SIGHUP, unless the caller
    handles it; then SystemExit is raised, since the program was asked to end.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError("a rank came to podium.train while importing the script that started it: guard the call")
    return launch_job(resolve_job(config, task), on_event=on_event, stop=stop)


def launch_job(
    job: Job, *, on_event: Callable[[Event], None] | None = None, stop: threading.Event | None = None
) -> RunResult:
    """`launch` for a configuration that is already resolved."""
    if is_batch_job(job.config):
        return _launch_as_batch_job(job, on_event, stop)
    job = place_job(job)
    assert job.run_dir is not None
    with claimed(job.run_dir):
        return _launch_in(job.run_dir, job, on_event, stop)


def is_batch_job(config: RunConfig) -> bool:
    """Whether this process submits the run, and others, inside an allocation of SLURM's, start its ranks."""
    return config.launcher == "slurm" and "SLURM_JOB_ID" not in os.environ


def _launch_as_batch_job(job: Job, on_event: Callable[[Event], None] | None, stop: threading.Event | None) -> RunResult:
    from podium.launch.hosts.sbatch import BatchJob, run_as_batch_job

    submission = run_as_batch_job(BatchJob(job), _notify(on_event), stop)
    result = submission.result()
    if result is None:
        raise RecordError(
            f"job {submission.number} has ended well, and its folder, {submission.run_dir}, is on a disk of its first "
            f"node that this machine does not see; its output: {submission.output}"
        )
    return result


def _launch_in(
    run_dir: Path, job: Job, on_event: Callable[[Event], None] | None, stop: threading.Event | None
) -> RunResult:
    config = job.config
    write_manifest(run_dir, config.to_dict(), strategy=repr(job.strategy))
    tell = on_event or _silent
    servers = job.strategy.server_spec.count
    tell({"event": "start", "run_dir": str(run_dir), "workers": config.workers, "servers": servers})
    warn(job.warnings, on_event)
    said = notices(job)
    for text in said:
        _notify(on_event)(text)

    def hear(event: Event) -> None:
        if event["event"] == "warning":  # from a rank, in its first step
            said.append(event["text"])
            if on_event is None:
                logging.getLogger("podium").warning(event["text"])
        tell(event)

    launcher = _find_launcher(config.launcher)
    with termination_saves(stop) as asked:
        with merged_afterwards(run_dir):
            launched = launcher(job, hear, asked)
        if launched.facts:
            write_manifest(run_dir, config.to_dict(), strategy=repr(job.strategy), **launched.facts)
        result = conclude(job, launched.reports, notices=(*job.warnings, *said))
        tell({"event": "end", "status": result.status})
    return result


def _notify(on_event: Callable[[Event], None] | None) -> Callable[[str], None]:
    """Pass notices to `on_event` where there is one, else to `logging`."""
    if on_event is None:
        return logging.getLogger("podium").warning
    return lambda text: on_event({"event": "notice", "text": text})


def warn(texts: Sequence[str], on_event: Callable[[Event], None] | None) -> None:
    """Pass warnings to `on_event` where there is one, else to `warnings`."""
    for text in texts:
        if on_event is not None:
            on_event({"event": "warning", "text": text})
        else:
            warnings.warn(text, RuntimeWarning, stacklevel=5)


def conclude(
    job: RunPlan, reports: Sequence[Report], launcher: str | None = None, notices: Sequence[str] = ()
) -> RunResult:
    """The run's result, from its merged records; also written beside them as `result.json`.

    `launcher`: what started the ranks, where it is not the configuration's; `notices`: the notices before the run.
    """
    config, run_dir = job.config, job.run_dir
    assert run_dir is not None
    summary = Summary(scratch=run_dir)
    for row in read_records(run_dir):
        summary.add(row)
    silent = sorted({report.rank for report in reports} - summary.ended)
    if silent and launcher is None:  # under another launcher, ranks may be on hosts where their records stay
        listed = ", ".join(map(str, silent))
        raise RecordError(
            f"{run_dir}: the records of rank {listed} have no `end`, though it has reported one: were files removed "
            "while the run was under way?"
        )
    result = RunResult(
        run_dir=str(run_dir),
        status="stopped" if any(report.stopped for report in reports) else "finished",
        task=config.task,
        strategy=label_of(config.strategy, job.strategy, config),
        workers=config.workers,
        seed=config.seed,
        launcher=launcher or config.launcher,
        model=str(run_dir / "model.safetensors"),
        notices=tuple(notices),
        **summary.result(),
    )
    write_atomically(run_dir / "result.json", to_json(result.to_dict()), durable=True)
    return result


def run_script(
    config: RunConfig,
    script: str,
    args: Sequence[str] = (),
    on_event: Callable[[Event], None] | None = None,
    stop: threading.Event | None = None,
    given: Collection[str] = (),
) -> int:
    """Run the user's own script, which calls `podium.join`, on every rank; returns its exit code.

    The first worker's output goes to the terminal, the other workers' to their logs. `given`: fields of `config` that
    the user set, even to their default.
    """
    check_script(config)
    plan = plan_script(dataclasses.replace(config, task=script), place=not is_batch_job(config))
    if is_batch_job(config):
        from podium.launch.hosts.sbatch import BatchJob, run_as_batch_job

        run_as_batch_job(BatchJob(plan, script, tuple(args), frozenset(given)), _notify(on_event), stop)
        return 0
    run_dir, about = plan.run_dir, {"strategy": repr(plan.strategy), "script": script, "args": list(args)}
    assert run_dir is not None
    with claimed(run_dir):
        write_manifest(run_dir, plan.config.to_dict(), **about)
        with termination_saves(stop) as asked:
            with merged_afterwards(run_dir):
                facts = _run_ranks_of_script(plan, script, args, given, on_event, asked)
            if facts:
                write_manifest(run_dir, plan.config.to_dict(), **about, **facts)
    return 0


def _run_ranks_of_script(
    plan: ScriptPlan,
    script: str,
    args: Sequence[str],
    given: Collection[str],
    on_event: Callable[[Event], None] | None,
    stop: threading.Event,
) -> dict[str, Any]:
    """Run the script on every rank; returns the launcher's facts for the manifest."""
    if plan.config.launcher in ON_HOSTS:
        from podium.launch.hosts.launcher import run_on_hosts, starter_for

        named = {"path": script, "args": list(args), "given": sorted(given)}
        return run_on_hosts(plan, starter_for(plan, on_event, stop), on_event, stop, script=named).facts
    from podium.launch.join import run_user_script
    from podium.launch.local import Meeting, Processes
    from podium.launch.rank_processes import RankProcesses
    from podium.launch.rendezvous import rendezvous_folder

    with rendezvous_folder() as folder:
        body = functools.partial(run_user_script, script=script, args=tuple(args), given=tuple(given))
        processes = Processes(plan, RankProcesses(body), Meeting.in_folder(folder), on_event, runs_script=True)
        processes.show_output_of(0)
        processes.run(stop)
    return {}


@contextmanager
def merged_afterwards(run_dir: Path) -> Iterator[None]:
    """Merge the ranks' records in any case; an error inside takes precedence over one of the merge."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(RecordError):
            _merge(run_dir)
        raise
    _merge(run_dir)


def _merge(run_dir: Path) -> None:
    if not (run_dir / "records").is_dir():  # every launcher has made it
        raise RecordError(f"{run_dir}: the run's folder, or its records, were removed while the run was under way")
    merge_records(run_dir)


def _instead(value: object) -> str:
    """What the caller passed instead of a Task or Strategy, and how to fix it."""
    if isinstance(value, type):
        return "a class; make an instance"
    return "a function; call it" if callable(value) else repr(value)


def _find_launcher(name: str) -> Launcher:
    place, _, function = _LAUNCHERS[name].partition(":")
    return getattr(importlib.import_module(place), function)  # type: ignore[no-any-return]  # a Launcher, by the table


def _silent(_event: Event) -> None:
    pass
