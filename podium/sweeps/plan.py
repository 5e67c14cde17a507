"""What a sweep was asked for, made and checked: recipe, source of trials, stopping rule and executor.

All that can be refused is refused here, before a folder is made: names that nobody knows, values that no point can
have, rules that the executor cannot follow.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from podium.config import build, parse_strategy
from podium.data.base import ArrayDataset, Dataset
from podium.errors import ConfigError, DataError, PodiumError, TrainingError, UnknownName
from podium.imports import find_class
from podium.records.metrics import lower_is_better
from podium.sweeps import EXECUTORS
from podium.sweeps.executors.base import Executor
from podium.sweeps.fingerprint import TaskLike, describe_data, describe_source, function_of
from podium.sweeps.queue import Keep
from podium.sweeps.recipe import Folds, Recipe
from podium.sweeps.search import make_source
from podium.sweeps.search.base import Source
from podium.sweeps.search.crossed import Crossed
from podium.sweeps.search.folds import default_kind, make_folds, read_folds
from podium.sweeps.search.listed import Listed, read_points
from podium.sweeps.search.space import Choices, Space, read_space
from podium.sweeps.stopping import make_stopping
from podium.sweeps.stopping.base import Stopping
from podium.sweeps.trial import Trial
from podium.task import Task

SpaceLike = Space | Mapping[str, Any] | Sequence[str] | None
FoldsLike = int | str | Sequence[tuple[Any, Any]] | Any | None

_CHUNK = 4096


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A sweep that can begin: everything made and checked, nothing written or trained."""

    recipe: Recipe
    source: Source
    stopping: Stopping
    executor: Executor
    why: str
    """Why the executor is another one than was asked for; empty when it is not."""
    config: dict[str, Any]
    """What was asked for, as the manifest has it."""

    def to_dict(self) -> dict[str, Any]:
        return {**self.config, "total": self.source.total}


def plan(
    task: TaskLike = "digits-mlp",
    *,
    seeds: int | Sequence[int] = 1,
    folds: FoldsLike = None,
    seed: int = 0,
    executor: str | Executor = "auto",
    stopping: str | Stopping | None = None,
    metric: str | None = None,
    maximize: bool | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    options: Mapping[str, Any] | None = None,
    keep: Keep = "best",
    **others: Any,
) -> Plan:
    """What `sweep` of the same arguments would do; all that can be refused is refused here."""
    if keep not in get_args(Keep):
        raise UnknownName("way to keep models", keep, get_args(Keep))
    points = {f.name: others.pop(f.name, None) for f in dataclasses.fields(_Asked) if f.name not in ("task", "seed")}
    asked = _Asked(task=task, seed=seed, **points)
    shared = _shared_options(options, epochs, batch_size, asked)
    recipe = Recipe(task=_placed(task), options=shared, **{"eval_every": 1, **others})
    rule = make_stopping(stopping, space=asked.whole or None)
    way, why = _fit_for(make_executor(executor), rule, executor)
    check = getattr(way, "check", None)
    if check is not None:
        check(recipe)
    chosen_seeds = _seeds(seeds)
    first = _first_that_can_be(recipe, asked)
    _check_names(recipe, asked)
    metric, maximize = _aim(recipe, first, metric, maximize)
    _check_direction(asked.search, maximize)
    made = make_the_folds(recipe, first, folds, seed)
    source = asked.source(maximize=maximize, seeds=chosen_seeds, folds=None if made is None else len(made.folds))
    if isinstance(source, Crossed):
        chosen_seeds = source.seeds  # one that was made already has its own
    per_point = len(chosen_seeds) * (1 if made is None else len(made.folds))
    rule.check(epochs=_epochs(recipe, asked, first), eval_every=recipe.eval_every, per_point=per_point)
    config = {
        "task": _task_name(task), "own_task": not isinstance(task, str), "options": shared,
        "data_dir": recipe.data_dir, "search": asked.to_dict(), "seeds": list(chosen_seeds),
        "folds": None if made is None else made.to_dict(), "metric": metric, "maximize": maximize,
        "stopping": _told(stopping or "none"), "precision": recipe.precision,
        "eval_every": recipe.eval_every, "steps": recipe.steps,
        "executor": _told(executor), "device": recipe.device, "keep": keep,
        "copies": rule.copies, "source": describe_source(recipe.task), "data": _data(recipe, first),
    }  # fmt: skip
    return Plan(
        recipe=recipe if made is None else dataclasses.replace(recipe, folds=made.folds),
        source=source, stopping=rule, executor=way, why=why, config=config,
    )  # fmt: skip


def make_executor(given: str | Executor) -> Executor:
    """From `name[:key=value,…]`, as `fused:width=32,compiled=true`; an instance is itself."""
    if isinstance(given, Executor):
        return given
    name, options = parse_strategy(given, "executor")
    cls = find_class("executor", name, {"auto": "podium.sweeps.executors.auto:Auto", **EXECUTORS})
    if not issubclass(cls, Executor):
        raise ConfigError(f"{name} must be an executor class, got {cls!r}")
    return build(cls, options, who=f"executor {name}")


