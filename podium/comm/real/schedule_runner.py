"""Exchanges by schedule over the channel: parts of tensors from worker to worker, with no thread waiting in between.

The thread that received a part adds it or puts it in place, and then posts what can be sent next. So an exchange that
was issued runs by itself, also while its rank computes. A `put` is received straight into the tensor.

A message may arrive before its exchange was issued on this rank: it waits, up to the channel's limits. When a worker is
lost, workers that wait for it fail at once and notify the other workers, which may not have noticed yet.

Members of one host may use each other's tensors (`near`). Each then notifies the others where its tensor lies (`HERE`),
and once it has made all its moves (`WRITTEN`): the exchange is done when all of them have. After a failure they may
still be writing, until all members have formed the next generation.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, final

from torch import Tensor

from podium.comm.base import Handle, Meta
from podium.comm.real.frames import GIVE_UP, HERE, MOVE, WRITTEN, FrameError, Header
from podium.comm.schedule import RECEIVING, Chain, Key, Running
from podium.errors import CommError, Lost

if TYPE_CHECKING:
    from podium.comm.real.channel import Channel

Number = tuple[int, int]
"""Identifies an exchange: generation, and its number in the generation."""


@final
class ExchangeHandle(Handle):
    """An exchange under way."""

    def __init__(self, number: Number, members: Sequence[int], tensor: Tensor, near: Sequence[int] = ()) -> None:
        self.number, self.members, self.tensor, self.near = number, members, tensor, near
        self.unwritten = {members[index] for index in near}
        """Ranks of this host that have moves to make."""
        self.moved = False
        """Whether this rank has made all its moves."""
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
        lock = threading.Lock()
        # Apart, so that messages do not wake the thread that waits for the end of an exchange.
        self._changed, self._ended = threading.Condition(lock), threading.Condition(lock)
        self._open: dict[Number, ExchangeHandle] = {}
        self._early: dict[Number, list[tuple[int, Key, Tensor]]] = defaultdict(list)
        self._early_bytes = 0
        self._coming: dict[int, int] = {}  # by source: bytes of `_early_bytes` that are being received
        self._generation = 0
        self._gone: set[int] = set()
        self._landing: dict[int, Number] = {}  # by source: the exchange whose tensor is being received into
        self._given_up: dict[int, str] = {}  # generation -> why
        # By source: tensors of HERE, and None for WRITTEN, that came before their exchange was issued.
        self._notes: dict[Number, list[tuple[int, Tensor | None]]] = defaultdict(list)
        self._driving: Counter[Number] = Counter()  # threads that make moves of an exchange

    # Used by the communicator.

    def form(self, generation: int) -> None:
        """Begin a generation: drop older exchanges, and wait until nothing more is received into their tensors."""
        with self._changed:
            self._generation = generation
            self._gone.clear()
            for number in [n for n in self._early if n[0] < generation]:
                self._early_bytes -= sum(part.nbytes for _, _, part in self._early.pop(number))
            for number in [n for n in self._notes if n[0] < generation]:
                del self._notes[number]
            self._changed.notify_all()
        self._fail(lambda handle: handle.number[0] < generation, "the group was dropped")

        def is_quiet() -> bool:
            return all(n[0] >= generation for n in (*self._landing.values(), *self._driving))

        with self._changed:
            deadline_s = self._channel.deadline_s
            if not self._changed.wait_for(is_quiet, deadline_s):
                raise Lost(f"ranks {sorted(self._landing)} were in the middle of a message for {deadline_s:g} s")

    def issue(
        self,
        number: int,
        members: Sequence[int],
        chains: Sequence[Chain],
        tensor: Tensor,
        near: Sequence[int] = (),
    ) -> ExchangeHandle:
        """Begin this rank's part of an exchange among these ranks; never waits.

        `near`: the other members that use this tensor, and whose tensors this rank uses. It must then lie in the arena.
        """
        key = (self._generation, number)
        handle = ExchangeHandle(key, members, tensor, near)

        def wanted() -> bool:
            # A failed exchange may have much waiting for a slow link, and the next generation forms over the same link.
            return handle.error is None

        def post(peer: int, name: Key, part: Tensor) -> None:
            meta: Meta = {"of": key, "name": name}
            self._channel.post(members[peer], MOVE, meta, part, partial(went, peer), wanted=wanted)

        def went(peer: int, well: bool) -> None:
            if well:
                running.sent()
            else:
                self._fail(lambda other: other is handle, f"rank {members[peer]} is gone")

        def finished() -> None:
            self._tell_near(handle, WRITTEN, None)
            with self._changed:
                handle.moved = True
                self._check_over(handle)

        running = handle.running = Running(chains, tensor, post, finished, near)
        with self._changed:
            why = self._given_up.get(key[0])
            gone = sorted(self._gone & self._needed(handle, chains)) if self._gone else []
            if why is None and gone:
                why = f"rank {gone[0]} is gone"
            handle.error = why
            if why is not None:
                return handle
            self._open[key] = handle
            early = self._early.pop(key, [])
            self._early_bytes -= sum(part.nbytes for _, _, part in early)
            notes = self._notes.pop(key, [])
            self._changed.notify_all()
        self._tell_near(handle, HERE, tensor)
        self._drive(handle, running.start)
        for source, name, part in early:
            self._drive(handle, partial(running.arrived, _index(handle, source), name, part))
        for source, theirs in notes:
            self._take_note(handle, source, theirs)
        return handle

    def _needed(self, handle: ExchangeHandle, chains: Sequence[Chain]) -> set[int]:
        """Ranks that this exchange still has to reach or hear from: all but those whose messages have come already."""
        came = {(source, *name) for source, name, _ in self._early.get(handle.number, ())}
        moves = [(handle.members[move.peer], c, move) for c, chain in enumerate(chains) for move in chain]
        missing = {r for r, c, m in moves if m.kind == "send" or (m.kind in RECEIVING and (r, c, m.round) not in came)}
        return missing | handle.unwritten

    def _tell_near(self, handle: ExchangeHandle, kind: str, tensor: Tensor | None) -> None:
        for index in handle.near:
            rank = handle.members[index]
            try:
                self._channel.post(rank, kind, {"of": handle.number}, tensor, _ignore, in_memory=tensor is not None)
            except CommError:
                self._fail(lambda other: other is handle, f"rank {rank} is gone")

    def _check_over(self, handle: ExchangeHandle) -> None:
        """Called under the lock."""
        if handle.moved and not handle.unwritten and handle.error is None:
            self._open.pop(handle.number, None)
            handle.finished = True
            self._ended.notify_all()

    def wait(self, handle: ExchangeHandle, deadline_s: float) -> None:
        with self._ended:
            in_time = self._ended.wait_for(lambda: handle.done, deadline_s)
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
        strangers = peers - self._channel.met - {self._channel.rank}
        self._pass_on(peers & self._channel.peers, generation, why)  # all others are gone
        if strangers:  # dialling a host that is gone would take until the deadline
            args = (strangers, generation, why)
            threading.Thread(target=self._pass_on, args=args, name="podium-give-up", daemon=True).start()

    def _pass_on(self, peers: Iterable[int], generation: int, why: str) -> None:
        for peer in sorted(peers):
            with contextlib.suppress(CommError):
                self._channel.post(peer, GIVE_UP, {"generation": generation, "why": why}, None, _ignore)

    # Used by the links, on their receiving threads.

    def place(self, header: Header) -> Sequence[Tensor] | None:
        """Where the elements of a message go; blocks while too many bytes wait for exchanges not issued yet."""
        if header.kind != MOVE:
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
        if header.kind in (HERE, WRITTEN):
            return self._noted(header, body)
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
        assert handle.running is not None
        self._drive(handle, partial(handle.running.arrived, _index(handle, header.source), name, body[0]))

    def _noted(self, header: Header, body: Sequence[Tensor]) -> None:
        """Another member of this host has issued an exchange, or made all its moves."""
        number = _pair(header, "of")
        in_memory = [spec.place is not None and len(spec.shape) == 1 for spec in header.tensors]
        if in_memory != ([True] if header.kind == HERE else []):
            raise FrameError(f"{HERE!r} must bring one flat tensor in shared memory, and {WRITTEN!r} none")
        note = body[0] if header.kind == HERE else None
        with self._changed:
            handle = self._open.get(number)
            if handle is None:
                if number[0] >= self._generation and self._given_up.get(number[0]) is None:
                    self._notes[number].append((header.source, note))
                return
        self._take_note(handle, header.source, note)

    def _take_note(self, handle: ExchangeHandle, source: int, tensor: Tensor | None) -> None:
        """`tensor`: of HERE; None: WRITTEN."""
        index, running = _index(handle, source), handle.running
        if index not in handle.near:
            raise FrameError(f"rank {source} is not near in exchange {handle.number}")
        assert running is not None
        if tensor is not None:
            return self._drive(handle, partial(running.meet, index, tensor))
        with self._changed:
            handle.unwritten.discard(source)
            self._check_over(handle)

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
            if rank in handle.unwritten:
                return True
            return rank in handle.members and handle.running.misses(_index(handle, rank))

        self._fail(misses, f"rank {rank} is gone")

    # Inside.

    def _drive(self, handle: ExchangeHandle, move: Callable[[], None]) -> None:
        with self._changed:
            if handle.done:
                return
            self._driving[handle.number] += 1
        try:
            move()
        except Lost as error:
            self._fail(lambda other: other is handle, str(error))
        except CommError as error:
            raise FrameError(str(error)) from None
        finally:
            with self._changed:
                self._driving[handle.number] -= 1
                if not self._driving[handle.number]:
                    del self._driving[handle.number]
                self._changed.notify_all()

    def _fail(self, which: Callable[[ExchangeHandle], bool], why: str) -> None:
        with self._changed:
            failed = [handle for handle in list(self._open.values()) if which(handle)]
            for handle in failed:
                handle.error = why
                self._open.pop(handle.number, None)
                assert handle.running is not None
                handle.running.halt()
            self._ended.notify_all()


def _ignore(_well: bool) -> None:
    pass


def _index(handle: ExchangeHandle, rank: int) -> int:
    if rank not in handle.members:
        raise FrameError(f"rank {rank} takes part in no exchange among ranks {list(handle.members)}")
    return handle.members.index(rank)


def _parse(header: Header) -> tuple[Number, Key]:
    """The exchange and the message that a header names; checked, since it comes from a peer."""
    return _pair(header, "of"), _pair(header, "name")


def _pair(header: Header, name: str) -> tuple[int, int]:
    pair = header.meta.get(name)
    if not isinstance(pair, list) or len(pair) != 2 or any(type(n) is not int or n < 0 for n in pair):
        raise FrameError(f"{header.kind!r} must name its exchange and itself by two whole numbers each")
    return pair[0], pair[1]
