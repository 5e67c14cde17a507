"""How the survivors of a lost rank go on: undo, agree, take the state of whoever is furthest.

Parameters change only when a whole step is reduced, so survivors differ by one step at most, and whoever has it holds
the full sum: nothing needs to be rolled back, only taken over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from podium.comm.broadcast_bytes import share_bytes
from podium.engine.buffers import fit_buffers
from podium.engine.files import bytes_to_tree, tree_to_bytes
from podium.engine.worker import Worker
from podium.errors import Lost


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
        """Whether somebody wants to join or leave: the stretch is to end at a step all agree on, then regroup."""
        return False

    def busy(self, what: str | None) -> None:
        """Say what this rank does that may take longer than the others wait (`validation`), and None once it is done.

        Meanwhile it is not taken for hung.
        """

    def regroup(self, generation: int, steps_done: int) -> Regroup:
        """Say how far this rank is, and hear who goes on; a newcomer says -1 and -1. Raises where nobody can say."""
        raise Lost("a peer is lost, and nobody here can regroup")


def recover(
    worker: Worker,
    control: Control,
    *,
    in_step: bool,
    carried: dict[str, Any],
    in_round: bool = False,
    late: bool = False,
) -> Regroup:
    """Bring this worker to where those who go on agree to be. `carried` goes with the state and is updated from it.

    `in_step`: a step was under way, and is undone; `in_round`: a round was, and has been undone. A worker that is not
    among them is left as it is.
    """
    comm = worker.comm
    if not late:
        comm.abandon()  # at once: those who do not know of the loss yet learn of it by this
    if in_step:
        worker.forget_step()
    before = worker.position
    worker.forget_agreements()
    while True:
        plan = control.regroup(-1 if late else comm.generation, -1 if late else worker.global_step)
        if comm.rank not in plan.members:
            return plan
        try:
            comm.regroup(plan.generation, plan.members, plan.servers, plan.addresses)
            _take_state(worker, plan.source, carried)
            # Whoever is a step or round ahead has a sum that we are part of: what we sent for it is sent.
            worker.outgoing.settle_leftovers(happened=(in_step or in_round) and worker.position > before)
            return plan
        except Lost:  # another one went while we were forming: report again
            comm.abandon()
            late = False


def _take_state(worker: Worker, source: int, carried: dict[str, Any]) -> None:
    """Everybody becomes what the source is; nothing is changed before all of it is here."""
    comm = worker.comm
    mine = b""
    if comm.rank == source:
        mine = tree_to_bytes({"worker": worker.state(), "agreed": worker.agreed, "carried": carried})
    data = share_bytes(comm, source, mine)
    if comm.rank != source:
        state = bytes_to_tree(data, f"state of rank {source}")
        fit_buffers(worker.model, state["worker"]["model"])
        worker.load_state(state["worker"])
        worker.stop_agreed, _, worker.switch_agreed = state["agreed"]
        carried.update(state["carried"])
