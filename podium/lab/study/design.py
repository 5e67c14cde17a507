"""A study's design: which cells, which seeds, in which order, and where it was run.

Each block holds every cell once, with one seed, in an order drawn from a fixed seed. A machine that slows down over the
minutes then slows all cells, not the one that happened to come last.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import podium
from podium.config import RunConfig, lift, parse_strategy, resolve
from podium.errors import ConfigError, UnknownName
from podium.lab.stats.factorial import Level
from podium.lab.study.responses import TO_TARGET, is_response, known_responses
from podium.lab.study.rows import judged_by
from podium.lab.study.store import Key
from podium.records.manifest import git_commit, hardware, versions

ORDER_SEED = 20_240_501
"""Fixes the order of runs; any number would do, as long as it stays the same."""

SAME = ("name", "cells", "replications", "settings", "target", "stop", "order_seed", "clusters")
"""What must agree for a study to be gone on with."""
TOLD = ("question", "notes", "reference", "responses", "baseline", "retries", "maximize", "changes")
"""What may have been changed since: it is about how results are told, or how hard failures are fought."""


@dataclass(frozen=True)
class Cell:
    """One combination of levels, and the settings that it comes to (over the study's own)."""

    cell: str
    """Its name, by which its rows are found."""
    levels: Mapping[str, Level]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Replications:
    """How often each cell is run: from `least` seeds on, until its mean is known well enough, `most` at most.

    Precision, not significance, decides: a rule that stops at the first small p finds differences that are not there.
    """

    least: int = 3
    most: int = 3
    half_width: float | None = None
    """Go on until every cell's 95 % interval of `response` reaches no further than this share of its mean."""
    response: str = "seconds"
    listed: tuple[int, ...] = ()
    """The seeds themselves, where they are not 0, 1, 2 …"""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"replications: 1 ≤ least ≤ most must hold, got {self.least} and {self.most}")
        if self.half_width is not None and not self.half_width > 0:
            raise ConfigError(f"replications: half_width must be above 0, got {self.half_width}")
        if self.half_width is None and self.least != self.most:
            raise ConfigError(
                f"replications: from {self.least} to {self.most} needs half_width, the precision to go on for"
            )
        if self.listed and len(set(self.listed)) != self.most:
            raise ConfigError(f"replications: {self.most} seeds must differ, got {', '.join(map(str, self.listed))}")

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds that may come."""
        return self.listed or tuple(range(self.most))


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Ends a run before its epochs are through: at the first validation with one of these reached."""

    seconds: float | None = None
    """Of training, on the run's own clock."""
    target: bool = False
    """Whether the study's target ends a run."""

    def __post_init__(self) -> None:
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"stop: seconds must be above 0, got {self.seconds}")


