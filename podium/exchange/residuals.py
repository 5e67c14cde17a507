"""What a codec left out, in the unit of what is sent next.

Where strategies follow each other, what was left out under one goes out with what the next one sends, and must move the
parameters as far as it was meant to. A gradient that was left out, once sent, would have moved them by -lr / (1 - m)
times itself (SGD with momentum m); one that an asynchronous worker left out by `part` of that, since its updates have
`part` of the rate. A drift moves them by itself. Under other optimizers nobody can say how far a gradient moves things,
and what some strategies send is known to them alone: then it is dropped, and the record of the switch says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch.optim import SGD, Optimizer

if TYPE_CHECKING:
    from podium.engine.worker import Worker

Sends = Literal["gradients", "drifts", "own"]
"""What a strategy's workers send: gradients, how far they went, or something of the strategy's own."""


class Unit(NamedTuple):
    """What is sent, and by what part of the optimizer's rate it moves the parameters."""

    sends: Sends
    part: float = 1.0
    of: str = ""  # whose own, where it is a strategy's own


def convert_leftovers(worker: Worker, before: Unit, after: Unit) -> str:
    """Bring what was left out to the unit of what is sent next; what became of it."""
    memory = worker.outgoing.memory
    if not memory.of_span:
        return "none"
    if before == after:
        return "kept"
    factors = [_factor(worker.optimizer, group, before, after) for group in worker.optimizer.param_groups]
    known = [factor for factor in factors if factor is not None]
    if len(known) < len(factors):
        memory.clear()
        return "dropped"
    for flats in memory.of_span.values():
        for piece in worker.flat.pieces:
            flats[piece.buffer][piece.start : piece.stop] *= known[piece.group]
    return "converted"


def _factor(optimizer: Optimizer, group: Mapping[str, Any], before: Unit, after: Unit) -> float | None:
    if before.sends == after.sends == "gradients":
        return before.part / after.part
    if "own" in (before.sends, after.sends) or type(optimizer) is not SGD or not group["lr"]:
        return None
    if before.sends == after.sends:
        return 1.0
    moves = -float(group["lr"]) / (1 - float(group["momentum"]))
    return moves * before.part if before.sends == "gradients" else 1 / (moves * after.part)
