"""The real world: collectives in shared memory, over the channel or by `torch.distributed`; messages over the channel.

Workers of one host sum in shared memory. Workers of several hosts, where the launcher knows the hosts, sum over the
channel in rank order, to the same bits, and in shared memory inside each host. Elsewhere the backend sums.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from podium.comm.base import Communicator, Handle, Message, Meta, nbytes_of
from podium.comm.clocks import Clock
from podium.comm.gather import broadcast_schedule, gather_schedule
from podium.comm.rank_order import sum_in_rank_order, uses_memory
from podium.comm.real.arena import Arena
from podium.comm.real.calls import Call, Calls, Relocate, landing_for
from podium.comm.real.channel import Channel
from podium.comm.real.counters import Counter, counter_of
from podium.comm.real.exchanges import Exchanges
from podium.comm.real.link import ChannelHandle
from podium.comm.real.process_group import FORMING_S, Group
from podium.comm.real.schedule_runner import ExchangeHandle
from podium.comm.real.shared_memory import SharedMemoryHandle
from podium.comm.real.worker_group import CollectiveHandle, WorkerGroup
from podium.comm.schedule import Chain, nbytes_received, nbytes_sent
from podium.errors import CommError, Lost

_PARTING_S = 10.0
"""How long a worker that ends tries to reach servers that it has never connected to."""


@final
class RealCommunicator(Communicator):
    """One process's view of the other ranks. A rank without a group (a server) takes part in no collective."""

    def __init__(
        self,
        rank: int,
        workers: Sequence[int],
        servers: Sequence[int],
        clock: Clock,
        *,
        group: Group | None,
        channel: Channel | None,
        deadline_s: float,
        relocate: Relocate | None = None,
        arena: Arena | None = None,
        over_channel: bool = False,
    ) -> None:
        """`relocate`: finds a lost server's new address; calls to it are then repeated there.

        `arena`: memory that all workers share, where all are on one host; collectives then go through it. With
        `over_channel` they go through the channel, whose address must name the host, unless nccl serves all workers,
        and otherwise through the group.
        """
        super().__init__(rank, tuple(workers), tuple(servers), clock, deadline_s=deadline_s)
        self._group = None if group is None else WorkerGroup(group, arena, deadline_s)
        self._channel = channel
        self._calls = None if channel is None else Calls(channel, relocate)
        self._exchanges = None if channel is None else Exchanges(channel)
        self._over_channel = over_channel
        self.message_bytes = None if channel is None else channel.limits.body_bytes
        self.shares_memory = channel is not None and channel.arena is not None and not channel.host
        self.talks = channel is not None
        self._arena = arena if arena is not None or channel is None else channel.arena
        self._counting = threading.Lock()
        self._counter: Counter | None = None
        if self._group is not None:
            try:
                self._form()
            except Lost as error:  # the first exchange will fail at once on all workers, in code that recovers from it
                if self._exchanges is not None:
                    self._exchanges.give_up(str(error))
                self._group.close()

    @property
    def sums_in_rank_order(self) -> bool:  # type: ignore[override]  # it changes with the generation
        """Whether collectives go over the channel. nccl, where every worker has its own GPU, has its own order."""
        return self._over_channel and self._need_group().backend != "nccl"

    @property
    def shares_host(self) -> bool:  # type: ignore[override]  # it changes with the generation
        return self._group is not None and self._group.in_memory

    def all_reduce(self, tensor: Tensor) -> Handle:
        group = self._need_group()
        self.traffic.count_all_reduce(nbytes_of([tensor]), self.size)
        if not self.sums_in_rank_order:
            return group.all_reduce(tensor)
        chains = sum_in_rank_order(self.index, self.hosts, tensor.numel(), tensor.element_size())
        return self._issue(chains, tensor, self.near if uses_memory(self.hosts, tensor.nbytes) else ())

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        group, place = self._need_group(), self.workers.index(source)
        self.traffic.count_broadcast(nbytes_of([tensor]), self.rank == source, self.size)
        if not self.sums_in_rank_order:
            return group.broadcast(tensor, place)
        return self._issue(
            broadcast_schedule(self.index, self.size, place, tensor.numel(), tensor.element_size()), tensor
        )

    def all_gather(self, tensor: Tensor, into: Tensor) -> Handle:
        group = self._need_group()
        self.traffic.count_all_gather(nbytes_of([tensor]), self.size)
        if not self.sums_in_rank_order:
            return group.all_gather(tensor, into)
        into.view(self.size, -1)[self.index].copy_(tensor.view(-1))
        return self._issue(gather_schedule(self.index, self.size, tensor.numel(), tensor.element_size()), into)

    def exchange(self, chains: Sequence[Chain], tensor: Tensor, near: Sequence[int] = ()) -> Handle:
        self._need_channel()
        self.traffic.sent += nbytes_sent(chains, tensor.element_size())
        self.traffic.received += nbytes_received(chains, tensor.element_size())
        return self._issue(chains, tensor, near)

    def _issue(self, chains: Sequence[Chain], tensor: Tensor, near: Sequence[int] = ()) -> Handle:
        if not tensor.is_contiguous():
            raise CommError(f"rank {self.rank}: what is exchanged must be contiguous, got stride {tensor.stride()}")
        assert self._exchanges is not None
        return self._exchanges.issue(chains, tensor.detach().view(-1), near)

    def _draw(self, turn: int, count: int) -> int:
        if self._counter is None:
            self._counter = counter_of(self._need_group().store, self.deadline_s)
        if self._counter.is_gone:  # other workers would draw from a new file
            self._counter.close()
            self._counter = None
            raise Lost(f"rank {self.rank}: the file with the counters was removed")
        return self._counter.draw(self.generation, turn, count)

    def meet(self) -> None:
        self._need_channel()
        assert self._exchanges is not None
        self._exchanges.meet()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._arena is not None and device.type == "cpu":
            return self._arena.allocate(numel, dtype)
        made = super().allocate(numel, dtype, device)
        if self._group is not None:
            self._group.keep(made)
        return made

    def send(self, to: int, kind: str, meta: Meta, body: Sequence[Tensor] = ()) -> None:
        self.traffic.sent += nbytes_of(body)
        self._need_channel().send(to, kind, meta, _on_cpu(body))

    def call(
        self,
        to: int,
        kind: str,
        meta: Meta,
        body: Sequence[Tensor] = (),
        into: Sequence[Tensor] | None = None,
        more: bool = False,
    ) -> Handle:
        self.traffic.sent += nbytes_of(body)
        call = Call(to, kind, meta, _on_cpu(body), into, landing_for(into))
        return self._need_calls().make(call, self.servers, more)

    def reply(self, to: Message, meta: Meta, body: Sequence[Tensor] = (), more: bool = False) -> None:
        with self._counting:  # a server answers from several threads
            self.traffic.sent += nbytes_of(body)
        self._need_channel().reply(to, meta, _on_cpu(body), more)

    def recv(self, deadline_s: float | None = None) -> Message:
        message = self._need_channel().recv(self.deadline_s if deadline_s is None else deadline_s)
        self.traffic.received += nbytes_of(message.body)
        return message

    def _poll(self, calls: Sequence[Handle], deadline_s: float) -> Message | None:
        asked = [h for h in calls if isinstance(h, ChannelHandle)]
        if len(asked) < len(calls):
            raise CommError(f"rank {self.rank}: only calls can be waited for beside messages, not collectives")
        message = self._need_channel().poll(asked, deadline_s)
        if message is not None:
            self.traffic.received += nbytes_of(message.body)
        return message

    @property
    def addresses(self) -> Mapping[int, str]:
        channel = self._need_channel()
        return {**channel.address_book, self.rank: channel.address}

    def introduce(self, addresses: Mapping[int, str]) -> None:
        self._need_channel().introduce(addresses)

    def watch(self, ranks: Sequence[int]) -> None:
        self._need_channel().watch(ranks)

    def _wait(self, handles: Sequence[Handle], deadline_s: float) -> list[Message | None]:
        for handle in handles:
            if isinstance(handle, CollectiveHandle | SharedMemoryHandle):
                self._need_group().wait(handle, deadline_s)
            elif isinstance(handle, ExchangeHandle):
                assert self._exchanges is not None
                self._exchanges.wait(handle, deadline_s)
        calls = [h for h in handles if isinstance(h, ChannelHandle)]
        answers = self._need_calls().wait(calls, self.servers, deadline_s) if calls else {}
        self.traffic.received += sum(nbytes_of(message.body) for message in answers.values())
        return [answers.get(h) if isinstance(h, ChannelHandle) else None for h in handles]

    def find(self, server: int) -> None:
        """Get a lost server's new address; blocks until it serves."""
        self._need_calls().find(server)

    def lose(self, ranks: Collection[int]) -> None:
        """The launcher has given these ranks up: fail what waits for them. For any thread.

        A host that vanished says no goodbye, and an exchange with it would last until its deadline.
        """
        if self._channel is not None:
            self._channel.hang_up(ranks)
        if self._group is not None and not set(ranks).isdisjoint(self.workers):
            if self._exchanges is not None:
                self._exchanges.give_up("the launcher reports a loss")
            self._group.interrupt()

    def abandon(self) -> None:
        """May be called from any thread; over the channel it returns at once, also where a host is gone."""
        if self._exchanges is not None:
            self._exchanges.give_up("the group was dropped")
        self._need_group().abandon()

    def regroup(
        self,
        generation: int,
        members: Sequence[int],
        servers: Sequence[int] | None = None,
        addresses: Mapping[int, str] | None = None,
    ) -> None:
        if self._channel is not None and self._channel.host:
            # A host that is gone has hung up nowhere, and may be in the middle of a message.
            self._channel.drop(set(self.workers) - set(members))
        self.generation, self.workers = generation, tuple(members)
        self.servers = self.servers if servers is None else tuple(servers)
        if addresses and self._channel is not None:
            self._channel.introduce(addresses)
        self._form()

    def _form(self) -> None:
        """Form the group of the present generation, also for exchanges by schedule."""
        group, exchanges = self._need_group(), self._exchanges
        if exchanges is not None:
            exchanges.form(self.generation, self.workers)
        if not self.sums_in_rank_order:
            group.form(self.generation, self.rank, self.workers)
        if exchanges is not None and self._need_channel().host:
            self.hosts = exchanges.find_hosts(min(FORMING_S, self.deadline_s / 10))

    def close(self) -> None:
        if self._group is not None and self._channel is not None:
            # A server that was never seeded has no connection to a worker, and would never see the workers depart.
            facts = {"generation": self.generation, "workers": list(self.workers)}
            self._channel.part_from(self.servers, "bye", facts, _PARTING_S)
        if self._group is not None:
            self._group.close()
        if self._counter is not None:
            self._counter.close()
        if self._channel is not None:
            self._channel.close()

    def _need_calls(self) -> Calls:
        self._need_channel()
        assert self._calls is not None
        return self._calls

    def _need_group(self) -> WorkerGroup:
        if self._group is None:
            raise CommError(f"rank {self.rank} is a server and takes part in no collective")
        return self._group

    def _need_channel(self) -> Channel:
        if self._channel is None:
            raise CommError(
                f"rank {self.rank} has no channel: this strategy has no servers and its workers send no messages"
            )
        return self._channel


def _on_cpu(body: Sequence[Tensor]) -> list[Tensor]:
    return [t if t.device.type == "cpu" else t.cpu() for t in body]