# What was asked for.


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Where points come from, in the caller's words; makes the source of them, as often as is wanted."""

    task: TaskLike
    grid: SpaceLike
    space: SpaceLike
    random: int | None
    optuna: int | None
    trials: str | Path | Sequence[Mapping[str, Any]] | None
    search: str | Source | None
    seed: int

    def __post_init__(self) -> None:
        ways = [name for name in ("random", "optuna", "trials", "search") if getattr(self, name) is not None]
        if len(ways) > 1:
            raise ConfigError(f"sweep: points must come from one place, got {' and '.join(ways)}")
        if self.trials is not None and self.whole:
            raise ConfigError(f"sweep: trials have their own options, and take no grid, got {', '.join(self.whole)}")

    @functools.cached_property
    def whole(self) -> Space:
        """What is searched, in the grid and in the space."""
        grid, space = read_space(self.grid), read_space(self.space)
        for name in grid:
            if name in space:
                raise ConfigError(f"sweep: {name} must be given once, got it in the grid and in the space")
        lists = _list_options(self.task)
        return Space({n: _as_lists(d) if n in lists else d for n, d in {**grid, **space}.items()})

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]] | None:
        """The points that somebody wrote down."""
        if self.trials is None:
            return None
        given = read_points(Path(self.trials)) if isinstance(self.trials, str | Path) else self.trials
        lists = _list_options(self.task)
        return [{n: _as_list(v) if n in lists else v for n, v in row.items()} for row in given]

    def source(self, *, maximize: bool = False, seeds: Sequence[int] = (0,), folds: int | None = None) -> Source:
        how: str | Source | None = self.search
        if self.rows is not None:
            how = Listed(rows=self.rows)
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


def _list_options(task: TaskLike) -> set[str]:
    """Options of the task that are lists: one value alone is then a list of one."""
    from podium.tasks import TASKS

    if isinstance(task, Task) or (isinstance(task, str) and ":" not in task and task not in TASKS):
        return set()  # an unknown name is refused where the task is made
    try:
        hints = typing.get_type_hints(function_of(task))
    except (NameError, TypeError):
        return set()
    return {name for name, hint in hints.items() if typing.get_origin(hint) in (list, tuple, Sequence)}


def _as_lists(dimension: Any) -> Any:
    return Choices(tuple(map(_as_list, dimension.values))) if isinstance(dimension, Choices) else dimension


def _as_list(value: Any) -> Any:
    """`64` to `[64]`; text with commas is left to the task, which splits it."""
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else value


def _shared_options(
    options: Mapping[str, Any] | None, epochs: int | None, batch_size: int | None, asked: _Asked
) -> dict[str, Any]:
    lists = _list_options(asked.task)
    given = {name: _as_list(value) if name in lists else value for name, value in (options or {}).items()}
    for name, value in (("epochs", epochs), ("batch_size", batch_size)):
        if value is None:
            continue
        if name in given:
            raise ConfigError(f"sweep: {name} must be given once, got it among the options, too")
        given[name] = value
    for name in given:
        if name in asked.whole:
            raise ConfigError(f"sweep: {name} must hold for all trials or be searched, got both")
    return given


def _first_that_can_be(recipe: Recipe, asked: _Asked) -> Trial:
    """The first trial that can be made: what is wrong with all of them is said before anything is written.

    A name that nobody knows is refused at once; a value that one point cannot have is that point's own failure.
    """
    if isinstance(asked.search, Source):
        return Trial(number=0)
    source = asked.source()
    error: PodiumError | None = None
    while (trial := source.ask()) is not None:
        try:
            recipe.make(trial)
            return trial
        except (UnknownName, DataError):
            raise
        except PodiumError as found:
            error = error or found
        except Exception as found:  # the user's own code may raise anything
            made = TrainingError(f"trial {trial.number}: {type(found).__name__}: {found}")
            made.__cause__ = found
            error = error or made
    raise error or ConfigError("sweep: there must be at least one trial, got none")


def _check_names(recipe: Recipe, asked: _Asked) -> None:
    """A name that nobody knows is refused in whatever row of a list it stands, not when its turn comes."""
    known: set[frozenset[str]] = set()
    for number, row in enumerate(asked.rows or ()):
        if frozenset(row) not in known:
            try:
                recipe.make(Trial(number=number, options=row))
                known.add(frozenset(row))
            except UnknownName:
                raise
            except Exception:  # a value that this one cannot have is its own failure
                continue


def _seeds(given: int | Sequence[int]) -> tuple[int, ...]:
    seeds = tuple(range(int(given))) if isinstance(given, int | np.integer) else tuple(map(int, given))
    for seed in seeds:
        Trial(number=0, seed=seed)  # refuses what no trial can have
    return seeds


