"""Start a run: from a configuration to a result, through whichever launcher it names."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import logging
import multiprocessing
import os
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from podium.balance import balancer_of
from podium.balance.steal import Steal
from podium.config import LIFTED, RunConfig, RunResult, build, check_script, lift, parse_spec, parse_strategy
from podium.engine.build import Job
from podium.engine.checkpoint import find_checkpoint
from podium.engine.files import write_atomically
from podium.engine.training import Report
from podium.errors import ConfigError, RecordError, as_request
from podium.exchange.codecs import CODECS
from podium.exchange.codecs.auto import AutoCodec
from podium.exchange.collectives import collective_of
from podium.exchange.reducing import make_packing
from podium.launch.base import Event, Launcher, Plan, Planned
from podium.launch.ending import termination_saves
from podium.launch.notices import notices
from podium.launch.run_folder_lock import claimed, refuse_taken
from podium.records.manifest import read_manifest, write_manifest
from podium.records.recorder import merge_records, read_records, to_json
from podium.records.summary import Summary
from podium.strategies import STRATEGIES, make_strategy
from podium.strategies.base import Strategy
from podium.task import Task, load_task
from podium.tasks import takes_data_dir

_OPENED: set[tuple[str, str, str]] = set()
"""The data that were opened by `check_data`: a comparison asks for the same many times."""
_LAUNCHERS = {
    "local": "podium.launch.local:run_local",
    "threads": "podium.launch.inprocess:run_threads",
    "virtual": "podium.launch.inprocess:run_virtual",
    "shaped": "podium.launch.shaped:run_shaped",
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
    """Train a task under a strategy and return what came of it.

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

    Setting `stop` lets all workers finish the step, save and return. So does SIGTERM or SIGHUP, where the caller takes
    neither; then SystemExit is raised, since the program was told to end.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError("a rank came to podium.train while importing the script that started it: guard the call")
    job = prepare(config, task)
    assert job.run_dir is not None
    with claimed(job.run_dir):
        return _launch_in(job.run_dir, job, on_event, stop)


def _launch_in(
    run_dir: Path, job: Job, on_event: Callable[[Event], None] | None, stop: threading.Event | None
) -> RunResult:
    """The run, in a folder that is its own."""
    config = job.config
    write_manifest(run_dir, config.to_dict(), strategy=repr(job.strategy))
    tell = on_event or _silent
    servers = job.strategy.server_count
    tell({"event": "start", "run_dir": str(run_dir), "workers": config.workers, "servers": servers})
    warn(job.warnings, on_event)
    said = notices(job)
    for text in said:
        tell({"event": "notice", "text": text})
        if on_event is None:
            logging.getLogger("podium").warning(text)

    def hear(event: Event) -> None:
        if event["event"] == "warning":  # a rank's, from its first step
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


def warn(texts: Sequence[str], on_event: Callable[[Event], None] | None) -> None:
    """Tell whoever listens to events, or else whoever called."""
    for text in texts:
        if on_event is not None:
            on_event({"event": "warning", "text": text})
        else:
            warnings.warn(text, RuntimeWarning, stacklevel=5)


