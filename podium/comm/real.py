"""The real world: collectives through `torch.distributed`, messages through the channel, time from the wall."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from podium.comm.arena import Arena
from podium.comm.base import Clock, Communicator, Counters, Handle, Message, Meta, nbytes_of
from podium.comm.channel import Channel
from podium.comm.link import ChannelHandle
from podium.comm.schedule import Chain, nbytes_received, nbytes_sent
from podium.comm.schedule_runner import ExchangeHandle, ScheduleRunner
from podium.comm.shared_memory import Address, SharedMemoryGroup, SharedMemoryHandle, can_share
from podium.comm.sockets import Address as SocketAddress
from podium.comm.torch_dist import Group
from podium.errors import CommError, DeadlineExceeded, Lost

Relocate = Callable[[int, SocketAddress], SocketAddress]
"""Where a server is now that was lost at this address; blocks until it is there, raises `Lost` if it never will be."""


_LOCKED_S = 20e-6
"""How long to wait before trying a lock again that is held for a few microseconds."""
_PENDING_S = 1.0
"""How long a worker waits for the last of several servers before it tells which of them have answered."""
_PARTING_S = 10.0
"""How long a worker that ends tries to reach servers that it has never met."""


class _Call(NamedTuple):
    """What was asked, for as long as it may have to be asked again."""

    to: int
    kind: str
    meta: Meta
    body: Sequence[Tensor]
    into: Sequence[Tensor] | None
    landing: Sequence[Tensor] | None


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
        relocate: Relocate | None = None,
        arena: Arena | None = None,
    ) -> None:
        """`relocate`: where a lost server is to be found again; calls to it are then repeated there.

        `arena`: memory that is shared with the others of this host, who then are all there are; collectives go through
        it, and through the group where it is not given.
        """
        super().__init__(rank, tuple(workers), tuple(servers), clock, deadline_s=deadline_s)
        self._group, self._channel, self._relocate = group, channel, relocate
        self.message_bytes = None if channel is None else channel.limits.body_bytes
        self._calls: dict[ChannelHandle, _Call] = {}
        self._counting = threading.Lock()
        self.shares_memory = channel is not None and channel.arena is not None
        self._meets_in = arena
        self._arena = arena if arena is not None or channel is None else channel.arena
        self._lasting: set[int] = set()
        self._on_gpu = False
        self._mixed: bool | None = None  # None: not compared yet in this generation
        self._homes: dict[SharedMemoryHandle, tuple[Tensor, Tensor]] = {}
        self.talks = channel is not None
        self._board: SharedMemoryGroup | None = None
        self._runner = None if channel is None else ScheduleRunner(channel)
        self._exchanges = 0
        self._counter: _Counter | None = None
        if group is not None:
            try:
                self._form()
            except Lost:  # the first exchange fails at once, on all of us, where it can be dealt with
                self._board = None
                group.drop()

    @property
    def shares_host(self) -> bool:  # type: ignore[override]  # it changes with the generation
        return self._board is not None

    def all_reduce(self, tensor: Tensor) -> Handle:
        group = self._need_group()
        self.traffic.count_all_reduce(nbytes_of([tensor]), self.size)
        if self._board is not None:  # also because it misses a lost peer at once, as gloo does not always
            staged = self._staged(tensor)
            return self._shared(self._board.all_reduce(staged), tensor, staged)
        return CollectiveHandle(group, group.all_reduce(tensor))

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        group, place = self._need_group(), self.workers.index(source)
        self.traffic.count_broadcast(nbytes_of([tensor]), self.rank == source, self.size)
        if self._board is not None:
            staged = self._staged(tensor)
            return self._shared(self._board.broadcast(staged, place), tensor, staged)
        return CollectiveHandle(group, group.broadcast(tensor, place))

    def all_gather(self, tensor: Tensor, into: Tensor) -> Handle:
        group = self._need_group()
        self.traffic.count_all_gather(nbytes_of([tensor]), self.size)
        if self._board is not None:
            gathered = self._staged(into)
            return self._shared(self._board.all_gather(self._staged(tensor), gathered), into, gathered)
        return CollectiveHandle(group, group.all_gather(tensor, into))

    def exchange(self, chains: Sequence[Chain], tensor: Tensor) -> Handle:
        self._need_channel()
        assert self._runner is not None
        if not tensor.is_contiguous():
            raise CommError(f"rank {self.rank}: what is exchanged must be contiguous, got stride {tensor.stride()}")
        tensor = tensor.detach().view(-1)
        self.traffic.sent += nbytes_sent(chains, tensor.element_size())
        self.traffic.received += nbytes_received(chains, tensor.element_size())
        self._exchanges += 1
        staged = tensor if tensor.device.type == "cpu" else tensor.cpu()
        handle = self._runner.issue(self._exchanges, self.workers, chains, staged)
        handle.home = None if staged is tensor else tensor
        return handle

    def _draw(self, turn: int, count: int) -> int:
        if self._counter is None:
            self._counter = _counter_of(self._need_group(), self.deadline_s)
        if self._counter.is_gone:  # others would draw from another one
            self._counter.close()
            self._counter = None
            raise Lost(f"rank {self.rank}: the file with the counters was removed")
        return self._counter.draw(self.generation, turn, count)

    # Where some workers have a GPU and others do not, what lies on one goes to the board through host memory.

    def _staged(self, tensor: Tensor) -> Tensor:
        if self._mixed is None:
            self._mixed = self._compare_devices()
        return tensor.cpu() if self._mixed and tensor.is_cuda else tensor

    def _shared(self, handle: SharedMemoryHandle, tensor: Tensor, staged: Tensor) -> SharedMemoryHandle:
        if staged is not tensor:
            self._homes[handle] = (tensor, staged)
        return handle

    def _compare_devices(self) -> bool:
        """Whether workers' parameters lie on devices of different kinds. Collective, once in a generation."""
        assert self._board is not None
        with_gpu = torch.tensor([float(self._on_gpu)])
        self._board.wait(self._board.all_reduce(with_gpu), self.deadline_s)
        return 0 < with_gpu.item() < self.size

    def meet(self) -> None:
        others = {rank: self.addresses[rank] for rank in self.workers if rank != self.rank}
        self._need_channel().connect_all(others)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._on_gpu = self._on_gpu or device.type == "cuda"
        if self._arena is not None and device.type == "cpu":
            return self._arena.allocate(numel, dtype)
        made = super().allocate(numel, dtype, device)
        self._lasting.add(made.untyped_storage().data_ptr())
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
        landing = (
            None if into is None else [t if t.device.type == "cpu" else torch.empty_like(t, device="cpu") for t in into]
        )
        asked = _Call(to, kind, meta, _on_cpu(body), into, landing)
        handle = self._issue(asked, more)
        self._calls[handle] = asked
        return handle

    def _issue(self, asked: _Call, more: bool = False) -> ChannelHandle:
        channel = self._need_channel()
        try:
            return channel.call(asked.to, asked.kind, asked.meta, asked.body, asked.landing, more)
        except Lost as error:
            if self._relocate is None or asked.to not in self.servers:
                raise
            handle = ChannelHandle(asked.to, asked.kind, asked.landing)
            handle.error = error  # to be dealt with when it is waited for: an issue never waits
            return handle

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
        calls = [h for h in handles if isinstance(h, ChannelHandle)]
        for handle in handles:
            if isinstance(handle, CollectiveHandle):
                self._need_group().wait(handle.key)
            elif isinstance(handle, SharedMemoryHandle):
                self._wait_shared(handle, deadline_s)
            elif isinstance(handle, ExchangeHandle):
                assert self._runner is not None
                self._runner.wait(handle, deadline_s)
                if handle.home is not None:
                    handle.home.copy_(handle.tensor)
        if not calls:
            return [None] * len(handles)
        answers = self._answers(calls, deadline_s)
        for call, message in answers.items():
            self.traffic.received += nbytes_of(message.body)
            asked = self._calls.pop(call)
            for mine, landed in zip(asked.into or (), asked.landing or (), strict=True):
                if mine is not landed:
                    mine.copy_(landed)
        return [answers.get(h) if isinstance(h, ChannelHandle) else None for h in handles]

    def _answers(self, calls: Sequence[ChannelHandle], deadline_s: float) -> dict[ChannelHandle, Message]:
        """One reply per call; calls to a server that was lost are made again where it was restored.

        All of them, also what it had answered: a push is several calls, and what was restored may have none of it.
        """
        channel = self._need_channel()
        current = {call: call for call in calls}
        until = time.monotonic() + deadline_s
        while True:
            left_s = max(0.0, until - time.monotonic())
            try:
                came = channel.wait(list(current.values()), min(left_s, _PENDING_S))
                return dict(zip(calls, came, strict=True))
            except DeadlineExceeded as error:
                if left_s <= _PENDING_S:
                    raise DeadlineExceeded(str(error).replace(f"{left_s:g} s", f"{deadline_s:g} s")) from None
                self._tell_pending([(self._calls[call], current[call]) for call in calls])
            except Lost:
                failed = [call for call in calls if current[call].error is not None]
                if self._relocate is None or any(self._calls[call].to not in self.servers for call in failed):
                    for call in calls:
                        self._calls.pop(call, None)
                    raise
                lost = sorted({self._calls[call].to for call in failed})
                for server in lost:
                    self.find(server)
                for call in calls:
                    if self._calls[call].to in lost:
                        current[call] = self._issue(self._calls[call])

    def _tell_pending(self, calls: Sequence[tuple[_Call, ChannelHandle]]) -> None:
        """Where some servers have answered and others have not, tell these: they may have been restored in between.

        A server that was lost right after it had answered a worker cannot know, and the worker will not ask again.
        """
        answers = [handle.message for _, handle in calls if handle.message is not None]
        for asked, handle in calls if answers and self._relocate is not None else ():
            if not handle.done and asked.kind == "push":
                told: Meta = {"lease": asked.meta["lease"], "dropped": any(a.meta.get("dropped") for a in answers)}
                with contextlib.suppress(CommError):  # it is gone, and will be looked for
                    self._need_channel().send(asked.to, "pending", told)

    def find(self, server: int) -> None:
        """Learn where a lost server is now; blocks until it is there."""
        assert self._relocate is not None
        channel = self._need_channel()
        channel.introduce({server: self._relocate(server, channel.address_book.get(server, ""))})

    def _wait_shared(self, handle: SharedMemoryHandle, deadline_s: float) -> None:
        if self._board is None and not handle.done:
            raise Lost("a collective failed: the group was dropped")
        if self._board is not None:
            self._board.wait(handle, deadline_s)
        if handle in self._homes:
            home, staged = self._homes.pop(handle)
            home.copy_(staged)

    def abandon(self) -> None:
        if self._board is not None:
            self._board.close()
        if self._runner is not None and self.size > 1:
            self._runner.give_up("the group was dropped", self.workers)
        self._need_group().drop()

    def regroup(
        self,
        generation: int,
        members: Sequence[int],
        servers: Sequence[int] | None = None,
        addresses: Mapping[int, str] | None = None,
    ) -> None:
        self.generation, self.workers = generation, tuple(members)
        self.servers = self.servers if servers is None else tuple(servers)
        if addresses and self._channel is not None:
            self._channel.introduce(addresses)
        self._form()

    def _form(self) -> None:
        """Become a group again: the backend's, the host's, and that of exchanges by schedule."""
        group, self._exchanges, self._mixed = self._need_group(), 0, None
        self._homes.clear()
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._runner is not None:
            self._runner.form(self.generation)
        group.form(self.generation, self.index, self.size)
        if self._meets_in is not None and self.size > 1 and can_share() and group.backend != "nccl":
            self._board = self._open_board(group, self._meets_in)

    def _open_board(self, group: Group, arena: Arena) -> SharedMemoryGroup | None:
        """Meet the others of this host in memory; all of them, or nobody does."""
        board = SharedMemoryGroup(arena, self.deadline_s, self._lasting)
        words = group.tell_all(self.generation, self.index, self.size, json.dumps(board.address.to_json()))
        found = {rank: Address.from_json(json.loads(word)) for rank, word in zip(self.workers, words, strict=True)}
        refused = torch.zeros(1)
        try:
            board.meet(self.rank, {rank: address for rank, address in found.items() if rank != self.rank})
        except (OSError, ValueError):
            refused += 1
        group.wait(group.all_reduce(refused))
        if refused.item() > 0:
            board.close()
            return None
        return board

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._group is not None and self._channel is not None:
            # A server that was never seeded has met no worker, and would wait for ever for them to depart.
            told = {"generation": self.generation, "workers": list(self.workers)}
            self._channel.part_from(self.servers, "bye", told, _PARTING_S)
        if self._group is not None:
            self._group.drop()
        if self._counter is not None:
            self._counter.close()
        if self._channel is not None:
            self._channel.close()

    def _need_group(self) -> Group:
        if self._group is None:
            raise CommError(f"rank {self.rank} is a server and takes part in no collective")
        return self._group

    def _need_channel(self) -> Channel:
        if self._channel is None:
            raise CommError(
                f"rank {self.rank} has no channel: this strategy asked for no servers and its workers do not talk"
            )
        return self._channel


