"""A worker's residuals when workers join, leave, are saved, or change what they send.

When one strategy follows another, the first one's residual is sent with the next one's tensors, and must move the
parameters as far as it would have before. A gradient in the residual would have moved them by -lr / (1 - m) times
itself (SGD with momentum m); an asynchronous worker's gradient by `part` of that, since its updates have `part` of the
rate. A drift moves them by itself. Under other optimizers the distance is unknown, and some strategies send tensors
whose meaning only they know: then the residual is dropped, and the `switch` record says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from podium.exchange.codecs.base import Codec, Memory, Span
from podium.exchange.codecs.feedback import RESIDUAL, UNSENT

if TYPE_CHECKING:
    from podium.comm.base import Communicator
    from podium.engine.flat import Flat
    from podium.engine.worker import Worker
    from podium.strategies.base import Strategy


class Residuals:
    """One worker's residuals: what it has not sent yet."""

    def __init__(self, comm: Communicator, flat: Flat, memory: Memory, codec: Codec) -> None:
        self._comm, self._flat, self._memory, self._codec = comm, flat, memory, codec
        self._are_shared = False  # whether every worker has an equal part of all residuals
        self._went_out = False  # whether the present step sends the residual without packing

    # A step.

    def add_to(self, tensor: Tensor, span: Span, *, ends_with_step: bool = True) -> None:
        """Where packing has ended: add the residual to this tensor, once.

        `ends_with_step`: no residual is left after this step, and its memory can be freed.
        """
        left = self._memory.get(RESIDUAL, span)
        if left is None:
            return
        tensor += left
        self._memory.put(RESIDUAL, span).zero_()
        self._went_out = self._went_out or ends_with_step

    def step_done(self, *, nothing_is_packed: bool) -> None:
        """The step is done: its residual becomes valid."""
        self._memory.commit()
        if self._went_out and nothing_is_packed:
            self._memory.clear()
        self._went_out = False

    def settle(self, *, happened: bool) -> None:
        """After this worker lost a step in flight; `happened`: the step was finished with this worker's part."""
        if happened:
            self._memory.commit()
        else:
            self._memory.forget()
        self._went_out = False

    # Workers join, leave or are saved.

    def share(self) -> None:
        """Before a worker joins or leaves: give every worker an equal part of all residuals. Collective.

        All or nothing, since a member may be lost meanwhile. A worker without residuals takes part too.
        """
        comm, of_span, names = self._comm, self._memory.of_span, [*self._codec.remembers]
        has = torch.tensor([float(name in of_span) for name in names])
        comm.wait(comm.all_reduce(has))
        nothing = [torch.zeros_like(flat) for flat in self._flat.grads] if has.any() else []
        shared = {
            name: [flat.clone() for flat in of_span.get(name, nothing)]
            for name, anywhere in zip(names, has.tolist(), strict=True)
            if anywhere
        }
        comm.wait(*(comm.all_reduce(flat) for flats in shared.values() for flat in flats))
        for name, flats in shared.items():
            of_span[name] = [flat.div_(comm.size) for flat in flats]
        self._are_shared = True

    def take_over(self, factor: float) -> None:
        """Scale the shared residuals by `factor`, to cover the parts of workers that have left."""
        shared, self._are_shared = self._are_shared, False
        for flats in self._memory.of_span.values() if shared else ():
            for flat in flats:
                flat *= factor

    def state(self) -> dict[str, Any]:
        """The codec's state by name, which a checkpoint saves for this worker."""
        of_span = {name: self._flat.by_name(flats) for name, flats in self._memory.of_span.items()}
        return {"of_span": of_span, "named": {k: v.clone() for k, v in self._memory.named.items()}}

    def use(self, codec: Codec) -> None:
        """Pack by another codec from here on; the residual so far is sent with its next tensor."""
        kept, self._codec = self.state(), codec
        self._memory.clear()
        self.add(kept)

    def add(self, kept: Mapping[str, Any]) -> None:
        """Add the saved state of this worker or of one that is gone.

        A residual that a codec stored itself becomes a plain residual for any other codec, and the other way round;
        that codec's momentum is dropped.
        """
        of_span, codec = self._memory.of_span, self._codec
        for was, parts in kept["of_span"].items():
            name = was
            if was in (RESIDUAL, UNSENT):
                name = UNSENT if codec.keeps_residual else RESIDUAL
            elif not codec.keeps_residual:
                continue
            if name not in of_span:
                of_span[name] = [torch.zeros_like(flat) for flat in self._flat.grads]
            self._flat.add_by_name(of_span[name], parts)
        for name, tensor in kept["named"].items():
            self._memory.named.setdefault(name, tensor.to(self._flat.grads[0].device))


# From one strategy to the next.


class ResidualScale(NamedTuple):
    """What kind of tensor is sent, and by what part of the optimizer's rate it moves the parameters."""

    sends: str
    part: float = 1.0
    of: str = ""  # the strategy, where only it knows what it sends


def scale_of(strategy: Strategy[Any], worker: Worker) -> ResidualScale:
    """The scale of a strategy's payload; where no codec packs it, a residual keeps the scale of gradients."""
    payload = strategy.payload
    kind = "gradients" if payload.kind in ("parameters", "nothing") else payload.kind
    return ResidualScale(kind, payload.share(worker), type(strategy).__name__ if kind == "own" else "")


def convert_residuals(worker: Worker, before: ResidualScale, after: ResidualScale) -> str:
    """Convert the residuals to the scale of the next payload; returns what was done, for the `switch` record."""
    memory = worker.sender.memory
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


def _factor(
    optimizer: Optimizer, group: Mapping[str, Any], before: ResidualScale, after: ResidualScale
) -> float | None:
    if before.sends == after.sends == "gradients":
        return before.part / after.part
    if "own" in (before.sends, after.sends) or type(optimizer) is not SGD or not group["lr"]:
        return None
    if before.sends == after.sends:
        return 1.0
    moves = -float(group["lr"]) / (1 - float(group["momentum"]))
    return moves * before.part if before.sends == "gradients" else 1 / (moves * after.part)
