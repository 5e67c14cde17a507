"""A study's design: which strategies, which seeds, in which order, and where it was run.

Each block holds every strategy once, with one seed, in an order drawn from a fixed seed. A machine that slows down over
the minutes then slows all strategies, not the one that happened to come last.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import podium
from podium.config import RunConfig, build, lift, parse_strategy
from podium.errors import ConfigError
from podium.measure.manifest import git_commit, hardware, versions
from podium.study.store import Key

ORDER_SEED = 20_240_501
"""Fixes the order of runs; any number would do, as long as it stays the same."""

SAME = ("task", "strategies", "seeds", "workers", "launcher", "target", "settings")
"""What must agree for a study to be gone on with."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """What a comparison was asked to do; written to `study.json` before the first run."""

    task: str
    strategies: tuple[str, ...]
    seeds: tuple[int, ...]
    workers: int
    launcher: str
    target: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of RunConfig that hold for all runs."""
    own_task: bool = False
    """Whether the caller handed over a Task object, which its name alone does not bring back."""

    def __post_init__(self) -> None:
        for name, values in (("strategies", self.strategies), ("seeds", self.seeds)):
            if not values:
                raise ConfigError(f"compare: {name} must name at least one, got none")
            if len(set(values)) != len(values):
                raise ConfigError(f"compare: {name} must differ from each other, got {', '.join(map(str, values))}")

    def order(self) -> list[Key]:
        """All runs, block by block."""
        draw = random.Random(ORDER_SEED)
        keys = []
        for seed in self.seeds:
            block = list(self.strategies)
            draw.shuffle(block)
            keys += [(cell, seed) for cell in block]
        return keys

    def config(self, cell: str, seed: int) -> RunConfig:
        """The configuration of one run. Solo is one worker by nature, whatever the others get."""
        from podium.strategies import find_strategy, make_strategy  # imports torch

        name, given = parse_strategy(cell)
        options, lifted = lift(given)
        values, workers = dict(self.settings), self.workers
        most = find_strategy(name).max_workers
        if most is not None and workers > most:
            workers = most
            values.pop("shares", None)
        make_strategy(name, options, workers)
        values.update(task=self.task, strategy=name, strategy_options=options)
        values.update(lifted)
        values.update(workers=workers, launcher=self.launcher, seed=seed)
        return build(RunConfig, values, who="compare")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "order": [{"cell": cell, "seed": seed} for cell, seed in self.order()]}


def make_design(
    task: str, strategies: Sequence[str], seeds: int | Sequence[int], settings: Mapping[str, Any], **fields: Any
) -> Design:
    """A design from what a caller wrote; every run's configuration is checked before the first one starts."""
    if isinstance(strategies, str):
        raise ConfigError(f"compare: strategies must be a list of texts, got the text {strategies!r}")
    chosen = range(seeds) if isinstance(seeds, int) else seeds
    for name in ("strategy", "strategy_options", "run_dir", "out", "seed", "resume"):
        if name in settings:
            raise ConfigError(f"compare: {name} differs from run to run and cannot be set for all of them")
    labels = tuple(label(text) for text in strategies)
    design = Design(task=task, strategies=labels, seeds=tuple(chosen), settings=dict(settings), **fields)
    design = _with_equal_threads(design)
    for cell, seed in design.order():
        design.config(cell, seed)
    return design


def _with_equal_threads(design: Design) -> Design:
    """Give every worker the same number of threads, whichever strategy it runs under, unless the caller chose.

    Left to itself a run divides the cores by its ranks, so that solo's one worker would get more of them than the
    others' workers. The comparison would then be of threads too: on a small model and busy cores we saw two threads
    take 37 times as long as one.
    """
    if design.launcher != "local" or design.settings.get("threads") is not None:
        return design
    threads = max(1, hardware()["cores"] // design.workers)
    return replace(design, settings={**design.settings, "threads": threads})


def label(strategy: str) -> str:
    """A strategy's text in one spelling, so that the same one is recognised again."""
    name, options = parse_strategy(strategy)
    if not name:
        raise ConfigError(f"compare: a strategy needs a name, got {strategy!r}")
    return f"{name}:{','.join(f'{k}={v}' for k, v in options.items())}" if options else name


def check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: str) -> None:
    """Refuse to mix two designs in one folder."""
    for name in SAME:
        if found.get(name) != wanted.get(name):
            raise ConfigError(
                f"compare: {folder} holds another study, with {name} {found.get(name)!r}; wanted {wanted.get(name)!r}. "
                "Give another folder, or ask for the same study to go on with it"
            )


def surroundings() -> dict[str, Any]:
    """Versions, hardware and commit, for the reader who wants to repeat it."""
    machine = hardware()
    machine["memory_gb"] = round(machine.pop("memory_bytes") / 1e9, 1)
    used = {"podium": podium.__version__, **versions()}
    for package in ("scipy", "statsmodels"):
        used[package] = metadata.version(package)
    return {"versions": used, "hardware": machine, "commit": git_commit(Path(podium.__file__).parent)}
