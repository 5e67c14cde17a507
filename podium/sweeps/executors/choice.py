"""Chooses the candidate that trains a group, and explains why."""

from __future__ import annotations

from typing import NamedTuple

from podium.sweeps.executors.base import Executor
from podium.sweeps.executors.candidate import REPEATS, Candidate, describe
from podium.sweeps.executors.sequential import Sequential
from podium.sweeps.fused.captured_step import CapturedStep
from podium.sweeps.fused.probe import ProbeResult

WORTH_FUSING = 1.1
UNSTEADY = 1.5
"""Where the slowest timing is more than this many times the fastest, no ratio is given: the machine is busy."""


class Choice(NamedTuple):
    executor: Executor
    why: str
    candidates: list[Candidate]
    made: CapturedStep | None = None
    """The timed array, if it was chosen and still exists."""


def decide(timed: list[Candidate], found: ProbeResult, trials: int) -> Choice:
    possible = [c for c in timed if not c.why_not]
    if not possible:
        reasons = "; ".join(f"{describe(c.executor)}: {c.why_not}" for c in timed)
        # `sequential` hands in each trial that cannot take a step as failed, with its reason.
        return Choice(Sequential(), f"no executor could take a step: {reasons}", timed)
    best = min(possible, key=lambda c: c.total_s)
    one = next((c for c in timed if c.executor.name == "sequential"), None)
    if one is None:
        why = f"{describe(best.executor)}: all {trials} trials take some {best.total_s:.2g} s; nothing else was timed"
        return Choice(best.executor, why, timed)
    gain = one.total_s / best.total_s if not one.why_not else float("inf")
    if best.executor.name != "sequential" and gain < WORTH_FUSING:
        only = "hardly faster than" if _is_unsteady(one, best) else f"only {gain:.2f}× as fast as"
        why = f"do not share: {describe(best.executor)} is predicted {only} one after another"
        return Choice(one.executor, why, timed)
    fused = [c for c in possible if c.executor.name == "fused"]
    why = f"{describe(best.executor)}: {best.step_us:.3g} µs per model-step"
    if best is not one:
        why += f", {_speed_text(one, best)} over the {trials} trials"
    if not found.fuses:
        why += f"; cannot be fused: {found.why}"
    elif fused and best.executor.name != "fused":
        rows = min(fused, key=lambda c: c.total_s)
        slower = "to be slower" if _is_unsteady(one, rows) else f"{one.total_s / rows.total_s:.2f}×"
        why += f"; do not fuse: predicted {slower}"
    return Choice(best.executor, why, timed)


def _speed_text(one: Candidate, best: Candidate) -> str:
    """How much faster the best is predicted to be, with a range; no ratio where timings are unsteady."""
    if one.why_not:
        return "where one after another cannot take a step"
    if _is_unsteady(one, best):
        apart = max(one.unsteady, best.unsteady)
        return (
            f"predicted to be faster than one after another (no ratio: timings differed by up to {apart:.1f}×, so this "
            "machine is busy)"
        )
    low, high = one.ends[0] / best.ends[1], one.ends[1] / best.ends[0]
    return (
        f"predicted {one.total_s / best.total_s:.1f}× ({low:.1f} to {high:.1f} by {REPEATS} short timings of each) as "
        "fast as one after another"
    )


def _is_unsteady(*timed: Candidate) -> bool:
    """Whether timings are too far apart for a ratio."""
    return max(candidate.unsteady for candidate in timed) > UNSTEADY
