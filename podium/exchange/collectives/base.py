"""A collective: an algorithm for summing a tensor over the workers.

Those that are written on point-to-point give a schedule, and run in any world. Costs are in the alpha-beta model: alpha
seconds per message, beta seconds per byte, n bytes, p workers; see each file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from podium.exchange.collectives.gather import gather_schedule

if TYPE_CHECKING:
    from podium.comm.base import Communicator, Handle
    from podium.comm.schedule import Chain


Transport = Literal["memory", "backend", "schedule"]
"""What carries a sum: memory that processes of one host share; gloo or nccl; or messages between workers."""


class Collective(ABC):
    """How workers add up a tensor. Subclasses are frozen, keyword-only dataclasses."""

    name: ClassVar[str]

    def transport(self, same_host: bool) -> Transport:
        """What the launcher has to set up for it, where all workers live on one host, or on several."""
        return "schedule"

    def prepare(self, comm: Communicator) -> Collective:
        """What will be used among these workers: itself, or one that knows their links. Collective."""
        return self

    @abstractmethod
    def all_reduce(self, comm: Communicator, tensor: Tensor) -> Handle:
        """Sum over the workers, in place; issues and never waits."""

    def all_gather(self, comm: Communicator, tensor: Tensor, into: Tensor) -> Handle:
        """Every worker's flat tensor, one after the other; issues and never waits."""
        return comm.all_gather(tensor, into)


class Native(Collective):
    """What the world itself has: shared memory or the backend between processes, a modelled ring in virtual time."""

    def all_reduce(self, comm: Communicator, tensor: Tensor) -> Handle:
        return comm.all_reduce(tensor)


class Scheduled(Collective):
    """A collective written as a schedule."""

    @abstractmethod
    def schedule(self, index: int, size: int, numel: int, itemsize: int) -> list[Chain]:
        """The moves of member `index` of `size`. Worked out alike by all; `index` only picks whose."""

    def prepare(self, comm: Communicator) -> Collective:
        comm.meet()
        return self

    def all_reduce(self, comm: Communicator, tensor: Tensor) -> Handle:
        return comm.exchange(_chains(self, comm.index, comm.size, tensor.numel(), tensor.element_size()), tensor)

    def all_gather(self, comm: Communicator, tensor: Tensor, into: Tensor) -> Handle:
        into.view(comm.size, -1)[comm.index].copy_(tensor.view(-1))
        return comm.exchange(gather_schedule(comm.index, comm.size, tensor.numel(), tensor.element_size()), into)


@lru_cache(maxsize=1024)
def _chains(collective: Scheduled, index: int, size: int, numel: int, itemsize: int) -> list[Chain]:
    """Workers exchange the same few sizes again and again."""
    return collective.schedule(index, size, numel, itemsize)
