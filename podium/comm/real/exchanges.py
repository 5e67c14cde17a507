"""A worker's exchanges by schedule: their numbers, the hosts of the members, and memory that a host's members share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from podium.comm.gather import gather_schedule
from podium.comm.rank_order import Hosts
from podium.comm.real.channel import Channel
from podium.comm.real.schedule_runner import ExchangeHandle, ScheduleRunner
from podium.comm.schedule import Chain
from podium.errors import CommError, Lost

_HOST_BYTES = 8  # of a digest that tells hosts apart
_STAGE_BYTES = 64 << 10


@final
class Exchanges:
    """One worker's exchanges, generation after generation."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._runner = channel.runner = channel.runner or ScheduleRunner(channel)
        self._members: tuple[int, ...] = ()
        self._issued = 0
        self._stages: list[Tensor] = []  # shared memory that no exchange uses
        self._staged_in: dict[ExchangeHandle, Tensor] = {}

    def form(self, generation: int, members: tuple[int, ...]) -> None:
        """Begin a generation: older exchanges fail, and nothing more is received into their tensors."""
        self._members, self._issued = members, 0
        self._staged_in.clear()  # of failed exchanges, whose memory others may still write to
        self._runner.form(generation)

    def meet(self, deadline_s: float | None = None) -> None:
        """Connect to all other members."""
        book = self._channel.address_book
        self._channel.connect_all({rank: book[rank] for rank in self._others}, deadline_s)

    def find_hosts(self, deadline_s: float) -> Hosts:
        """The members by host; those of a host where one cannot map another's memory count as one host each.

        Collective, and so proves that all members have begun the generation.
        """
        if not self._others:
            return ((0,),)
        size, index = len(self._members), self._members.index(self._channel.rank)
        try:
            self.meet(deadline_s)
            digest = hashlib.sha256(self._channel.host.encode()).digest()[:_HOST_BYTES]
            maps = [self._channel.maps(rank) for rank in self._members]
            rows = torch.zeros((size, _HOST_BYTES + size), dtype=torch.uint8)
            rows[index] = torch.tensor([*digest, *maps], dtype=torch.uint8)
            chains = gather_schedule(index, size, rows.shape[1])
            self.wait(self.issue(chains, rows.view(-1)), deadline_s)
        except CommError as error:
            raise Lost(f"the group did not form within {deadline_s:g} s: {error}") from error
        return _by_host([bytes(row[:_HOST_BYTES].tolist()) for row in rows], rows[:, _HOST_BYTES:].bool())

    def issue(self, chains: Sequence[Chain], tensor: Tensor, near: Sequence[int] = ()) -> ExchangeHandle:
        """Begin an exchange; `near` as in `Communicator.exchange`."""
        self._issued += 1
        near = near if tensor.numel() else ()
        stage = self._stage_for(tensor) if near else None
        staged = tensor if stage is None else stage[: tensor.nbytes].view(tensor.dtype).copy_(tensor)
        if staged.device.type != "cpu":
            staged = tensor.cpu()
        handle = self._runner.issue(self._issued, self._members, chains, staged, near)
        handle.home = None if staged is tensor else tensor
        if stage is not None:
            self._staged_in[handle] = stage
        return handle

    def wait(self, handle: ExchangeHandle, deadline_s: float) -> None:
        self._runner.wait(handle, deadline_s)
        if handle.home is not None:
            handle.home.copy_(handle.tensor)
            handle.home = None
            if handle in self._staged_in:
                self._stages.append(self._staged_in.pop(handle))

    def give_up(self, why: str) -> None:
        """Fail all exchanges of this generation, here and on the other members; returns at once, from any thread."""
        if self._others:
            self._runner.give_up(why, self._members)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self._members if rank != self._channel.rank]

    def _stage_for(self, tensor: Tensor) -> Tensor | None:
        """Shared memory for a copy of this tensor; None where it lies there itself."""
        arena = self._channel.arena
        assert arena is not None, "members without an arena share no memory"
        if arena.locate(tensor) is not None:
            return None
        for i, stage in enumerate(self._stages):
            if stage.numel() >= tensor.nbytes:
                return self._stages.pop(i)
        return arena.allocate(max(_STAGE_BYTES, 1 << (tensor.nbytes - 1).bit_length()), torch.uint8)


def _by_host(digests: Sequence[bytes], maps: Tensor) -> Hosts:
    """`maps[i, j]`: whether member i can map the memory of member j."""
    hosts: dict[bytes, list[int]] = {}
    for member, digest in enumerate(digests):
        hosts.setdefault(digest, []).append(member)
    found = [
        (tuple(host),) if all(maps[a, b] for a in host for b in host if a != b) else tuple((m,) for m in host)
        for host in hosts.values()
    ]
    return tuple(sorted(host for parts in found for host in parts))
