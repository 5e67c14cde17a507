"""How the survivors of a lost rank continue: undo the step, agree on the members, copy the most advanced state.

Parameters change only when a whole step is reduced, so survivors differ by one step at most, and the worker that is a
step ahead has applied the full sum: its state is copied, and no parameter needs to be rolled back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
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
    """The new members, after a loss or because a rank joins or leaves."""

    generation: int
    members: tuple[int, ...]
    source: int  # the rank whose state all copy
    servers: tuple[int, ...] | None = None  # None: as before
    addresses: Mapping[int, str] = MappingProxyType({})  # where new ranks listen


class Control(ABC):
    """A rank's link to its launcher: requests to stop or regroup come in, progress goes out."""

    @abstractmethod
    def stop_requested(self) -> bool: ...

    @abstractmethod
    def progress(self, facts: dict[str, Any]) -> None:
        """Called after every step; must be cheap."""

    def change_requested(self) -> bool:
        """Whether a rank wants to join or leave: the segment then ends at an agreed step, and all regroup."""
        return False

    def busy(self, what: str | None) -> None:
        """Report work that may take longer than other ranks wait (`validation`), and None once it is done.

        Meanwhile this rank is not taken for hung.
        """

    def saved(self, run_dir: Path, step: int, *, keep: int, is_last: bool) -> None:
        """The first worker has written a checkpoint, and at the end its model, to its own disk.

        A launcher on another host gets copies before training continues. Raises CheckpointError where it cannot.
        """

    def regroup(self, generation: int, steps_done: int) -> Regroup:
        """Report this rank's progress and wait for the new membership; a rank that joins passes -1 and -1."""
        raise Lost("a peer is lost, and there is no coordinator to regroup the survivors")


def share_from_first(worker: Worker) -> None:
    """Copy the first worker's parameters, frozen ones too, and buffers to all workers. Collective.

    Needed because a task may initialise them from something else than the seed.
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
    """Raise where this worker's state could not be saved, or sent to another worker.

    Cheap, since nothing is copied: called before the first step, and again as optimizer and schedule fill their state.
    """
    if worker.steps_done & (worker.steps_done - 1):  # checked after 0, 1, 2, 4, 8 … steps
        return
    try:
        check_tree({**worker.state(copied=False), "buffers": dict(worker.model.named_buffers())})
    except CheckpointError as error:
        raise CheckpointError(
            f"rank {worker.comm.rank}: the state of this run cannot be saved (checked after {worker.steps_done} "
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
    """Bring this worker to the state that the new members agree on. `carried` travels with it and is updated.

    `undo`: undoes the step that was under way; `in_round`: a round was under way, and has been undone. A worker that is
    not a member is left as it is.
    """
    comm = worker.comm
    if not late:
        comm.abandon()  # first: it tells workers that have not noticed the loss yet
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
            # If the source was a step or round ahead, its sum holds our part: the residual of that step counts.
            worker.sender.residuals.settle(happened=(undo is not None or in_round) and worker.position > before)
            return plan
        except Lost:  # another rank was lost while the group formed: report again
            comm.abandon()
            late = False


def _take_state(worker: Worker, source: int, carried: dict[str, Any]) -> None:
    """Copy the source's state to all workers; nothing changes before all of it has arrived."""
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