class _Counter(ABC):
    """Where the workers' counters are kept."""

    @abstractmethod
    def draw(self, generation: int, turn: int, count: int) -> int: ...

    @property
    def is_gone(self) -> bool:
        """Whether others can find it no more."""
        return False

    def close(self) -> None:
        """Let go of it."""


@final
class _FileCounter(_Counter):
    """In a small file of a file system that all workers share, a few microseconds a draw.

    A store in a file could count too, but it never forgets a word: it would grow with every draw. The lock of a
    worker that is killed is let go of by the system; one that is stopped while it holds it costs others the deadline.
    """

    _ONE = struct.Struct("<qqq")  # generation, turn, how far

    def __init__(self, path: Path, deadline_s: float) -> None:
        self._path, self._deadline_s = path, deadline_s
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def draw(self, generation: int, turn: int, count: int) -> int:
        self._lock()
        try:
            kept = os.pread(self._file, self._ONE.size * Counters.KEPT, 0)
            counters = Counters({(g, t): value for g, t, value in self._ONE.iter_unpack(kept)})
            before = counters.draw(generation, turn, count)
            os.pwrite(self._file, b"".join(self._ONE.pack(*key, value) for key, value in counters.values.items()), 0)
            return before
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @property
    def is_gone(self) -> bool:
        return os.fstat(self._file).st_nlink == 0

    def _lock(self) -> None:
        until = time.monotonic() + self._deadline_s
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise Lost(f"{self._path} was locked by another worker for {self._deadline_s:g} s") from None
            time.sleep(_LOCKED_S)

    def close(self) -> None:
        os.close(self._file)


