"""Exchanges by schedule over the channel: parts of tensors from worker to worker, with no thread waiting in between.

The thread that received a part adds it or puts it in place, and then posts what can be sent next. So an exchange that
was issued runs by itself, also while its rank computes. A `put` is received straight into the tensor.

A message may arrive before its exchange was issued on this rank: it waits, up to the channel's limits. When a worker is
lost, workers that wait for it fail at once and notify the other workers, which may not have noticed yet.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, final

from torch import Tensor

from podium.comm.base import Handle, Meta
from podium.comm.real.frames import GIVE_UP, MOVE, FrameError, Header
from podium.comm.schedule import Chain, Key, Running
from podium.errors import CommError, Lost

if TYPE_CHECKING:
    from podium.comm.real.channel import Channel

Number = tuple[int, int]
"""Identifies an exchange: generation, and its number in the generation."""


@final
class ExchangeHandle(Handle):
    """An exchange under way."""

    def __init__(self, number: Number, members: Sequence[int], tensor: Tensor) -> None:
        self.number, self.members, self.tensor = number, members, tensor
        self.home: Tensor | None = None  # the tensor on the device, where `tensor` is a host copy of it
        self.running: Running | None = None
        self.finished = False
        self.error: str | None = None

    @property
    def done(self) -> bool:
        return self.finished or self.error is not None


class ScheduleRunner:
    """One endpoint's exchanges."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._changed = threading.Condition(threading.Lock())
        self._open: dict[Number, ExchangeHandle] = {}
        self._early: dict[Number, list[tuple[int, Key, Tensor]]] = defaultdict(list)
        self._early_bytes = 0
        self._coming: dict[int, int] = {}  # by source: bytes of `_early_bytes` that are being received
        self._generation = 0
        self._gone: set[int] = set()
        self._landing: dict[int, Number] = {}  # by source: the exchange whose tensor is being received into
        self._given_up: dict[int, str] = {}  # generation -> why
        channel.runner = self

    # Used by the communicator.

    def form(self, generation: int) -> None:
        """Begin a generation: drop older exchanges, and wait until nothing more is received into their tensors."""
        with self._changed:
            self._generation = generation
            self._gone.clear()
            for number in [n for n in self._early if n[0] < generation]:
                self._early_bytes -= sum(part.nbytes for _, _, part in self._early.pop(number))
            self._changed.notify_all()
        self._fail(lambda handle: handle.number[0] < generation, "the group was dropped")
        with self._changed:
            deadline_s = self._channel.deadline_s
            if not self._changed.wait_for(lambda: all(n[0] >= generation for n in self._landing.values()), deadline_s):
                raise Lost(f"ranks {sorted(self._landing)} were in the middle of a message for {deadline_s:g} s")

    def issue(self, number: int, members: Sequence[int], chains: Sequence[Chain], tensor: Tensor) -> ExchangeHandle:
        """Begin this rank's part of an exchange among these ranks; never waits."""
        key = (self._generation, number)
        handle = ExchangeHandle(key, members, tensor)

        def post(peer: int, name: Key, part: Tensor) -> None:
            meta: Meta = {"of": key, "name": name}
            self._channel.post(members[peer], MOVE, meta, part, partial(went, peer))

        def went(peer: int, well: bool) -> None:
            if well:
                running.sent()
            else:
                self._fail(lambda other: other is handle, f"rank {members[peer]} is gone")

        def finished() -> None:
            with self._changed:
                self._open.pop(key, None)
                handle.finished = True
                self._changed.notify_all()

        running = handle.running = Running(chains, tensor, post, finished)
        with self._changed:
            why = self._given_up.get(key[0])
            needed = {members[move.peer] for chain in chains for move in chain}
            gone = sorted(self._gone & needed)
            if why is None and gone:
                why = f"rank {gone[0]} is gone"
            handle.error = why
            if why is not None:
                return handle
            self._open[key] = handle
            early = self._early.pop(key, [])
            self._early_bytes -= sum(part.nbytes for _, _, part in early)
            self._changed.notify_all()
        self._drive(handle, None)
        for source, name, part in early:
            self._drive(handle, (source, name, part))
        return handle

    def wait(self, handle: ExchangeHandle, deadline_s: float) -> None:
        with self._changed:
            in_time = self._changed.wait_for(lambda: handle.done, deadline_s)
        if not in_time:
            assert handle.running is not None
            late = [handle.members[peer] for peer in handle.running.waits_for]
            self.give_up(f"exchange {handle.number[1]} did not end in {deadline_s:g} s; ranks {late} are missing")
        if handle.error is not None:
            raise Lost(f"a collective failed: {handle.error}")

    def give_up(self, why: str, members: Sequence[int] = ()) -> None:
        """Fail all exchanges of this generation, and notify the other workers."""
        generation = self._generation
        self._given_up.setdefault(generation, why)
        peers = set(members)
        with self._changed:
            for handle in self._open.values():
                peers.update(handle.members)
        self._fail(lambda handle: handle.number[0] == generation, why)
        for peer in sorted(peers - {self._channel.rank}):
            with contextlib.suppress(CommError):
                self._channel.post(peer, GIVE_UP, {"generation": generation, "why": why}, None, _ignore)

    # Used by the links, on their receiving threads.

    def place(self, header: Header) -> Sequence[Tensor] | None:
        """Where the elements of a message go; blocks while too many bytes wait for exchanges not issued yet."""
        if header.kind == GIVE_UP:
            return None
        number, name = _parse(header)
        if len(header.tensors) != 1 or len(header.tensors[0].shape) != 1:
            raise FrameError(f"{MOVE!r} must bring one flat tensor")
        spec = header.tensors[0]
        with self._changed:
            handle = self._open.get(number)
            if handle is None and number[0] >= self._generation:
                handle = self._make_room(header.source, number, spec.nbytes)
        if handle is None:
            return None
        if spec.dtype != handle.tensor.dtype:
            raise FrameError(f"rank {header.source} exchanges {spec.dtype} where we exchange {handle.tensor.dtype}")
        assert handle.running is not None
        try:
            landing = handle.running.landing(_index(handle, header.source), name, spec.shape[0])
        except CommError as error:
            raise FrameError(str(error)) from None
        if landing is None:
            return None
        with self._changed:
            if handle.done:  # it failed meanwhile, and its tensor must not be written any more
                return None
            self._landing[header.source] = number
        return [landing]

    def _make_room(self, source: int, number: Number, nbytes: int) -> ExchangeHandle | None:
        limit, deadline_s = self._channel.limits.inbox_bytes, self._channel.deadline_s
        fits = self._changed.wait_for(
            lambda: number in self._open or self._early_bytes == 0 or self._early_bytes + nbytes <= limit, deadline_s
        )
        if not fits:
            raise FrameError(f"exchange {number} was not begun here for {deadline_s:g} s")
        handle = self._open.get(number)
        if handle is None:
            self._early_bytes += nbytes
            self._coming[source] = nbytes
        return handle

    def _give_room_back(self, source: int) -> int:
        """A message was received, or never will be: release its room; returns the bytes."""
        nbytes = self._coming.pop(source, 0)
        self._early_bytes -= nbytes
        return nbytes

    def arrived(self, header: Header, body: Sequence[Tensor]) -> None:
        if header.kind == GIVE_UP:
            return self._heard(header)
        number, name = _parse(header)
        with self._changed:
            self._landing.pop(header.source, None)
            room = self._give_room_back(header.source)
            self._changed.notify_all()
            handle = self._open.get(number)
            if handle is None:
                if number[0] >= self._generation and self._given_up.get(number[0]) is None:
                    self._early[number].append((header.source, name, body[0]))
                    self._early_bytes += room
                return
        self._drive(handle, (header.source, name, body[0]))

    def _heard(self, header: Header) -> None:
        generation, why = header.meta.get("generation"), str(header.meta.get("why"))
        if type(generation) is not int:
            raise FrameError(f"{GIVE_UP!r} must name a generation")
        if generation >= self._generation:
            self._given_up.setdefault(generation, f"rank {header.source} gave up: {why}")
            self._fail(lambda handle: handle.number[0] == generation, self._given_up[generation])

    def departed(self, rank: int) -> None:
        """A connection has ended: exchanges that still wait for that peer fail."""
        with self._changed:
            self._gone.add(rank)
            self._landing.pop(rank, None)
            self._give_room_back(rank)
            self._changed.notify_all()

        def misses(handle: ExchangeHandle) -> bool:
            assert handle.running is not None
            return rank in handle.members and handle.running.misses(_index(handle, rank))

        self._fail(misses, f"rank {rank} is gone")

    # Inside.

    def _drive(self, handle: ExchangeHandle, message: tuple[int, Key, Tensor] | None) -> None:
        running = handle.running
        assert running is not None
        try:
            if message is None:
                running.start()
            else:
                source, name, part = message
                running.arrived(_index(handle, source), name, part)
        except Lost as error:
            self._fail(lambda other: other is handle, str(error))
        except CommError as error:
            raise FrameError(str(error)) from None

    def _fail(self, which: Callable[[ExchangeHandle], bool], why: str) -> None:
        with self._changed:
            failed = [handle for handle in list(self._open.values()) if which(handle)]
            for handle in failed:
                handle.error = why
                self._open.pop(handle.number, None)
            self._changed.notify_all()


def _ignore(_well: bool) -> None:
    pass


def _index(handle: ExchangeHandle, rank: int) -> int:
    if rank not in handle.members:
        raise FrameError(f"rank {rank} takes part in no exchange among ranks {list(handle.members)}")
    return handle.members.index(rank)


def _parse(header: Header) -> tuple[Number, Key]:
    """The exchange and the message that a header names; checked, since it comes from a peer."""
    numbers = header.meta.get("of"), header.meta.get("name")
    for pair in numbers:
        if not isinstance(pair, list) or len(pair) != 2 or any(type(n) is not int or n < 0 for n in pair):
            raise FrameError(f"{MOVE!r} must name its exchange and itself by two whole numbers each")
    (generation, number), (chain, round_) = numbers  # type: ignore[misc]  # checked above
    return (generation, number), (chain, round_)