def _epochs(recipe: Recipe, asked: _Asked, first: Trial) -> int | None:
    """Of every trial; None where they may differ."""
    names = {*asked.whole, *(name for row in asked.rows or () for name in row)}
    differ = isinstance(asked.search, Source) or "epochs" in names or recipe.steps is not None
    return None if differ else recipe.task_of(first).epochs


def _aim(recipe: Recipe, first: Trial, metric: str | None, maximize: bool | None) -> tuple[str, bool]:
    known = list(recipe.task_of(first).metrics)
    if metric is not None and metric not in ("loss", *known):
        raise UnknownName("metric", metric, ["loss", *known])
    chosen = metric or ("accuracy" if "accuracy" in known else [*known, "loss"][0])
    return chosen, not lower_is_better(chosen, maximize)


def _data(recipe: Recipe, first: Trial) -> dict[str, Any] | None:
    """What is trained on, to be known again; None where it cannot be read, as trials will say."""
    try:
        return describe_data(recipe.data_of(recipe.task_of(first)))
    except Exception:  # the user's own code may raise anything
        return None


def _check_direction(search: str | Source | None, maximize: bool) -> None:
    """A source that was made already has its own mind of which way is better."""
    inner = search.points if isinstance(search, Crossed) else search
    theirs = getattr(inner, "maximize", maximize)
    if isinstance(inner, Source) and theirs != maximize:
        words = ["minimize", "maximize"]
        raise ConfigError(
            f"search: a {type(inner).__name__} of this sweep must {words[maximize]}, got one to {words[theirs]}; "
            f"make it with maximize={maximize}"
        )


@dataclass(frozen=True, kw_only=True)
class MadeFolds:
    """The folds of a sweep, and what is written down of them."""

    kind: str
    folds: Folds
    asked: str | None = None
    """As text, where it was one."""

    def to_dict(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for part in (part for pair in self.folds for part in pair):
            digest.update(np.ascontiguousarray(part).tobytes() + b"/")
        overlap = float(np.mean([len(valid) / len(train) for train, valid in self.folds]))
        facts = {"asked": self.asked, "kind": self.kind, "count": len(self.folds)}
        return {**facts, "overlap": overlap, "digest": digest.hexdigest()[:16]}


def make_the_folds(recipe: Recipe, first: Trial, given: FoldsLike, seed: int) -> MadeFolds | None:
    """From a number, a text, a splitter, or pairs of index arrays; None of None."""
    if given is None:
        return None
    given = int(given) if isinstance(given, np.integer) else given
    if isinstance(given, list | tuple):
        given = _Given(given)
    targets = targets_of(recipe.data_of(recipe.task_of(first)).train)
    if not isinstance(given, int | str):
        return MadeFolds(kind=type(given).__name__.strip("_").lower(), folds=make_folds(given, targets, 0, seed=seed))
    spec = read_folds(given)
    kind = spec.kind or default_kind(targets, spec.n_splits)
    found = make_folds(kind, targets, spec.n_splits, seed=seed, repeats=spec.repeats)
    return MadeFolds(kind=kind, folds=found, asked=str(given))


class _Given:
    """Folds that somebody made, as a splitter."""

    def __init__(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._pairs = pairs

    def split(self, x: Any, y: Any, groups: Any) -> Iterator[tuple[Any, Any]]:
        return iter(self._pairs)


def targets_of(data: Dataset) -> np.ndarray:
    """What is true of each sample; zeros where it is no tensor, which no stratification can go by."""
    if isinstance(data, ArrayDataset):
        return np.asarray(data.targets)
    parts = []
    for start in range(0, len(data), _CHUNK):
        _, targets = data.gather(np.arange(start, min(start + _CHUNK, len(data))))
        if not isinstance(targets, torch.Tensor):
            return np.zeros(len(data))
        parts.append(targets.numpy())
    return np.concatenate(parts)


def _fit_for(executor: Executor, rule: Stopping, asked: str | Executor) -> tuple[Executor, str]:
    """The executor, or `fused` in place of `auto` where rows must be copied; then, why."""
    if not rule.copies:
        return executor, ""
    if isinstance(asked, str) and parse_strategy(asked)[0] == "auto":
        return make_executor("fused"), f"{rule.name} copies trials onto each other, which only rows of an array can be"
    if not executor.copies_rows:
        able = "auto or fused"
        raise ConfigError(
            f"stopping {rule.name}: copies trials onto each other, so executor must be {able}, got {executor.name}"
        )
    return executor, ""


def _told(given: Any) -> str:
    return given if isinstance(given, str) else repr(given)


def _placed(task: TaskLike) -> TaskLike:
    """A task in a file by its whole path: the task's own code may change the working directory."""
    if isinstance(task, str) and (place := task.rpartition(":")[0]).endswith(".py"):
        return f"{Path(place).absolute()}:{task.rpartition(':')[2]}"
    return task


def _task_name(task: TaskLike) -> str:
    if isinstance(task, str):
        return task
    return task.name if isinstance(task, Task) else getattr(task, "__name__", type(task).__name__)
