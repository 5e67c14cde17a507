"""Can these trials be fused? Found out by doing it: two rows, a few steps, in float64, against the same trials alone.

The structures that cannot be fused fail in many ways, loudly (a branch on a tensor's value) and silently (a counter in
Python, randomness from a generator, a buffer that is not written to). A list of them would never be whole, so nothing
is listed: parameters and buffers after a few steps are held against those of each trial trained by itself, and
anything further apart than rounding refuses. The second row begins one step after the first, as rows do that take the
place of others: a counter in Python then tells the wrong step. Batches are small, since only the structure is in
question.

What `torch.vmap` has no rule for it does row by row; that is correct and slow, and is reported.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from podium.colocate.alone import Alone
from podium.colocate.array import Array, Mode
from podium.colocate.recipe import Recipe, precision_of
from podium.colocate.resident import Resident
from podium.colocate.trial import Trial
from podium.errors import PodiumError

TOLERANCE = 1e-9
"""Largest difference, relative to the largest element of the tensor, in float64."""
NOISE = 1e-13
"""Gradients below this share of the largest are rounding: what an optimizer makes of them is chance."""
TIMES_ITS_OWN = 4.0
"""How many times further from float64 than the same trial alone a fused one may be in the sweep's own precision …"""
OF_A_STEP = {"fp32": 0.02, "tf32": 0.15, "bf16": 0.5}
"""… besides this share of what one step moves. A wrong kernel is off by all of it; short numbers, deep down, by some,
and a library may choose to compute a layer of a single model in longer ones."""
STEPS = 2
"""Of the second row; the first takes one more."""
_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What a probe found."""

    fuses: bool
    mode: Mode = "forward"
    why: str = ""
    """Why not."""
    worst: float = 0.0
    """The largest relative difference in float64."""
    looped: Sequence[str] = ()
    """Operations that go row by row."""


def probe(recipe: Recipe, trials: Sequence[Trial], resident: Resident) -> Verified:
    """Train two of these trials (all of one structure) fused and alone, and compare."""
    if resident.train.why_not:
        return Verified(fuses=False, why=f"the data do not lie on the device: {resident.train.why_not}")
    pair = _pair(trials)
    exact = dataclasses.replace(recipe, dtype="float64", precision="fp32", steps=None)
    small = Resident(exact.data_of(exact.task_of(pair[0])), exact.torch_device, torch.float64)
    said: list[str] = []
    modes: tuple[Mode, ...] = ("forward", "gradient")
    for mode in modes:
        try:
            found = _compare(exact, pair, small, mode)
        except _NotFusable as error:
            said.append(f"{mode}: {error}")
            continue
        if found.fuses and recipe.dtype != "float64":
            return _in_own_precision(recipe, exact, pair, resident, small, found)
        return found
    return Verified(fuses=False, why="; ".join(said))


class _NotFusable(Exception):
    pass


def _pair(trials: Sequence[Trial]) -> list[Trial]:
    """Two trials that differ: the first and the last, or the first under another seed."""
    first = _small(trials[0])
    other = _small(trials[-1]) if len(trials) > 1 else dataclasses.replace(first, seed=first.seed + 1)
    return [first, other]


def _small(trial: Trial) -> Trial:
    size = int(trial.options.get("batch_size", _BATCH))
    return dataclasses.replace(trial, options={**trial.options, "batch_size": min(size, _BATCH)})


def _compare(recipe: Recipe, pair: Sequence[Trial], resident: Resident, mode: Mode) -> Verified:
    with precision_of(recipe):
        fused, looped = _fused_states(recipe, pair, resident, mode, STEPS)
        worst, where = 0.0, ""
        for row, (trial, mine) in enumerate(zip(pair, fused, strict=True)):
            alone = Alone(recipe, trial, resident)
            silent = _trained_with_noise(alone, STEPS + 1 - row)
            for name, theirs in alone.state().items():
                apart = _apart(mine[name], theirs)
                if name not in silent and not apart <= max(worst, 0.0):
                    worst, where = apart, name
    if not worst <= TOLERANCE:
        why = f"after {STEPS} steps {where} is {worst:.1e} from the same trial alone (randomness, Python state, …?)"
        return Verified(fuses=False, mode=mode, why=why, worst=worst, looped=looped)
    return Verified(fuses=True, mode=mode, worst=worst, looped=looped)


def _trained_with_noise(alone: Alone, steps: int) -> set[str]:
    """Train, and name the parameters whose gradients were never more than rounding (a bias before BatchNorm)."""
    largest: dict[str, float] = {}
    for _ in range(steps):
        alone.step()
        for name, p in alone.model.named_parameters():
            if p.grad is not None:
                size = float(p.grad.to_dense().abs().max()) if p.grad.numel() else 0.0
                largest[name] = max(largest.get(name, 0.0), size)
    top = max(largest.values(), default=0.0)
    return {name for name, size in largest.items() if size < NOISE * top}


def _in_own_precision(
    recipe: Recipe, exact: Recipe, pair: Sequence[Trial], resident: Resident, yardstick: Resident, found: Verified
) -> Verified:
    """One step again as the sweep will take it, with the kernels that it will use.

    Short numbers scatter, more in some layers than in others, so the yardstick is what the same trial alone does in the
    same precision: neither may be much further from float64 than the other.
    """
    trial = pair[1]  # the row that took one step
    with precision_of(recipe):
        fused, _ = _fused_states(recipe, pair, resident, found.mode, 1)
        alone = Alone(recipe, trial, resident)
        before = alone.state()
        alone.step()
    truth = Alone(exact, trial, yardstick)
    truth.step()
    true_state, own_state = truth.state(), alone.state()
    for name in dict(alone.model.named_parameters()):
        moved = float((true_state[name] - before[name].double()).norm())
        its_own = float((own_state[name].double() - true_state[name]).norm())
        apart = float((fused[1][name].double() - true_state[name]).norm())
        if not apart <= TIMES_ITS_OWN * its_own + OF_A_STEP[recipe.precision] * moved + 1e-6 * float(
            true_state[name].norm()
        ):
            why = (
                f"in {recipe.precision} one step leaves {name} {apart:.1e} from float64, where the same trial alone "
                f"is {its_own:.1e} from it"
            )
            return dataclasses.replace(found, fuses=False, why=why)
    return found


def _fused_states(
    recipe: Recipe, pair: Sequence[Trial], resident: Resident, mode: Mode, steps: int
) -> tuple[list[dict[str, Tensor]], list[str]]:
    switch: Any = torch._C  # there is no public one
    before = switch._debug_only_are_vmap_fallback_warnings_enabled()
    switch._debug_only_display_vmap_fallback_warnings(True)
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            parts = [recipe.make(trial) for trial in pair]
            array = Array(recipe, parts[0], resident, len(pair), mode=mode)
            for row, one in enumerate(parts):
                array.load(row, one)
                array.refill([0 if row == i else None for i in range(len(pair))])
                array.step()
            for _ in range(steps - 1):
                array.step()
            array.evaluate(range(len(pair)), [steps] * len(pair), most=_BATCH)
    except (PodiumError, RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError, KeyError) as error:
        raise _NotFusable(f"{type(error).__name__}: {_first_line(error)}") from error
    finally:
        switch._debug_only_display_vmap_fallback_warnings(before)
    looped = sorted({match[1] for w in heard if (match := _NO_RULE.search(str(w.message)))})
    return [array.save(row) for row in range(len(pair))], looped


_NO_RULE = re.compile(r"batching rule for (\S+?)[\s.,]")


def _apart(mine: Tensor, theirs: Tensor) -> float:
    if not theirs.numel():
        return 0.0
    apart = float((mine.double() - theirs.double()).abs().max())
    return apart / max(float(theirs.double().abs().max()), 1e-12)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
