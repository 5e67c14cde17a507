"""Notices before a run begins: rules that cannot fire in it, exchanges that come too late, no overlap.

None of this is an error: the run does what the user asked for. But a reader of its result should know that the rule
under study did not end a phase, or that all-reduce was measured without overlap, which makes it fast.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from podium.data.order import GlobalOrder
from podium.engine.build import Job, open_data
from podium.engine.flat import Flat
from podium.engine.phase_runner import COMPARE_EVERY
from podium.strategies.all_reduce import AllReduce
from podium.strategies.base import Strategy
from podium.strategies.phases import phases_of
from podium.strategies.triggers import format_trigger
from podium.strategies.triggers.base import Course, Outlook
from podium.strategies.triggers.fixed import Fixed
from podium.strategies.triggers.rate import RateDecay
from podium.task import Task

MOST_STEPS = 200_000
"""A schedule is computed beforehand for at most this many steps: some seconds."""
WHOLE = 0.8
"""Where one bucket holds this fraction of the gradients, almost nothing is left to overlap."""
SMALL = 1 << 16
"""Gradients of fewer bytes are not worth cutting: one message's latency is longer than the time saved."""
BUCKETS = 8
"""Number of buckets in the suggested remedy."""


def notices(job: Job) -> list[str]:
    """Notices for the user before this run begins.

    Opens the data where it needs the run's length in steps, and makes a model where it needs its size.
    """
    strategy, config = job.strategy, job.config
    said = []
    if any(phase.until is not None or phase.strategy.cadence.by_rounds for phase in phases_of(strategy)):
        samples = _tried(lambda: len(open_data(job.task, config.workers, job.batch_size).train))
        if samples is not None:
            total = job.total_steps(GlobalOrder(samples, config.seed))
            course = Course(samples, job.batch_size, eval_every=config.eval_every)
            course = course._replace(end=course.position_of(total))
            rates = _tried(lambda: _rates(job.task, total)) if _needs_rates(strategy) else None
            said += rules_that_cannot_fire(strategy, course, config.workers, rates)
            said += _meetings(strategy, total)
    return said + (_tried(lambda: _overlap(job)) or [])


T = TypeVar("T")


def _tried(find: Callable[[], T]) -> T | None:
    """The result of `find`; None where the user's own code raised: the run will raise too, and report where."""
    try:
        return find()
    except Exception:  # a task's functions may raise anything
        return None


def rules_that_cannot_fire(
    strategy: Strategy[Any], course: Course, workers: int, rates: Sequence[float] | None = None
) -> list[str]:
    """One sentence per phase whose rule cannot end it in a run of this length."""
    said = []
    for phase, after in zip(phases_of(strategy), [*phases_of(strategy)[1:], None], strict=True):
        rule = phase.until
        if rule is None:
            break
        compared = COMPARE_EVERY if phase.strategy.cadence.every == "step" else None
        why = rule.never(Outlook(course, workers, compared, rates))
        horizon = min(course.end, rule.horizon(course))
        if why:
            then = f"the phase ends at epoch {horizon / course.samples:.3g} whatever the rule sees"
            if horizon >= course.end:
                follows = "" if after is None else f", and {after.strategy.name} never begins"
                then = f"the phase lasts to the end of the run{follows}"
            name = format_trigger(rule.fitted(course))
            said.append(f"{_name(strategy)}: the rule {name} cannot fire in this run: {why}; {then}")
        # A rule that can fire may fire at once.
        course = course._replace(began=horizon if why or isinstance(rule, Fixed) else course.began)
    return said


def _name(strategy: Strategy[Any]) -> str:
    return str(getattr(strategy, "name", type(strategy).__name__))


def _needs_rates(strategy: Strategy[Any]) -> bool:
    return any(isinstance(phase.until, RateDecay) for phase in phases_of(strategy))


def _rates(task: Task, steps: int) -> list[float] | None:
    """The first group's learning rate at each global step, by the task's own schedule; None where it takes too long."""
    if steps > MOST_STEPS:
        return None
    with torch.random.fork_rng(devices=[]):
        optimizer = task.optimizer(task.model())
        schedule = None if task.schedule is None else task.schedule(optimizer, steps)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the optimizer did not step first
        for _ in range(steps):
            if schedule is not None:
                schedule.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


def _meetings(strategy: Strategy[Any], steps: int) -> list[str]:
    """Strategies whose first exchange would come after the run has ended."""
    said = []
    for phase in phases_of(strategy):
        part = phase.strategy
        period = part.cadence.outer_every or getattr(part, "period", 0)
        if part.cadence.by_rounds and isinstance(period, int) and period > steps:
            said.append(
                f"{_name(part)}: workers exchange every {period} steps, and the run has {steps}: they exchange only at "
                "its end"
            )
    return said


def _overlap(job: Job) -> list[str]:
    """A notice for all-reduce over modelled or shaped links where one bucket holds nearly all gradients."""
    config, first = job.config, phases_of(job.strategy)[0].strategy
    if config.workers < 2 or config.launcher not in ("virtual", "shaped") or not isinstance(first, AllReduce):
        return []
    if not first.overlap:
        return []
    with torch.random.fork_rng(devices=[]):
        model = job.task.model()
        flat = Flat(model, job.task.optimizer(model), job.strategy.bucket_bytes)
    sizes = [bucket.nbytes for bucket in flat.buckets]
    if len(flat.pieces) < 2 or sum(sizes) < SMALL or max(sizes) < WHOLE * sum(sizes):
        return []
    smaller = sum(sizes) // BUCKETS
    return [
        f"{_name(first)}: {max(sizes) / 1e6:.3g} of {sum(sizes) / 1e6:.3g} MB of gradients leave in one bucket, so "
        f"their exchange does not overlap the backward pass; bucket_bytes={smaller} would let it"
    ]