NO_STOP = Stop()
"""Runs go to the end of their epochs or steps."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """What a comparison was asked to do; written to `study.json` before the first run."""

    name: str
    cells: tuple[Cell, ...]
    factors: Mapping[str, tuple[Level, ...]]
    replications: Replications
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of all runs, in the words of `--set`."""
    question: str = ""
    target: float | None = None
    maximize: bool | None = None
    """Whether the metric is better when higher; None goes by its name."""
    stop: Stop = NO_STOP
    retries: int = 1
    responses: tuple[str, ...] = ()
    order_seed: int = ORDER_SEED
    kind: str = "full"
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of a fraction: effects that cannot be told apart."""
    resolution: int | None = None
    baseline: Mapping[str, Level] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reference: tuple[Mapping[str, Any], ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What was asked for over the file: `settings`, `seeds`, `target`."""
    file: str = ""
    """The study file that it was read from, and its size."""
    size: str = ""
    own_task: bool = False
    """Whether the caller handed over a Task object, which its name alone does not bring back."""

    @property
    def names(self) -> list[str]:
        return [cell.cell for cell in self.cells]

    def blocks(self) -> list[list[Key]]:
        """All runs that may come, block by block; each seed is one."""
        draw = random.Random(self.order_seed)
        blocks = []
        for seed in self.replications.seeds:
            names = self.names
            draw.shuffle(names)
            blocks.append([(name, seed) for name in names])
        return blocks

    def order(self) -> list[Key]:
        """All runs that may come, in order."""
        return [key for block in self.blocks() for key in block]

    def at(self, name: str) -> Cell:
        return next(cell for cell in self.cells if cell.cell == name)

    def config(self, name: str, seed: int) -> RunConfig:
        """The configuration of one run. Solo is one worker by nature, whatever the others get."""
        from podium.strategies import find_strategy, make_strategy  # imports torch

        values = {**self.settings, **self.at(name).settings}
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

    def nodes(self, config: RunConfig) -> int:
        """Machines that a run takes: its workers, and servers that have no worker beside them."""
        from podium.strategies import make_strategy

        strategy = make_strategy(config.strategy, config.strategy_options, config.workers)
        return config.workers + (0 if strategy.colocated else strategy.server_count)

    def to_dict(self) -> dict[str, Any]:
        configs = [self.config(name, self.replications.seeds[0]) for name in self.names]
        return {
            **asdict(self),
            "task": _only({config.task for config in configs}),
            "workers": _only({config.workers for config in configs if config.strategy != "solo"}),
            "launcher": _only({config.launcher for config in configs}),
            "same_batch": len({(config.batch_size, config.task_options.get("batch_size")) for config in configs}) == 1,
            "clusters": {name: _digest(config.cluster) for name, config in zip(self.names, configs, strict=True)},
            "seeds": list(self.replications.seeds),
            "order": [{"cell": cell, "seed": seed} for cell, seed in self.order()],
        }


def check_runs(design: Design) -> Design:
    """The design, once every run's configuration has been checked and every worker has as many threads as any other."""
    if len(set(design.names)) != len(design.names):
        twice = sorted({name for name in design.names if design.names.count(name) > 1})
        raise ConfigError(f"compare: cells must differ from each other, got {', '.join(twice)} more than once")
    design = _with_equal_threads(design)
    configs = [design.config(name, design.replications.seeds[0]) for name in design.names]
    _check_metrics(design, configs)
    return design


def _check_metrics(design: Design, configs: Sequence[RunConfig]) -> None:
    """Refuse responses that no run can have, and tasks that are judged by different metrics.

    Tasks are made only where the answer depends on them. One that cannot be made here has its say when it is run.
    """
    if design.own_task:
        return
    unknown = [name for name in (*design.responses, design.replications.response) if not is_response(name)]
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
            f"study {design.name}: all tasks must be judged by the same metric, since a study has one target and one "
            f"metric; got {told}. Make a study of each"
        )
    if unknown and all_made:
        raise UnknownName(f"response of study {design.name}:", unknown[0], [TO_TARGET, *known_responses(), *metrics])


def _metrics(config: RunConfig) -> list[str] | None:
    """The names of a task's metrics; None where it cannot be made here."""
    from podium.task import load_task  # imports torch

    try:
        return list(load_task(config.task, config.task_options, config.data_dir).metrics)
    except (Exception, SystemExit):  # the user's own code may raise anything; runs will say what
        return None


