"""Can these trials be fused? Tested by training a few rows and steps, in float64, against the same trials alone.

The structures that cannot be fused fail in many ways, loudly (a branch on a tensor's value) and silently (a counter in
Python, randomness from a generator, a buffer that is not written to). A list of them would never be complete, so there
is none: parameters, buffers and an evaluation after a few steps are compared with those of each trial trained alone,
and trials that differ by more than rounding are not fused. Rows differ in the options that vary, and each begins one
step after the one before it, as when a new trial takes over a row. A forward pass that keeps changing anything but
parameters and buffers is not fused either: it would change it once for all rows. Nor is one that draws from any
generator. Batches are small, since only the structure is tested; where a model does not take small batches, its own
are used.

One-row arrays (`streams`, captured steps of single trials) get the same test, with two trials one after the other.

`torch.vmap` computes operations without a rule row by row; that is correct and slow, and is reported.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from podium.sweeps.fused.array import Array, Mode
from podium.sweeps.fused.device_data import DeviceData
from podium.sweeps.fused.structure import attributes_key
from podium.sweeps.precision import precision_of
from podium.sweeps.recipe import Recipe
from podium.sweeps.reference import ReferenceTrainer
from podium.sweeps.trial import Evaluation, Trial

TOLERANCE = 1e-9
"""Largest difference, relative to the largest element of the tensor, in float64."""
SINGLE = 1e-3
"""The same where a model cannot be computed in float64 (it converts its input itself)."""
NOISE = 1e-13
"""Gradients below this share of the largest are rounding errors, and so are the parameters' updates."""
NOISY_STATISTICS = 1e-3
"""By how much such parameters may change running statistics: Adam turns rounding errors into whole steps."""
TIMES_ITS_OWN = 4.0
"""How many times further from float64 than the same trial alone a fused one may be in the sweep's own precision …"""
OF_A_STEP = {"fp32": 0.02, "tf32": 0.15, "bf16": 0.5}
"""… besides this share of one step's change. A wrong kernel is off by all of it, low precision in a deep model by a
part, and a library may compute a layer of a single model in higher precision."""
STEPS = 2
"""Steps of the last trial; each trial takes one step more than the next."""
_BATCH = 8
_MOST = 4
"""How many trials are compared."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    fuses: bool
    mode: Mode = "forward"
    why: str = ""
    """Why not."""
    worst: float = 0.0
    """The largest relative difference."""
    looped: Sequence[str] = ()
    """Operations that `vmap` computes row by row."""

    def to_event(self, trials: int) -> dict[str, Any]:
        """The executor's event about this probe."""
        return {"event": "probe", **dataclasses.asdict(self), "trials": trials}


class _Result(NamedTuple):
    state: dict[str, Tensor]
    evaluation: Evaluation | Exception
    silent: frozenset[str] = frozenset()  # parameters whose gradients were never more than rounding
    buffers: frozenset[str] = frozenset()


class _NotFusable(Exception):
    pass


class _Stopped(Exception):
    pass


def probe(
    recipe: Recipe,
    trials: Sequence[Trial],
    device_data: DeviceData,
    *,
    rows: int = 2,
    stop: Callable[[], bool] = lambda: False,
) -> ProbeResult:
    """Train some of these trials (all of one structure) in one array and alone, and compare.

    `rows`: 1 trains them one after another in a single row, more side by side. `stop` is called between steps; True
    ends the probe.
    """
    if device_data.train.why_not:
        return ProbeResult(fuses=False, why=f"the data do not lie on the device: {device_data.train.why_not}")
    said: list[str] = []
    modes: tuple[Mode, ...] = ("forward", "gradient") if rows > 1 else ("forward",)
    for small in (True, False):
        chosen = _chosen(trials, small=small)
        try:
            yardstick = _Yardstick(recipe, chosen, device_data, stop)
        except _Stopped:
            return ProbeResult(fuses=False, why="it was asked to stop before that was known")
        except Exception as error:  # the user's own code, perhaps because of the batch size
            said.append(f"alone, {'small batches' if small else 'its own batches'}: {_first_line(error)}")
            continue
        for mode in modes:
            try:
                found = _compare(yardstick, mode, rows)
                if found.fuses and rows > 1 and yardstick.is_exact and recipe.torch_device.type == "cuda":
                    found = _in_own_precision(recipe, yardstick, device_data, found)
                return found
            except _NotFusable as error:
                said.append(f"{mode}: {error}")
    return ProbeResult(fuses=False, why="; ".join(dict.fromkeys(said)))


def _chosen(trials: Sequence[Trial], *, small: bool) -> list[Trial]:
    """A few trials that differ: the first, and for each option that varies one with another value.

    Where there is only one trial, the same under another seed.
    """
    first, found = trials[0], [trials[0]]
    for name in dict.fromkeys(name for trial in trials for name in trial.options):
        if len(found) < _MOST and all(t.options.get(name) == first.options.get(name) for t in found):
            found += [t for t in trials if t.options.get(name) != first.options.get(name)][:1]
    if len(found) < 2:
        found.append(trials[-1] if len(trials) > 1 else dataclasses.replace(first, seed=first.seed ^ 1))
    return [_small(trial) for trial in found] if small else found


