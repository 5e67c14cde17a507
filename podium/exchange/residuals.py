"""What codecs leave out on a worker, when workers come and go, are saved, or change what they send.

Where strategies follow each other, what was left out under one goes out with what the next one sends, and must move the
parameters as far as it was meant to. A gradient that was left out, once sent, would have moved them by -lr / (1 - m)
times itself (SGD with momentum m); one that an asynchronous worker left out by `part` of that, since its updates have
`part` of the rate. A drift moves them by itself. Under other optimizers nobody can say how far a gradient moves things,
and what some strategies send is known to them alone: then it is dropped, and the record of the switch says so.
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
    """What this worker has not sent yet."""

    def __init__(self, comm: Communicator, flat: Flat, memory: Memory, codec: Codec) -> None:
        self._comm, self._flat, self._memory, self._codec = comm, flat, memory, codec
        self._are_shared = False  # whether every worker has an equal part of what all have not sent
        self._went_out = False  # unpacked, with the present step

    # A step.

    def add_to(self, tensor: Tensor, span: Span, *, ends_with_step: bool = True) -> None:
        """Where nothing is packed any more, what was left out before goes out with this tensor, once.

        `ends_with_step`: once the step is done nothing is left, and the memory can be freed.
        """
        left = self._memory.get(RESIDUAL, span)
        if left is None:
            return
        tensor += left
        self._memory.put(RESIDUAL, span).zero_()
        self._went_out = self._went_out or ends_with_step

    def step_done(self, *, nothing_is_packed: bool) -> None:
        """A step became true, and with it what it left out."""
        self._memory.commit()
        if self._went_out and nothing_is_packed:
            self._memory.clear()
        self._went_out = False

    def settle(self, *, happened: bool) -> None:
        """After a step in flight was lost here: whether it happened all the same, with what we had sent for it."""
        if happened:
            self._memory.commit()
        else:
            self._memory.forget()
        self._went_out = False

    # Workers come, go or are saved.

    def share(self) -> None:
        """Before a worker joins or leaves: every worker gets an equal part of what all have not sent. Collective.

        All or nothing: a member may be lost over it. One that has sent nothing yet takes part all the same.
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
        """Take over the parts of those who have left, where all had an equal part."""
        shared, self._are_shared = self._are_shared, False
        for flats in self._memory.of_span.values() if shared else ():
            for flat in flats:
                flat *= factor

    def state(self) -> dict[str, Any]:
        """What the codec remembers, by name: a checkpoint keeps it as this worker's own."""
        of_span = {name: self._flat.by_name(flats) for name, flats in self._memory.of_span.items()}
        return {"of_span": of_span, "named": {k: v.clone() for k, v in self._memory.named.items()}}

    def use(self, codec: Codec) -> None:
        """Another codec packs from here on: what was left out so far goes out with what it packs next."""
        kept, self._codec = self.state(), codec
        self._memory.clear()
        self.add(kept)

    def add(self, kept: Mapping[str, Any]) -> None:
        """Take over what a worker, this one or one that is no more, had not sent.

        What a codec that keeps its own residual had not sent is a residual to any other, and the other way round; the
        momentum that such a codec kept ends with it.
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
    """What is sent, and by what part of the optimizer's rate it moves the parameters."""

    sends: str
    part: float = 1.0
    of: str = ""  # whose own, where it is a strategy's own


def scale_of(strategy: Strategy[Any], worker: Worker) -> ResidualScale:
    """The scale of what a strategy's workers send; where no codec packs that, gradients that wait stay as they are."""
    payload = strategy.payload
    kind = "gradients" if payload.kind in ("parameters", "nothing") else payload.kind
    return ResidualScale(kind, payload.share(worker), type(strategy).__name__ if kind == "own" else "")


def convert_residuals(worker: Worker, before: ResidualScale, after: ResidualScale) -> str:
    """Bring what was left out to the scale of what is sent next; what became of it."""
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
