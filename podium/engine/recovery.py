"""How the survivors of a lost rank continue: undo, agree, copy the state of the worker that is furthest.

Parameters change only when a whole step is reduced, so survivors differ by one step at most, and the worker that is a
step ahead holds the full sum: nothing needs to be rolled back, only taken over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from podium.comm.broadcast_bytes import share_bytes
from podium.engine.buffers import fit_buffers, write
from podium.engine.files import bytes_to_tree, check_tree, tree_to_bytes
from podium.engine.replica import as_bytes
from podium.engine.worker import Worker
from podium.errors import CheckpointError, Lost


class Regroup(NamedTuple):
    """Who goes on together: after a loss, or because somebody joins or leaves."""

    generation: int
    members: tuple[int, ...]
    source: int  # whose state all take
    servers: tuple[int, ...] | None = None  # None: as before
    addresses: Mapping[int, str] = MappingProxyType({})  # where those who are new listen


class Control(ABC):
    """What the world outside tells a rank, and hears from it."""

    @abstractmethod
    def stop_requested(self) -> bool: ...

    @abstractmethod
    def progress(self, facts: dict[str, Any]) -> None:
        """Called after every step; must be cheap."""

    def change_requested(self) -> bool:
        """Whether somebody wants to join or leave: the segment is to end at a step all agree on, then regroup."""
        return False

    def busy(self, what: str | None) -> None:
        """Say what this rank does that may take longer than the others wait (`validation`), and None once it is done.

        Meanwhile it is not taken for hung.
        """

    def regroup(self, generation: int, steps_done: int) -> Regroup:
        """Say how far this rank is, and hear who goes on; a newcomer says -1 and -1. Raises where nobody can say."""
        raise Lost("a peer is lost, and nobody here can regroup")


def share_from_first(worker: Worker) -> None:
    """All that a replica is made of, as the first worker has it: parameters, frozen ones too, and buffers.

    Collective. A task may draw them from elsewhere than the seed.
    """
    comm, model = worker.comm, worker.model
    if comm.size == 1:
        return
    frozen = [p.data for p in model.parameters() if not p.requires_grad]
    buffers = list(model.named_buffers())
    others = frozen + [buffer for _, buffer in buffers]
    joined = torch.cat([as_bytes(t) for t in others]) if others else torch.empty(0, dtype=torch.uint8)
    exchanged = [*worker.params, joined] if others else worker.params
    comm.wait(*(comm.broadcast(tensor, comm.workers[0]) for tensor in exchanged))
    parts = joined.split([t.nbytes for t in others])
    values = [part.clone().view(t.dtype).reshape(t.shape) for t, part in zip(others, parts, strict=True)]
    for tensor, value in zip(frozen, values, strict=False):
        tensor.copy_(value)
    for (name, buffer), value in zip(buffers, values[len(frozen) :], strict=True):
        write(model, name, buffer, value)


def check_state(worker: Worker) -> None:
    """Raise where this worker's state could not be saved, or sent to a worker that takes it over.

    Cheap, since nothing is copied: called before the first step, and again as optimizer and schedule fill theirs.
    """
    if worker.steps_done & (worker.steps_done - 1):  # looked at after 0, 1, 2, 4, 8 … steps
        return
    try:
        check_tree({**worker.state(copied=False), "buffers": dict(worker.model.named_buffers())})
    except CheckpointError as error:
        raise CheckpointError(
            f"rank {worker.comm.rank}: the state of this run cannot be saved (looked at after {worker.steps_done} "
            f"steps): {error}"
        ) from error


def recover(
    worker: Worker,
    control: Control,
    *,
    undo: Callable[[], None] | None,
    carried: dict[str, Any],
    in_round: bool = False,
    late: bool = False,
) -> Regroup:
    """Bring this worker to the state that the remaining workers agree on. `carried` travels with it and is updated.

    `undo`: undoes the step that was under way; `in_round`: a round was, and has been undone. A worker that is not among
    them is left as it is.
    """
    comm = worker.comm
    if not late:
        comm.abandon()  # at once: those who do not know of the loss yet learn of it by this
    if undo is not None:
        undo()
    before = worker.position
    worker.gradients.forget_agreement()
    worker.buffers.forget_agreement()
    while True:
        plan = control.regroup(-1 if late else comm.generation, -1 if late else worker.progress.global_step)
        if comm.rank not in plan.members:
            return plan
        try:
            comm.regroup(plan.generation, plan.members, plan.servers, plan.addresses)
            _take_state(worker, plan.source, carried)
            # A worker that is a step or round ahead has a sum that holds our part: what we sent for it is sent.
            worker.sender.residuals.settle(happened=(undo is not None or in_round) and worker.position > before)
            return plan
        except Lost:  # another one went while we were forming: report again
            comm.abandon()
            late = False


def _take_state(worker: Worker, source: int, carried: dict[str, Any]) -> None:
    """Everybody becomes what the source is; nothing is changed before all of it is here."""
    comm = worker.comm
    mine = b""
    if comm.rank == source:
        mine = tree_to_bytes({"worker": worker.state(), "agreed": list(worker.votes.agreed), "carried": carried})
    data = share_bytes(comm, source, mine)
    if comm.rank != source:
        state = bytes_to_tree(data, f"state of rank {source}")
        fit_buffers(worker.model, state["worker"]["model"])
        worker.load_state(state["worker"])
        worker.votes.restore(state["agreed"])
        carried.update(state["carried"])