@final
class _StoreCounter(_Counter):
    """In the store over which the workers have met: a round trip to whoever holds it, within the store's timeout."""

    def __init__(self, store: Any) -> None:
        self._store, self._known = store, Counters()

    def draw(self, generation: int, turn: int, count: int) -> int:
        before = set(self._known.values)
        self._known.draw(generation, turn, count)
        try:
            drawn = int(self._store.add(_key(generation, turn), count)) - count
            if drawn == 0:  # one of us tidies up
                for key in before - self._known.values.keys():
                    self._store.delete_key(_key(*key))
        except RuntimeError as error:  # torch's own are RuntimeErrors too
            raise Lost(f"the store with the counters is out of reach: {str(error).partition(chr(10))[0]}") from error
        return drawn


def _key(generation: int, turn: int) -> str:
    return f"draw-{generation}-{turn}"


def _counter_of(group: Group, deadline_s: float) -> _Counter:
    """Beside the store where that is a file, in it where it is a service."""
    store = group.store
    path = getattr(store, "path", None)
    return _StoreCounter(store) if path is None else _FileCounter(Path(f"{path}-counters"), deadline_s)


def _on_cpu(body: Sequence[Tensor]) -> list[Tensor]:
    return [t if t.device.type == "cpu" else t.cpu() for t in body]
