"""Collectives among the workers of a generation: in shared memory where all are on one host, else by the backend."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from podium.comm.base import Handle
from podium.comm.real.arena import Arena
from podium.comm.real.process_group import Group
from podium.comm.real.shared_memory import Address, SharedMemoryGroup, SharedMemoryHandle, can_share
from podium.errors import Lost


@final
class CollectiveHandle(Handle):
    """Identifies an exchange of the process group, which alone holds its work object."""

    def __init__(self, group: Group, key: int) -> None:
        self._group, self.key = group, key

    @property
    def done(self) -> bool:
        return self._group.is_done(self.key)


@final
class WorkerGroup:
    """One worker's part in the collectives.

    Where only some workers have a GPU, tensors of a GPU are copied to host memory before they are shared.
    """

    def __init__(self, group: Group, arena: Arena | None, deadline_s: float) -> None:
        """`arena`: memory that all workers share, where all are on one host; otherwise None."""
        self._group, self._arena, self._deadline_s = group, arena, deadline_s
        self._shared: SharedMemoryGroup | None = None
        self._size = 1
        self._lasting: set[int] = set()
        self._on_gpu = False
        self._mixed: bool | None = None  # None: not compared yet in this generation
        self._homes: dict[SharedMemoryHandle, tuple[Tensor, Tensor]] = {}

    @property
    def in_memory(self) -> bool:
        """Whether collectives go through shared memory."""
        return self._shared is not None

    @property
    def backend(self) -> str:
        """Of the present generation: `gloo` or `nccl`."""
        return self._group.backend

    @property
    def store(self) -> Any:
        return self._group.store

    def keep(self, tensor: Tensor) -> None:
        """This tensor's memory stays allocated for the whole run."""
        self._on_gpu = self._on_gpu or tensor.is_cuda
        self._lasting.add(tensor.untyped_storage().data_ptr())

    def all_reduce(self, tensor: Tensor) -> Handle:
        if self._shared is None:
            return CollectiveHandle(self._group, self._group.all_reduce(tensor))
        staged = self._staged(tensor)  # unlike gloo, shared memory always notices a lost peer at once
        return self._landing(self._shared.all_reduce(staged), tensor, staged)

    def broadcast(self, tensor: Tensor, place: int) -> Handle:
        """From the worker at this index of the generation."""
        if self._shared is None:
            return CollectiveHandle(self._group, self._group.broadcast(tensor, place))
        staged = self._staged(tensor)
        return self._landing(self._shared.broadcast(staged, place), tensor, staged)

    def all_gather(self, tensor: Tensor, into: Tensor) -> Handle:
        if self._shared is None:
            return CollectiveHandle(self._group, self._group.all_gather(tensor, into))
        gathered = self._staged(into)
        return self._landing(self._shared.all_gather(self._staged(tensor), gathered), into, gathered)

    def wait(self, handle: CollectiveHandle | SharedMemoryHandle, deadline_s: float) -> None:
        if isinstance(handle, CollectiveHandle):
            self._group.wait(handle.key)
            return
        if self._shared is not None:
            self._shared.wait(handle, deadline_s)
        elif not handle.done:
            raise Lost("a collective failed: the group was dropped")
        if handle in self._homes:
            home, staged = self._homes.pop(handle)
            home.copy_(staged)

    def form(self, generation: int, rank: int, workers: Sequence[int]) -> None:
        """Form the group of this generation; raises Lost where a member is gone."""
        self._size, self._mixed = len(workers), None
        self._homes.clear()
        self._close_shared()
        place = workers.index(rank)
        self._group.form(generation, place, self._size)
        if self._arena is not None and self._size > 1 and can_share() and self._group.backend != "nccl":
            shared = SharedMemoryGroup(self._arena, self._deadline_s, self._lasting)
            texts = self._group.tell_all(generation, place, self._size, json.dumps(shared.address.to_json()))
            self._shared = self._met(shared, rank, dict(zip(workers, texts, strict=True)))

    def _met(self, shared: SharedMemoryGroup, rank: int, texts: dict[int, str]) -> SharedMemoryGroup | None:
        """The group in shared memory, once all workers have opened it; None on all workers where one of them cannot."""
        found = {other: Address.from_json(json.loads(text)) for other, text in texts.items() if other != rank}
        refused = torch.zeros(1)
        try:
            shared.meet(rank, found)
        except (OSError, ValueError):
            refused += 1
        self._group.wait(self._group.all_reduce(refused))
        if refused.item() > 0:
            shared.close()
            return None
        return shared

    def interrupt(self) -> None:
        """Fail the exchanges under way of this worker; for any thread, while another waits for them."""
        self._group.interrupt()

    def abandon(self) -> None:
        """Fail all exchanges under way, on this and the other workers."""
        if self._shared is not None:
            self._shared.close()
        self._group.drop()

    def close(self) -> None:
        self._close_shared()
        self._group.drop()

    def _close_shared(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _staged(self, tensor: Tensor) -> Tensor:
        if self._mixed is None:
            self._mixed = self._compare_devices()
        return tensor.cpu() if self._mixed and tensor.is_cuda else tensor

    def _landing(self, handle: SharedMemoryHandle, tensor: Tensor, staged: Tensor) -> SharedMemoryHandle:
        if staged is not tensor:
            self._homes[handle] = (tensor, staged)
        return handle

    def _compare_devices(self) -> bool:
        """Whether only some workers' parameters are on a GPU. Collective, once in a generation."""
        assert self._shared is not None
        with_gpu = torch.tensor([float(self._on_gpu)])
        self._shared.wait(self._shared.all_reduce(with_gpu), self._deadline_s)
        return 0 < with_gpu.item() < self._size