def _with_equal_threads(design: Design) -> Design:
    """Give every worker the same number of threads, whichever strategy it runs under, unless the caller chose.

    Left to itself a run divides the cores by its ranks, so that solo's one worker would get more of them than the
    others' workers. The comparison would then be of threads too: on a small model and busy cores we saw two threads
    take 37 times as long as one.
    """
    configs = [design.config(name, 0) for name in design.names]
    if {config.launcher for config in configs} != {"local"} or any(config.threads is not None for config in configs):
        return design
    threads = max(1, hardware()["cores"] // max(config.workers for config in configs))
    return replace(design, settings={**design.settings, "threads": threads})


def strategies_design(
    task: str, strategies: Sequence[str], seeds: int | Sequence[int], settings: Mapping[str, Any], **fields: Any
) -> Design:
    """The design of a comparison of strategies alone; every run's configuration is checked before the first starts."""
    if isinstance(strategies, str):
        raise ConfigError(f"compare: strategies must be a list of texts, got the text {strategies!r}")
    for name in ("strategy", "strategy_options", "run_dir", "out", "seed", "resume"):
        if name in settings:
            raise ConfigError(f"compare: {name} differs from run to run and cannot be set for all of them")
    labels = tuple(label(text) for text in strategies)
    chosen = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    for what, values in (("strategies", labels), ("seeds", chosen)):
        if not values:
            raise ConfigError(f"compare: {what} must name at least one, got none")
        if len(set(values)) != len(values):
            raise ConfigError(f"compare: {what} must differ from each other, got {', '.join(map(str, values))}")
    design = Design(
        name=task,
        cells=tuple(Cell(text, {"strategy": text}, {"strategy": text}) for text in labels),
        factors={"strategy": labels},
        replications=Replications(least=len(chosen), most=len(chosen), listed=() if isinstance(seeds, int) else chosen),
        settings={"task": task, **settings},
        **fields,
    )
    return check_runs(design)


def label(strategy: str) -> str:
    """A strategy's text in one spelling, so that the same one is recognised again."""
    name, options = parse_strategy(strategy)
    if not name:
        raise ConfigError(f"compare: a strategy needs a name, got {strategy!r}")
    return f"{name}:{','.join(f'{k}={v}' for k, v in options.items())}" if options else name


def check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: str) -> None:
    """Refuse to mix two designs in one folder."""
    found, wanted = _comparable(found), _comparable(wanted)
    # Which way is better is a matter of telling, unless runs were ended by it.
    ended = bool((wanted.get("stop") or {}).get("target"))
    for name in (*SAME, *(["maximize"] if ended else [])):
        if found.get(name) != wanted.get(name):
            what, old, new = _difference(name, found.get(name), wanted.get(name))
            raise ConfigError(
                f"compare: {folder} holds another study, with {what} {old!r}; wanted {new!r}. "
                "Give another folder, or ask for the same study to go on with it"
            )


def _comparable(study: Mapping[str, Any]) -> dict[str, Any]:
    """A study as it is compared: a cluster counts by what its file says, not by where it lies."""

    def without(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if name != "cluster"}

    cells = [{**cell, "settings": without(cell["settings"])} for cell in study["cells"]]
    return {**study, "cells": cells, "settings": without(study["settings"])}


def _difference(name: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """Where two values differ: of two tables, only the first key at which they do."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        key = next(key for key in (*new, *old) if old.get(key) != new.get(key))
        return f"{name}: {key}", old.get(key), new.get(key)
    if isinstance(old, list) and isinstance(new, list):
        pair = next(((a, b) for a, b in zip(old, new, strict=False) if a != b), (len(old), len(new)))
        return name, *pair
    return name, old, new


def surroundings() -> dict[str, Any]:
    """Versions, hardware and commit, for the reader who wants to repeat it."""
    machine = hardware()
    machine["memory_gb"] = round(machine.pop("memory_bytes") / 1e9, 1)
    used = {"podium": podium.__version__, **versions()}
    for package in ("scipy", "statsmodels"):
        used[package] = metadata.version(package)
    return {"versions": used, "hardware": machine, "commit": git_commit(Path(podium.__file__).parent)}


def _digest(path: str | None) -> str | None:
    """A checksum of what a file says; None where there is none."""
    if path is None or not Path(path).is_file():
        return None
    return f"{zlib.crc32(Path(path).read_bytes()):08x}"


def as_text(value: Any) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(as_text, value))
    return "none" if value is None else str(value)


def _only(values: set[Any]) -> Any:
    """What all runs have in common; None where they differ, or where there is none."""
    return values.pop() if len(values) == 1 else None
