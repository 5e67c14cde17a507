"""A collective: an algorithm for summing a tensor over the workers.

Collectives built on point-to-point messages return a schedule and run in any world. Each file states its cost in the
alpha-beta model: alpha seconds per message, beta seconds per byte, n bytes, p workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from podium.comm.gather import gather_schedule

if TYPE_CHECKING:
    from podium.comm.base import Communicator, Handle
    from podium.comm.schedule import Chain


Transport = Literal["memory", "backend", "schedule", "hosts", "both"]
"""How sums travel: shared memory of one host's processes; gloo or nccl; messages between workers; `hosts`: messages
between hosts and shared memory inside, or the backend where the launcher does not know the hosts; `both`: messages and
the backend, to be compared."""


class Collective(ABC):
    """How workers sum a tensor. Subclasses are frozen, keyword-only dataclasses."""

    name: ClassVar[str]

    def transport(self, same_host: bool) -> Transport:
        """The transport that the launcher must set up; `same_host`: all workers live on one host."""
        return "schedule"

    def prepare(self, comm: Communicator) -> Collective:
        """The collective to use among these workers: itself, or one fitted to their links. All workers call it."""
        return self

    @abstractmethod
    def all_reduce(self, comm: Communicator, tensor: Tensor) -> Handle:
        """Start to sum over the workers, in place; never waits."""

    def all_gather(self, comm: Communicator, tensor: Tensor, into: Tensor) -> Handle:
        """Start to gather every worker's flat tensor into `into`, in member order; never waits."""
        return comm.all_gather(tensor, into)


class Native(Collective):
    """The world's own all-reduce: shared memory or the backend between processes, a modelled ring in virtual time."""

    def all_reduce(self, comm: Communicator, tensor: Tensor) -> Handle:
        return comm.all_reduce(tensor)


class Scheduled(Collective):
    """A collective written as a schedule."""

    @abstractmethod
    def schedule(self, index: int, size: int, numel: int, itemsize: int) -> list[Chain]:
        """The moves of member `index` of `size`. Must be a pure function: members compute it independently."""

    def prepare(self, comm: Communicator) -> Collective:
        comm.meet()
        return self

    def all_reduce(self, comm: Communicator, tensor: Tensor) -> Handle:
        chains = _chains(self, comm.index, comm.size, tensor.numel(), tensor.element_size())
        return comm.exchange(chains, tensor, comm.near if self.uses_memory(tensor.nbytes) else ())

    def uses_memory(self, nbytes: int) -> bool:
        """Whether the schedule for a tensor of this size uses the tensors of other members of the same host."""
        return False

    def all_gather(self, comm: Communicator, tensor: Tensor, into: Tensor) -> Handle:
        into.view(comm.size, -1)[comm.index].copy_(tensor.view(-1))
        return comm.exchange(gather_schedule(comm.index, comm.size, tensor.numel(), tensor.element_size()), into)


@lru_cache(maxsize=1024)
def _chains(collective: Scheduled, index: int, size: int, numel: int, itemsize: int) -> list[Chain]:
    """Cached: workers exchange the same few sizes again and again."""
    return collective.schedule(index, size, numel, itemsize)