def _small(trial: Trial) -> Trial:
    size = int(trial.options.get("batch_size", _BATCH))
    return dataclasses.replace(trial, options={**trial.options, "batch_size": min(size, _BATCH)})


class _Yardstick:
    """The results of the trials alone: in float64, or in float32 where a model does not run in float64."""

    def __init__(
        self, recipe: Recipe, trials: Sequence[Trial], device_data: DeviceData, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.trials, self.given, self.stop, self.is_exact = trials, device_data, stop, True
        try:
            self._train(recipe, "float64")
        except (RuntimeError, TypeError):
            self.is_exact = False
            self._train(recipe, "float32")

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self.is_exact else SINGLE

    def _train(self, recipe: Recipe, dtype: Any) -> None:
        self.recipe = recipe.varied(dtype=dtype, precision="fp32", steps=None)
        self.device_data = self.given.converted(self.recipe.torch_dtype)
        with precision_of(self.recipe):
            self.results = [self._train_alone(t, steps_of(i, len(self.trials))) for i, t in enumerate(self.trials)]

    def _train_alone(self, trial: Trial, steps: int) -> _Result:
        trainer = ReferenceTrainer(self.recipe, trial, self.device_data)
        largest: dict[str, float] = {}
        for _ in range(steps):
            if self.stop():
                raise _Stopped
            trainer.step()
            for name, p in trainer.model.named_parameters():
                if p.grad is not None and p.grad.numel():
                    largest[name] = max(largest.get(name, 0.0), float(p.grad.to_dense().abs().max()))
        top = max(largest.values(), default=0.0)
        silent = frozenset(name for name, size in largest.items() if size < NOISE * top)
        try:
            evaluation: Evaluation | Exception = trainer.evaluate(_BATCH)
        except Exception as error:  # the user's own code: the array must then raise the same
            evaluation = error
        buffers = frozenset(name for name, _ in trainer.model.named_buffers())
        return _Result(trainer.state(), evaluation, silent, buffers)


def _compare(yardstick: _Yardstick, mode: Mode, rows: int) -> ProbeResult:
    with precision_of(yardstick.recipe):
        fused, looped = _in_an_array(yardstick.recipe, yardstick.trials, yardstick.device_data, mode, STEPS, rows)
    worst, where = 0.0, ""
    for mine, theirs in zip(fused, yardstick.results, strict=True):
        for name in theirs.state.keys() - theirs.silent:
            apart = _apart(mine.state[name], theirs.state[name])
            if name in theirs.buffers and theirs.silent and apart <= NOISY_STATISTICS:
                continue  # statistics of activations that depend on those parameters
            if apart > worst:
                worst, where = apart, name
        apart = _evaluations_apart(mine.evaluation, theirs.evaluation)
        if not theirs.silent and apart > max(worst, 100 * yardstick.tolerance):
            worst, where = apart, "the evaluation"
    if worst > yardstick.tolerance:
        why = f"after {STEPS} steps {where} is {worst:.1e} from the same trial alone (randomness, Python state, …?)"
        return ProbeResult(fuses=False, mode=mode, why=why, worst=worst, looped=looped)
    return ProbeResult(fuses=True, mode=mode, worst=worst, looped=looped)


def _in_own_precision(
    recipe: Recipe, yardstick: _Yardstick, device_data: DeviceData, found: ProbeResult
) -> ProbeResult:
    """Compare one step in the sweep's own precision, with the kernels that it will use on a GPU.

    Rounding errors of low precision differ from layer to layer, so the fused trial is compared with the same trial
    alone in the same precision: it may not be much further from float64.
    """
    trial = yardstick.trials[-1]  # the row that takes one step
    with precision_of(recipe):
        fused, _ = _in_an_array(recipe, yardstick.trials, device_data, found.mode, 1, 2)
        trainer = ReferenceTrainer(recipe, trial, device_data)
        before = trainer.state()
        trainer.step()
    truth = ReferenceTrainer(yardstick.recipe, trial, yardstick.device_data)
    truth.step()
    true_state, own_state = truth.state(), trainer.state()
    for name in dict(trainer.model.named_parameters()):
        moved = float((true_state[name] - before[name].double()).norm())
        its_own = float((own_state[name].double() - true_state[name]).norm())
        apart = float((fused[-1].state[name].double() - true_state[name]).norm())
        rounding = 1e-6 * float(true_state[name].norm())
        if not apart <= TIMES_ITS_OWN * its_own + OF_A_STEP[recipe.precision] * moved + rounding:
            why = (
                f"in {recipe.precision} one step leaves {name} {apart:.1e} from float64, where the same trial alone "
                f"is {its_own:.1e} from it"
            )
            return dataclasses.replace(found, fuses=False, why=why)
    return found


def _in_an_array(
    recipe: Recipe, trials: Sequence[Trial], device_data: DeviceData, mode: Mode, steps: int, rows: int
) -> tuple[list[_Result], list[str]]:
    """The trials' results in an array; each begins one step after the one before it."""
    drawn, failure = _generators(recipe.torch_device), None
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            results = (_side_by_side if rows > 1 else _in_turn)(recipe, trials, device_data, mode, steps)
    except Exception as error:  # any error is the reason not to fuse
        failure = error
    if _generators(recipe.torch_device) != drawn:  # the more likely reason, also where it raised
        raise _NotFusable("it draws from a generator (torch's, Python's or numpy's) that rows would share") from failure
    if isinstance(failure, _NotFusable):
        raise failure
    if failure is not None:
        raise _NotFusable(f"{type(failure).__name__}: {_first_line(failure)}") from failure
    looped = sorted({match[1] for w in heard if (match := _NO_RULE.search(str(w.message)))})
    return results, looped


def _side_by_side(
    recipe: Recipe, trials: Sequence[Trial], device_data: DeviceData, mode: Mode, steps: int
) -> list[_Result]:
    parts, count = [recipe.make(trial) for trial in trials], len(trials)
    array = Array(recipe, parts[0], device_data, count, mode=mode, tells=True)
    python: Any = None
    with _Watching():
        for row, one in enumerate(parts):
            array.load(row, one)
            array.refill([0 if row == i else None for i in range(count)])
            array.step()
            python = python or attributes_key(array.base)  # after the first step, which may create attributes once
        for _ in range(steps - 1):
            array.step()
    evaluations = array.evaluate(range(count), [steps] * count, most=_BATCH)
    _check_python(array, python)
    return [_Result(array.save(row), evaluations[row]) for row in range(count)]


def _in_turn(recipe: Recipe, trials: Sequence[Trial], device_data: DeviceData, mode: Mode, steps: int) -> list[_Result]:
    parts, results = [recipe.make(trial) for trial in trials], []
    array = Array(recipe, parts[0], device_data, 1, mode=mode)
    python: Any = None
    for place, one in enumerate(parts):
        array.load(0, one)
        array.refill([0])
        for _ in range(steps_of(place, len(trials), steps)):
            array.step()
            python = python or attributes_key(array.base)
        results.append(_Result(array.save(0), array.evaluate([0], [steps], most=_BATCH)[0]))
    _check_python(array, python)
    return results


def steps_of(place: int, count: int, steps: int = STEPS) -> int:
    """The steps of the trial at this place when the last trial has taken `steps`."""
    return steps + count - 1 - place


class _Watching(TorchFunctionMode):
    """Raises on embeddings with padding, which `vmap` computes wrongly for all models but the first."""

    def __torch_function__(
        self, function: Any, kinds: Any, args: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        given = named or {}
        if function is torch.nn.functional.embedding and (given.get("padding_idx") is not None or len(args) > 2):
            raise _NotFusable("an embedding with padding_idx that is not an nn.Embedding of the model's own")
        return function(*args, **given)


def _check_python(array: Array, before: Any) -> None:
    for one, two in zip(before, attributes_key(array.base), strict=True):
        if one != two:
            held = {name for name, _ in one[2]} | {name for name, _ in two[2]}
            changed = sorted(name for name in held if dict(one[2]).get(name) != dict(two[2]).get(name))
            place = one[0] or "the model"
            raise _NotFusable(
                f"its forward pass changes what is no parameter and no buffer: {', '.join(changed)} of {place}"
            )


def _generators(device: torch.device) -> tuple[Any, ...]:
    """The states of all generators that a model might draw from."""
    state: Any = np.random.get_state(legacy=True)
    on_device = bytes(torch.cuda.get_rng_state(device).tolist()) if device.type == "cuda" else b""
    return (random.getstate(), state[1].tobytes(), state[2:], torch.get_rng_state().numpy().tobytes(), on_device)


_NO_RULE = re.compile(r"batching rule for (\S+?)[\s.,]")


def _apart(mine: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest element; inf where only one of the two is NaN."""
    if not theirs.numel():
        return 0.0
    one, two = mine.double(), theirs.double()
    alike = (one == two) | (one.isnan() & two.isnan())
    apart = torch.where(alike, 0.0, (one - two).abs())
    if not bool(apart.isfinite().all()):
        return math.inf
    largest = two[two.isfinite()].abs().max() if bool(two.isfinite().any()) else torch.zeros(())
    return float(apart.max()) / max(float(largest), 1e-12)


def _evaluations_apart(mine: Evaluation | Exception, theirs: Evaluation | Exception) -> float:
    if isinstance(mine, Exception) or isinstance(theirs, Exception):
        return 0.0 if type(mine) is type(theirs) else math.inf
    one, two = torch.tensor(mine.loss), torch.tensor(theirs.loss)
    return _apart(one, two)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
