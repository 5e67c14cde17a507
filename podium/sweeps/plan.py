"""The plan of a sweep: recipe, source of trials, stopping rule and executor, made and checked.

Errors in a request are raised here, before a folder is made: unknown names, values that no point can have, rules that
the executor cannot follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from podium.config import build, parse_strategy
from podium.errors import ConfigError, DataError, PodiumError, TrainingError, UnknownName
from podium.imports import find_class
from podium.records.metrics import lower_is_better
from podium.sweeps import EXECUTORS
from podium.sweeps.executors.base import Executor
from podium.sweeps.fingerprint import TaskLike, describe_data, describe_source
from podium.sweeps.recipe import Recipe
from podium.sweeps.request import PointsRequest, SweepRequest
from podium.sweeps.search.base import Source
from podium.sweeps.search.crossed import CrossedSource
from podium.sweeps.search.sweep_folds import SweepFolds, make_sweep_folds
from podium.sweeps.stopping import make_stopping
from podium.sweeps.stopping.base import Stopping
from podium.sweeps.trial import Trial


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A sweep that can begin: everything made and checked, nothing written or trained."""

    recipe: Recipe
    source: Source
    stopping: Stopping
    executor: Executor
    why: str
    """Why the executor is not the one that the user named; empty when it is."""
    config: dict[str, Any]
    """The user's request, as the manifest has it."""

    def to_dict(self) -> dict[str, Any]:
        return {**self.config, "total": self.source.total}


def plan(task: TaskLike = "digits-mlp", **asked: Any) -> Plan:
    """The plan of `podium.sweep` with the same keywords. Raises whatever is wrong with them."""
    request = SweepRequest.of(task, **asked)
    points, recipe = request.points, request.training.recipe(request.points)
    rule = make_stopping(request.stopping, space=points.whole or None)
    executor, why = _executor_for(rule, request.executor)
    executor.check(recipe)
    seeds = request.seed_list
    first = _first_possible(recipe, points)
    _check_names(recipe, points)
    metric, maximize = _aim(recipe, first, request)
    _check_direction(points.search, maximize)
    folds = None
    if request.folds is not None:
        folds = make_sweep_folds(request.folds, recipe.data_of(recipe.task_of(first)).train, points.seed)
        recipe = recipe.varied(folds=folds.folds)
    source = points.source(maximize=maximize, seeds=seeds, folds=None if folds is None else len(folds.folds))
    if isinstance(source, CrossedSource):
        seeds = source.seeds  # a source that the user made has its own seeds
    per_point = len(seeds) * (1 if folds is None else len(folds.folds))
    rule.check(epochs=_epochs(recipe, points, first), eval_every=recipe.eval_every, per_point=per_point)
    config = _config(request, recipe, folds, first) | {
        "seeds": list(seeds), "metric": metric, "maximize": maximize, "copies": rule.copies,
    }  # fmt: skip
    return Plan(recipe=recipe, source=source, stopping=rule, executor=executor, why=why, config=config)


def _config(request: SweepRequest, recipe: Recipe, folds: SweepFolds | None, first: Trial) -> dict[str, Any]:
    """The request as the manifest has it. Values that are None here are filled in by `plan`, which keeps the order."""
    return {
        "task": request.task_name, "own_task": not isinstance(request.task, str), "options": recipe.options,
        "data_dir": recipe.data_dir, "search": request.points.to_dict(), "seeds": None,
        "folds": None if folds is None else folds.to_dict(), "metric": None, "maximize": None,
        "stopping": _as_text(request.stopping or "none"), "precision": recipe.precision,
        "eval_every": recipe.eval_every, "steps": recipe.steps,
        "executor": _as_text(request.executor), "device": recipe.device, "keep": request.keep,
        "copies": None, "source": describe_source(recipe.task), "data": _data(recipe, first),
    }  # fmt: skip


def make_executor(given: str | Executor) -> Executor:
    """From `name[:key=value,…]`, as `fused:width=32,compiled=true`; an instance is returned as it is."""
    if isinstance(given, Executor):
        return given
    name, options = parse_strategy(given, "executor")
    cls = find_class("executor", name, EXECUTORS)
    if not issubclass(cls, Executor):
        raise ConfigError(f"{name} must be an executor class, got {cls!r}")
    return build(cls, options, who=f"executor {name}")


def _executor_for(rule: Stopping, asked: str | Executor) -> tuple[Executor, str]:
    """The executor and "", or `fused` in place of `auto` where rows must be copied, and why."""
    executor = make_executor(asked)
    if not rule.copies:
        return executor, ""
    if isinstance(asked, str) and parse_strategy(asked)[0] == "auto":
        return make_executor("fused"), f"{rule.name} copies trials onto each other, which only rows of an array can be"
    if not executor.copies_rows:
        raise ConfigError(
            f"stopping {rule.name}: copies trials onto each other, so executor must be auto or fused, got "
            f"{executor.name}"
        )
    return executor, ""


def _first_possible(recipe: Recipe, points: PointsRequest) -> Trial:
    """The first trial that can be built: an error that all trials share is raised before anything is written.

    An unknown name raises at once; a value that one point cannot have fails that point only.
    """
    if isinstance(points.search, Source):
        return Trial(number=0)
    source = points.source()
    error: PodiumError | None = None
    while (trial := source.ask()) is not None:
        try:
            recipe.give_back(recipe.make(trial))
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


def _check_names(recipe: Recipe, points: PointsRequest) -> None:
    """Raise an unknown name in any row of a list now, not when its trial starts."""
    known: set[frozenset[str]] = set()
    for number, row in enumerate(points.rows or ()):
        if frozenset(row) not in known:
            try:
                recipe.make(Trial(number=number, options=row))
                known.add(frozenset(row))
            except UnknownName:
                raise
            except Exception:  # a wrong value fails this trial only
                continue


def _epochs(recipe: Recipe, points: PointsRequest, first: Trial) -> int | None:
    """The epochs of every trial; None where trials may differ."""
    differ = isinstance(points.search, Source) or "epochs" in points.names or recipe.steps is not None
    return None if differ else recipe.task_of(first).epochs


def _aim(recipe: Recipe, first: Trial, request: SweepRequest) -> tuple[str, bool]:
    """The metric, and whether more of it is better."""
    known, metric = list(recipe.task_of(first).metrics), request.metric
    if metric is not None and metric not in ("loss", *known):
        raise UnknownName("metric", metric, ["loss", *known])
    chosen = metric or ("accuracy" if "accuracy" in known else [*known, "loss"][0])
    return chosen, not lower_is_better(chosen, request.maximize)


def _data(recipe: Recipe, first: Trial) -> dict[str, Any] | None:
    """The data's fingerprint; None where they cannot be read: then the trials will report it."""
    try:
        return describe_data(recipe.data_of(recipe.task_of(first)))
    except Exception:  # the user's own code may raise anything
        return None


def _check_direction(search: str | Source | None, maximize: bool) -> None:
    """A source that the user made has its own direction, which must be the sweep's."""
    inner = search.points if isinstance(search, CrossedSource) else search
    theirs = getattr(inner, "maximize", maximize)
    if isinstance(inner, Source) and theirs != maximize:
        words = ["minimize", "maximize"]
        raise ConfigError(
            f"search: a {type(inner).__name__} of this sweep must {words[maximize]}, got one to {words[theirs]}; "
            f"make it with maximize={maximize}"
        )


def _as_text(given: Any) -> str:
    return given if isinstance(given, str) else repr(given)
