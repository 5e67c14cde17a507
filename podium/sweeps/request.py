"""The user's request for a sweep, as frozen values: where points come from, how each trial is trained, and the rest."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from podium.errors import ConfigError, UnknownName
from podium.sweeps.executors.base import Executor
from podium.sweeps.fingerprint import TaskLike, function_of
from podium.sweeps.recipe import Precision, Recipe
from podium.sweeps.search import make_source
from podium.sweeps.search.base import Source
from podium.sweeps.search.listed import PointList, read_points
from podium.sweeps.search.space import Choices, Space, read_space
from podium.sweeps.search.sweep_folds import FoldsLike
from podium.sweeps.stopping.base import Stopping
from podium.sweeps.trial import Trial
from podium.task import Task

SpaceLike = Space | Mapping[str, Any] | Sequence[str] | None
Keep = Literal["all", "best", "none"]


@dataclass(frozen=True, kw_only=True)
class PointsRequest:
    """Where points come from. `source` makes a new source at each call."""

    task: TaskLike
    grid: SpaceLike = None
    space: SpaceLike = None
    random: int | None = None
    optuna: int | None = None
    trials: str | Path | Sequence[Mapping[str, Any]] | None = None
    search: str | Source | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        ways = [name for name in ("random", "optuna", "trials", "search") if getattr(self, name) is not None]
        if len(ways) > 1:
            raise ConfigError(f"sweep: points must come from one place, got {' and '.join(ways)}")
        if self.trials is not None and self.whole:
            raise ConfigError(f"sweep: trials have their own options, and take no grid, got {', '.join(self.whole)}")

    @functools.cached_property
    def whole(self) -> Space:
        """The grid and the space together."""
        grid, space = read_space(self.grid), read_space(self.space)
        for name in grid:
            if name in space:
                raise ConfigError(f"sweep: {name} must be given once, got it in the grid and in the space")
        lists = list_options(self.task)
        return Space({n: _as_lists(d) if n in lists else d for n, d in {**grid, **space}.items()})

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]] | None:
        """The points of `trials`, as a list."""
        if self.trials is None:
            return None
        given = read_points(Path(self.trials)) if isinstance(self.trials, str | Path) else self.trials
        return [with_lists(row, self.task) for row in given]

    @property
    def names(self) -> set[str]:
        """Options that may differ between points."""
        return {*self.whole, *(name for row in self.rows or () for name in row)}

    def source(self, *, maximize: bool = False, seeds: Sequence[int] = (0,), folds: int | None = None) -> Source:
        how: str | Source | None = self.search
        if self.rows is not None:
            how = PointList(rows=self.rows)
        elif how is None:
            how = "random" if self.random is not None else "optuna" if self.optuna is not None else "grid"
        points = self.random if self.random is not None else self.optuna
        space = None if isinstance(how, Source) else self.whole
        return make_source(how, space, points=points, seed=self.seed, maximize=maximize, seeds=seeds, folds=folds)

    def to_dict(self) -> dict[str, Any]:
        own = isinstance(self.search, Source)
        how = type(self.search).__name__ if own else self.search
        found: dict[str, Any] = {"how": how, "own": own, "space": self.whole.texts(), "seed": self.seed}
        named = {"random": self.random, "optuna": self.optuna, "trials": self.rows}
        return found | {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """How every trial is trained."""

    options: Mapping[str, Any] | None = None
    epochs: int | None = None
    batch_size: int | None = None
    data_dir: str | None = None
    device: str = "auto"
    precision: Precision = "fp32"
    eval_every: int = 1
    steps: int | None = None

    def recipe(self, points: PointsRequest) -> Recipe:
        named = ("data_dir", "device", "precision", "eval_every", "steps")
        settings = {name: getattr(self, name) for name in named}
        return Recipe(task=_absolute(points.task), options=self._shared_options(points), **settings)

    def _shared_options(self, points: PointsRequest) -> dict[str, Any]:
        """Options of all trials."""
        given = with_lists(self.options or {}, points.task)
        for name, value in (("epochs", self.epochs), ("batch_size", self.batch_size)):
            if value is None:
                continue
            if name in given:
                raise ConfigError(f"sweep: {name} must be given once, got it among the options, too")
            given[name] = value
        for name in given:
            if name in points.whole:
                raise ConfigError(f"sweep: {name} must hold for all trials or be searched, got both")
        return given


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """All arguments of `podium.sweep` but `out`, `on_event` and `stop`."""

    task: TaskLike
    points: PointsRequest
    training: TrainingRequest
    seeds: int | Sequence[int] = 1
    folds: FoldsLike = None
    executor: str | Executor = "auto"
    stopping: str | Stopping | None = None
    metric: str | None = None
    maximize: bool | None = None
    keep: Keep = "best"

    def __post_init__(self) -> None:
        if self.keep not in get_args(Keep):
            raise UnknownName("way to keep models", self.keep, get_args(Keep))

    @classmethod
    def of(cls, task: TaskLike, **asked: Any) -> SweepRequest:
        """From the keywords of `podium.sweep`."""

        def part(kind: type) -> dict[str, Any]:
            return {field.name: asked.pop(field.name) for field in dataclasses.fields(kind) if field.name in asked}

        points, training = PointsRequest(task=task, **part(PointsRequest)), TrainingRequest(**part(TrainingRequest))
        return cls(task=task, points=points, training=training, **asked)

    @property
    def task_name(self) -> str:
        if isinstance(self.task, str):
            return self.task
        return (
            self.task.name if isinstance(self.task, Task) else getattr(self.task, "__name__", type(self.task).__name__)
        )

    @property
    def seed_list(self) -> tuple[int, ...]:
        given = self.seeds
        seeds = tuple(range(int(given))) if isinstance(given, int | np.integer) else tuple(map(int, given))
        for seed in seeds:
            Trial(number=0, seed=seed)  # raises if the seed is invalid
        return seeds


def list_options(task: TaskLike) -> set[str]:
    """Options of the task that are lists, for which a single value means a list of one."""
    from podium.tasks import TASKS

    if isinstance(task, Task) or (isinstance(task, str) and ":" not in task and task not in TASKS):
        return set()  # an unknown name raises where the task is made
    try:
        hints = typing.get_type_hints(function_of(task))
    except (NameError, TypeError):
        return set()
    return {name for name, hint in hints.items() if typing.get_origin(hint) in (list, tuple, Sequence)}


def with_lists(options: Mapping[str, Any], task: TaskLike) -> dict[str, Any]:
    """These options, with single values as lists where the task wants lists."""
    lists = list_options(task)
    return {name: _as_list(value) if name in lists else value for name, value in options.items()}


def _as_lists(dimension: Any) -> Any:
    return Choices(tuple(map(_as_list, dimension.values))) if isinstance(dimension, Choices) else dimension


def _as_list(value: Any) -> Any:
    """`64` to `[64]`; text with commas is left to the task, which splits it."""
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else value


def _absolute(task: TaskLike) -> TaskLike:
    """A task in a file by its whole path: the task's own code may change the working directory."""
    if isinstance(task, str) and (place := task.rpartition(":")[0]).endswith(".py"):
        return f"{Path(place).absolute()}:{task.rpartition(':')[2]}"
    return task