def conclude(
    job: Planned, reports: Sequence[Report], launcher: str | None = None, notices: Sequence[str] = ()
) -> RunResult:
    """What the run came to, from its merged records; also written beside them as `result.json`.

    `launcher` names who started the ranks where it is not the configuration's; `notices` is what was said beforehand.
    """
    config, run_dir = job.config, job.run_dir
    assert run_dir is not None
    summary = Summary(scratch=run_dir)
    for row in read_records(run_dir):
        summary.add(row)
    silent = sorted({report.rank for report in reports} - summary.ended)
    if silent and launcher is None:  # ranks that others start may be on hosts whose records stay there
        listed = ", ".join(map(str, silent))
        raise RecordError(
            f"{run_dir}: the records of rank {listed} do not tell of its end, though it has reported it: were files "
            "removed while the run was under way?"
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
    write_atomically(run_dir / "result.json", to_json(result.to_dict()).encode())
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

    The first worker's output goes to the terminal, the others' to their logs. `given`: fields of `config` that were
    named, if only by their default.
    """
    from podium.engine.loop import run_user_script
    from podium.launch.local import Processes
    from podium.launch.rendezvous import rendezvous_folder

    check_script(config)
    plan = plan_script(dataclasses.replace(config, task=script))
    run_dir, strategy = plan.run_dir, plan.strategy
    assert run_dir is not None
    with claimed(run_dir), rendezvous_folder() as folder:
        write_manifest(run_dir, plan.config.to_dict(), strategy=repr(strategy), script=script, args=list(args))
        body = functools.partial(run_user_script, script=script, args=tuple(args), given=tuple(given))
        processes = Processes(plan, folder, on_event, body=body)
        processes.show_output_of(0)
        with termination_saves(stop) as asked, merged_afterwards(run_dir):
            processes.run(asked)
    return 0


@contextmanager
def merged_afterwards(run_dir: Path) -> Iterator[None]:
    """Merge the ranks' records whatever happens; what went wrong before outranks what goes wrong here."""
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


def plan_script(config: RunConfig, *, chosen: Path | None = None) -> Plan:
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
    return Plan(dataclasses.replace(config, run_dir=str(run_dir)), strategy, run_dir)


def prepare(config: RunConfig, task: Task | None = None, *, chosen: Path | None = None) -> Job:
    """Check all that can be checked before anything starts, and choose the run's folder.

    `chosen` is the folder where another rank of the same run has chosen it already. Nothing is started or written yet,
    so all that is wrong is wrong with the request.
    """
    with as_request():
        return _prepare(config, task, chosen)


def _prepare(config: RunConfig, task: Task | None, chosen: Path | None) -> Job:
    strategy = check(config)
    run_dir = chosen or choose_run_dir(config)
    if config.launcher == "shaped" and config.cluster is None:
        raise ConfigError("launcher shaped needs a cluster file: --cluster FILE")
    if config.replay is not None and config.launcher != "virtual":
        raise ConfigError(f"replay runs in virtual time: launcher must be 'virtual', got {config.launcher!r}")
    saved = None if config.resume is None else find_checkpoint(Path(config.resume))
    if saved is not None:  # all ranks are to take the same one, whatever becomes of the folder meanwhile
        config = dataclasses.replace(config, resume=str(saved.path))
    found = task or load_task(config.task, config.task_options, config.data_dir)
    if task is None and chosen is None:
        check_data(config, found)
    full = resolved(config, found, run_dir)
    if found.weigh is not None and isinstance(balancer_of(full), Steal):
        raise ConfigError(
            f"task {found.name}: what a step weighs is not known to workers that draw from it: "
            "balance=steal cannot go with weigh; use equal-finish"
        )
    if full.replay is not None:
        strategy = _as_recorded(strategy, Path(full.replay))
        _check_replay(full, strategy, Path(full.replay))
    told = () if saved is None else saved.warnings
    return Job(full, found, strategy, run_dir, task_is_named=task is None, warnings=told)


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


def foreseen(config: RunConfig) -> list[str]:
    """What would be said before this run: as `RunResult.notices` has it afterwards."""
    task = load_task(config.task, config.task_options, config.data_dir)
    return notices(Job(config, task, check(config)))


def _as_recorded(strategy: Strategy[Any], recorded_dir: Path) -> Strategy[Any]:
    """The strategy with what the recorded run left to its world, such as the size of its messages."""
    asked = read_manifest(recorded_dir)["strategy"]
    for candidate in (strategy.as_recorded(True), strategy.as_recorded(False)):
        if repr(candidate) == asked:  # it was a replay itself, and says so
            return candidate
    begins = (row for row in read_records(recorded_dir) if row["kind"] == "begin" and row["role"] == "worker")
    return strategy.as_recorded(next(begins, {}).get("shares_memory", False)) if repr(strategy) == asked else strategy


def _check_replay(config: RunConfig, strategy: Strategy[Any], recorded_dir: Path) -> None:
    """A recorded order can only be followed by the run that was recorded."""
    manifest = read_manifest(recorded_dir)
    recorded, now = manifest["config"], json.loads(to_json(config.to_dict()))
    asked = make_strategy(config.strategy, config.strategy_options, config.workers)
    if manifest["strategy"] not in (repr(strategy), repr(asked)):
        recorded, now = {**recorded, "strategy": manifest["strategy"]}, {**now, "strategy": repr(asked)}
    if isinstance(make_packing(config.codec).codec, AutoCodec):
        raise ConfigError("replay: codec auto chose by what it measured; name the codec that it chose")
    decisive = ("task", "task_options", "strategy", "codec", "workers", "seed", "epochs", "steps")
    for name in (*decisive, "batch_size", "accumulate", "clip_norm", "autocast", "checkpoint_every", "resume"):
        before = recorded.get(name, now[name])  # a setting may be younger than the record
        if name == "resume" and before is not None and now[name] is not None:
            before = str(find_checkpoint(Path(before), verified=False).path)  # older records name the run's folder
        if before != now[name]:
            raise ConfigError(
                f"replay of {recorded_dir}: {name} must be as recorded ({recorded[name]!r}), got {now[name]!r}"
            )


def resolved(config: RunConfig, task: Task, run_dir: Path) -> RunConfig:
    """The configuration with nothing left open: what it does not say, the task does."""
    by_task = ("epochs", "batch_size", "accumulate", "clip_norm", "autocast", "buffers")
    open_ = {name: getattr(task, name) for name in by_task if getattr(config, name) is None}
    return dataclasses.replace(config, run_dir=str(run_dir), **open_)


def check(config: RunConfig) -> Strategy[Any]:
    """The strategy, if it can run with this many workers and their shares."""
    strategy: Strategy[Any] = make_strategy(config.strategy, config.strategy_options, config.workers)
    check_packing(config, strategy)
    check_phases(config, strategy)
    collective_of(config)
    check_balance(config, strategy)
    return strategy


def check_balance(config: RunConfig, strategy: Strategy[Any]) -> None:
    """Refuse a division of work that has no meaning here."""
    balancer, who = balancer_of(config), label_of(config.strategy, strategy)
    parts = [phase.strategy for phase in strategy.phases if phase.strategy.feed == "step"]
    leased = "its workers lease samples as they come for them, or have numbers of steps of their own"
    if config.shares is not None and strategy.feed != "step":
        raise ConfigError(f"{who}: {leased}, so shares must not be set, got {config.shares}")
    if not parts and balancer.name != "equal" and config.shares is None:
        raise ConfigError(
            f"{who}: {leased} (steps=speed), so there is nothing to balance, got balance={config.balance}"
        )
    if isinstance(balancer, Steal):
        drawn = [part for part in parts if not part.by_rounds and (part.sums_gradients or part.server_count)]
        if not drawn or any(part.exchanges and not part.by_rounds and part not in drawn for part in parts):
            raise ConfigError(
                f"{who}: balance=steal needs steps that all workers make together (all-reduce, parameter-server with "
                "mode=sync); use equal-finish, or steps=speed"
            )


def check_phases(config: RunConfig, strategy: Strategy[Any]) -> None:
    """Refuse what would only come to light when its phase begins."""
    for phase in strategy.phases:
        spec = phase.codec or config.codec
        if phase.strategy.exchanges and not phase.strategy.packs and not make_packing(spec).codec.exact:
            raise ConfigError(f"{phase.text}: what it sends cannot be packed, got codec={spec}")
        if getattr(phase.until, "on", "") == "validation" and config.eval_every == 0:
            raise ConfigError(f"{phase.text}: its rule looks at validations, and eval_every=0 makes none")
        if 0 < config.checkpoint_every < phase.strategy.outer_every:
            raise ConfigError(
                f"{phase.text}: a checkpoint ends a round early, so checkpoint_every must be 0 or at least "
                f"{phase.strategy.outer_every} steps, got {config.checkpoint_every}"
            )


def check_packing(config: RunConfig, strategy: Strategy[Any]) -> None:
    """Refuse a codec that does not exist, or that servers could not be told of."""
    codec = make_packing(config.codec).codec
    if not isinstance(codec, AutoCodec):
        return
    for spec in codec.candidates:
        make_packing(spec)
        if strategy.server_count and parse_spec(spec)[0] not in CODECS:
            raise ConfigError(f"codec auto: {spec} is not one of Podium's own, so workers could not tell servers of it")


def choose_run_dir(config: RunConfig) -> Path:
    """The folder that was asked for, unless a run is in it already; a new one where none was."""
    if not config.run_dir:
        return new_run_dir(config)
    run_dir = Path(config.run_dir)
    refuse_taken(run_dir)
    return run_dir


def new_run_dir(config: RunConfig) -> Path:
    """A folder name that tells what it holds and is taken by nobody."""
    what = Path(config.task.partition(":")[0]).stem
    strategy = config.strategy.rpartition(":")[2]
    return Path(config.out) / f"{what}-{strategy}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def label_of(name: str, strategy: Strategy[Any], config: RunConfig | None = None) -> str:
    """The strategy's name and what differs from the default, as `parameter-server(mode=async)`."""
    options = []
    if config is not None and strategy.exchanges:
        options = [f"{k}={getattr(config, k)}" for k in LIFTED if getattr(config, k) != getattr(RunConfig, k)]
    filled = {} if config is None else _filled_in(strategy, config.workers)
    for field in dataclasses.fields(strategy):  # type: ignore[arg-type]  # all strategies are dataclasses
        value, make = getattr(strategy, field.name), field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        if value not in (default, filled.get(field.name, default)):
            options.append(f"{field.name}={value}")
    return f"{name}({', '.join(options)})" if options else name


def _filled_in(strategy: Strategy[Any], workers: int) -> dict[str, Any]:
    """What a strategy's defaults become once the number of workers is known."""
    try:
        plain = type(strategy)()
    except TypeError:  # an option without a default: nothing else is filled in then
        return {}
    return dataclasses.asdict(plain.for_workers(workers))  # type: ignore[call-overload,no-any-return]  # all strategies are dataclasses


def name_of(strategy: Strategy[Any]) -> str:
    """How other processes can find this strategy's class."""
    cls = type(strategy)
    for name, place in STRATEGIES.items():
        if place == f"{cls.__module__}:{cls.__qualname__}":
            return name
    module = cls.__module__
    if module == "__main__":
        module = str(getattr(sys.modules["__main__"], "__file__", "__main__"))
    return f"{module}:{cls.__qualname__}"


def _instead(value: object) -> str:
    """What came in place of a Task or Strategy, and how to make one of it."""
    if isinstance(value, type):
        return "a class; make an instance"
    return "a function; call it" if callable(value) else repr(value)


def _find_launcher(name: str) -> Launcher:
    place, _, function = _LAUNCHERS[name].partition(":")
    return getattr(importlib.import_module(place), function)  # type: ignore[no-any-return]  # a Launcher, by the table


def _silent(_event: Event) -> None:
    pass
