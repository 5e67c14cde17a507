"""The real world: collectives through `torch.distributed`, messages through the channel, time from the wall."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from podium.comm.base import Clock, Communicator, Handle, Message, Meta, nbytes_of
from podium.comm.channel import Channel
from podium.comm.link import ChannelHandle
from podium.comm.torch_dist import Group
from podium.errors import CommError, Lost


@final
class CollectiveHandle(Handle):
    """Names an exchange of the group; the group alone holds its work object."""

    def __init__(self, group: Group, key: int) -> None:
        self._group, self.key = group, key

    @property
    def done(self) -> bool:
        return self._group.is_done(self.key)


@final
class RealCommunicator(Communicator):
    """One process's view of the others. A rank without a group (a server) takes part in no collective."""

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
    ) -> None:
        super().__init__(rank, tuple(workers), tuple(servers), clock, deadline_s=deadline_s)
        self._group, self._channel = group, channel
        self._staged: dict[ChannelHandle, tuple[Sequence[Tensor], Sequence[Tensor]]] = {}
        if group is not None:
            # Who was lost since all joined is missed in the first exchange, where it can be dealt with.
            with contextlib.suppress(Lost):
                group.form(0, self.index, self.size)

    def all_reduce(self, tensor: Tensor) -> Handle:
        group = self._need_group()
        self.traffic.count_all_reduce(nbytes_of([tensor]), self.size)
        return CollectiveHandle(group, group.all_reduce(tensor))

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        group = self._need_group()
        self.traffic.count_broadcast(nbytes_of([tensor]), self.rank == source, self.size)
        return CollectiveHandle(group, group.broadcast(tensor, self.workers.index(source)))

    def send(self, to: int, kind: str, meta: Meta, body: Sequence[Tensor] = ()) -> None:
        self.traffic.sent += nbytes_of(body)
        self._need_channel().send(to, kind, meta, _on_cpu(body))

    def call(
        self, to: int, kind: str, meta: Meta, body: Sequence[Tensor] = (), into: Sequence[Tensor] | None = None
    ) -> Handle:
        self.traffic.sent += nbytes_of(body)
        landing = (
            None if into is None else [t if t.device.type == "cpu" else torch.empty_like(t, device="cpu") for t in into]
        )
        handle = self._need_channel().call(to, kind, meta, _on_cpu(body), landing)
        if into is not None and landing is not None and any(a is not b for a, b in zip(into, landing, strict=True)):
            self._staged[handle] = (into, landing)
        return handle

    def reply(self, to: Message, meta: Meta, body: Sequence[Tensor] = ()) -> None:
        self.traffic.sent += nbytes_of(body)
        self._need_channel().reply(to, meta, _on_cpu(body))

    def recv(self, deadline_s: float | None = None) -> Message:
        message = self._need_channel().recv(self.deadline_s if deadline_s is None else deadline_s)
        self.traffic.received += nbytes_of(message.body)
        return message

    def _wait(self, handles: Sequence[Handle], deadline_s: float) -> list[Message | None]:
        calls = [h for h in handles if isinstance(h, ChannelHandle)]
        for handle in handles:
            if isinstance(handle, CollectiveHandle):
                self._need_group().wait(handle.key)
        if not calls:
            return [None] * len(handles)
        answers = dict(zip(calls, self._need_channel().wait(calls, deadline_s), strict=True))
        for call, message in answers.items():
            self.traffic.received += nbytes_of(message.body)
            into, landing = self._staged.pop(call, ((), ()))
            for mine, landed in zip(into, landing, strict=True):
                mine.copy_(landed)
        return [answers.get(h) if isinstance(h, ChannelHandle) else None for h in handles]

    def abandon(self) -> None:
        self._need_group().drop()

    def regroup(self, generation: int, members: Sequence[int]) -> None:
        self.generation, self.workers = generation, tuple(members)
        self._need_group().form(generation, self.index, self.size)

    def close(self) -> None:
        if self._group is not None:
            self._group.drop()
        if self._channel is not None:
            self._channel.close()

    def _need_group(self) -> Group:
        if self._group is None:
            raise CommError(f"rank {self.rank} is a server and takes part in no collective")
        return self._group

    def _need_channel(self) -> Channel:
        if self._channel is None:
            raise CommError(f"rank {self.rank} has no channel: this strategy asked for no servers")
        return self._channel


def _on_cpu(body: Sequence[Tensor]) -> list[Tensor]:
    return [t if t.device.type == "cpu" else t.cpu() for t in body]
