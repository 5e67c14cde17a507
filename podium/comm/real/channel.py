"""The point-to-point tensor channel: calls, replies and messages between endpoints, over TCP or Unix sockets.

Any two endpoints share one connection, used both ways, so its end fails pending calls on both sides and reaches a
receiver as a message, after all that came before. The endpoint that needs the connection first dials. When both dial at
once, the higher rank's dial wins: it answers the other's with BUSY, and the lower rank waits for it.

Each connection has a thread that receives; a second one, started when first needed, sends frames that cannot be sent at
once. Bodies are received straight into the caller's `into`, into the sink's tensors, or into new ones.

The inbox is bounded. When it is full, connections are no longer read, and their senders block. Replies queue behind the
messages of the same connection, so an endpoint that expects many messages must keep receiving.
"""

from __future__ import annotations

import functools
import itertools
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import final

from torch import Tensor

from podium.comm.base import DEPARTED, Message, Meta, Traffic
from podium.comm.real import frames
from podium.comm.real.arena import Arena
from podium.comm.real.frames import Limits, Refused, Sink
from podium.comm.real.link import CLOSE_S, ChannelHandle, Inbox, Link, Waiter
from podium.comm.real.listener import Listener
from podium.comm.real.schedule_runner import ScheduleRunner
from podium.comm.real.sockets import (
    SHORTEST_VANISHED_S,
    VANISHED_S,
    Address,
    BothWays,
    Stream,
    address_from,
    resolve,
    shut,
    tune,
)
from podium.comm.real.tls import Guard, Tls, TlsStream
from podium.errors import CommError, ConfigError, DeadlineExceeded, Lost

_HANDSHAKE_S = 5.0
_RETRY_S = 0.05
_HEALED_S = 2.5
"""How long the socket of an endpoint that this one never connected to may be missing."""


@final
class Channel:
    """One endpoint's connections to the other endpoints. All methods may be used from any thread."""

    def __init__(
        self,
        rank: int,
        *,
        secret: bytes,
        listen: Address,
        limits: Limits | None = None,
        deadline_s: float = 60.0,
        sink: Sink | None = None,
        arena: Arena | None = None,
        tls: Tls | None = None,
        sums: bool = False,
        vanished_s: float = VANISHED_S,
    ) -> None:
        """Listens at once; with an address of both ways, peers of the same host are dialled by their Unix sockets.

        `sink` is called on a receiving thread and must not block; replies do not use it.

        Bodies and `into` of calls that lie in `arena` are not copied on the way to peers that share this host's memory.
        With `tls`, all TCP connections are encrypted and both sides show a certificate. `sums`: bodies that go to
        another host without TLS carry a checksum. A peer whose host acknowledges nothing for `vanished_s`, or for the
        deadline, has departed.
        """
        if not deadline_s > 0:
            raise ConfigError(f"channel of rank {rank}: deadline_s must be above 0, got {deadline_s}")
        self.rank, self.deadline_s, self.sink, self.arena = rank, deadline_s, sink, arena
        self.sums = sums
        self.vanished_s = max(SHORTEST_VANISHED_S, min(vanished_s, deadline_s))
        """A peer whose host acknowledges nothing for this long has departed."""
        self.limits = limits or Limits()
        self.inbox = Inbox(self.limits)
        both = BothWays.of(listen)
        self.host = "" if both is None else both.host
        """Which of several hosts this endpoint is on; empty where it does not matter or is not known."""
        self.traffic, self.wire = Traffic(), Traffic()  # bytes of tensors; bytes at the sockets, without handshakes
        # On several hosts, other workers may exchange as soon as they know this address.
        self.runner: ScheduleRunner | None = ScheduleRunner(self) if self.host else None
        self._secret = secret
        self._guard = None if tls is None else Guard(tls, deadline_s, self.vanished_s)
        self._tally = threading.Lock()
        self._settled = threading.Lock()
        self._changed = threading.Condition(threading.Lock())  # guards all that follows
        self._addresses: dict[int, Address] = {}
        self._links: dict[int, Link] = {}
        self._alive: set[Link] = set()
        self._dialling: set[int] = set()
        self._accepting: set[int] = set()
        self._asked: dict[int, tuple[Link, int]] = {}
        self._tokens = itertools.count(1)
        self._closed = False
        self._met: set[int] = set()
        self._gone: dict[int, Address] = {}
        wrap = functools.partial(self._guarded, listens=True)
        self._listener = Listener(listen, secret, str(rank), wrap=wrap, greet=self._greet)
        self.address: Address = self._listener.address
        self._listener.start()

    def let_name_go(self) -> None:
        """No peer will connect any more: the folder of our Unix socket may be removed for good."""
        self._listener.let_name_go()

    # Connecting to other endpoints.

    def introduce(self, addresses: Mapping[int, Address]) -> None:
        """Learn where other endpoints listen. Nothing is dialled until it is needed."""
        with self._changed:
            self._addresses.update({rank: address for rank, address in addresses.items() if rank != self.rank})

    @property
    def peers(self) -> frozenset[int]:
        """Ranks that this endpoint is connected to."""
        return frozenset(self._links)

    @property
    def met(self) -> frozenset[int]:
        """Ranks that this endpoint has been connected to."""
        return frozenset(self._met)

    @property
    def address_book(self) -> Mapping[int, Address]:
        """Where other endpoints listen, as far as is known."""
        return dict(self._addresses)

    def connect_all(self, addresses: Mapping[int, Address], deadline_s: float | None = None) -> None:
        """Connect to all of these now, waiting for those that do not listen yet. All ranks may do so at once."""
        self.introduce(addresses)
        until = time.monotonic() + self._limit(deadline_s)
        for rank in sorted(set(addresses) - {self.rank}):
            self._reach(rank, until, patient=True)

    def hang_up(self, ranks: Collection[int]) -> None:
        """These endpoints are lost, by the launcher's word: fail calls to them, and reach none at its old address.

        Their hosts may have vanished without a word, so that their connections still look alive.
        """
        with self._changed:
            links = [self._links[rank] for rank in ranks if rank in self._links]
            self._gone.update({rank: self._addresses[rank] for rank in ranks if rank in self._addresses})
            self._changed.notify_all()
        for link in links:
            link.break_off("the launcher reports that it is lost")

    def watch(self, ranks: Sequence[int]) -> None:
        """Connect to these ranks, where not done yet, so that `recv` reports their departure; returns at once.

        A rank that cannot be reached counts as departed; one whose address is not known must dial this endpoint itself.
        """
        strange = [rank for rank in ranks if rank not in self._links and rank in self._addresses]
        if strange:
            name = f"podium-watch-{self.rank}"
            threading.Thread(target=self._meet, args=(strange,), name=name, daemon=True).start()

    def _meet(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            try:
                self._reach(rank)
            except (CommError, ConfigError) as error:
                if self._closed:
                    return
                self.inbox.put(Message(rank, DEPARTED, {"error": str(error)}), None)

    # Messages. Their meaning is that of `podium.comm.base.Communicator`.

    def send(self, to: int, kind: str, meta: Meta, body: Sequence[Tensor] = ()) -> None:
        """One way; the body may change once this returns."""
        link = self._reach(to)
        link.transmit(frames.encode_frame(kind, self.rank, 0, meta, body, self.limits, sums=link.sums))

    def part_from(self, ranks: Sequence[int], kind: str, meta: Meta, limit_s: float) -> None:
        """Send a last message to each of these, connecting where needed, so that they see this endpoint depart.

        A rank that cannot be reached is skipped: it is gone itself.
        """
        until = time.monotonic() + min(limit_s, self.deadline_s)
        for rank in ranks:
            with suppress(CommError):
                link = self._reach(rank, until)
                link.transmit(frames.encode_frame(kind, self.rank, 0, meta, (), self.limits))

    def post(
        self,
        to: int,
        kind: str,
        meta: Meta,
        part: Tensor | None,
        sent: Callable[[bool], None],
        *,
        in_memory: bool = False,
        wanted: Callable[[], bool] | None = None,
    ) -> None:
        """One way, and returns at once. `part` must not change until `sent(ok)` is called, on any thread.

        A message that still waits when `wanted()` is no longer true is not sent.

        `in_memory`: only where `part` lies in our memory is sent; the peer must be able to map it (`maps`).
        """
        body = () if part is None else (part,)
        link = self._reach(to)
        locate = self.arena.locate if in_memory and self.arena is not None else None
        buffers = frames.encode_frame(kind, self.rank, 0, meta, body, self.limits, locate, sums=link.sums)
        link.transmit(buffers, later=True, sent=sent, wanted=wanted)

    def maps(self, rank: int) -> bool:
        """Whether this endpoint is connected to `rank` and can map its memory."""
        link = self._links.get(rank)
        return link is not None and link.maps

    def drop(self, ranks: Iterable[int]) -> None:
        """End the connections to these, whose hosts may be gone without a goodbye; returns at once."""
        for link in [self._links.get(rank) for rank in ranks]:
            if link is not None:
                link.break_off("it is no member any more")

    def call(
        self,
        to: int,
        kind: str,
        meta: Meta,
        body: Sequence[Tensor] = (),
        into: Sequence[Tensor] | None = None,
        more: bool = False,
    ) -> ChannelHandle:
        """Send a request. The body must not change, nor `into` be used, until the reply has arrived.

        A reply without tensors leaves `into` alone; one that does not fit ends the connection. When the peer is lost,
        `into` may hold part of a reply.
        """
        for tensor in into or ():
            frames.byte_view(tensor)  # raise here, in the caller, where a tensor cannot be received into
        link, handle = self._reach(to), ChannelHandle(to, kind, into)
        number = next(link.numbers)
        locate = self.arena.locate if self.arena is not None and link.shares else None
        buffers = frames.encode_frame(kind, self.rank, number, meta, body, self.limits, locate, into, sums=link.sums)
        link.expect(number, handle)
        link.transmit(buffers, later=True, more=more)
        return handle

    def reply(self, to: Message, meta: Meta, body: Sequence[Tensor] = (), more: bool = False) -> None:
        """Answer a call, once; the body may change once this returns."""
        asked = self._asked.get(to.call)
        if asked is not None:
            link, number = asked
            if to.landing is None or not body or not _fits(body, to.landing):
                buffers = frames.encode_frame(to.kind, self.rank, -number, meta, body, self.limits, sums=link.sums)
            else:
                _land(body, to.landing)
                buffers = frames.encode_frame(to.kind, self.rank, -number, meta, (), self.limits, landing=())
            if self._asked.pop(to.call, None) is not None:
                return link.transmit(buffers, more=more)
        if to.call == 0:
            raise CommError(f"rank {self.rank}: {to.kind!r} from rank {to.source} expects no reply")
        raise Lost(f"rank {self.rank}: rank {to.source} has left, or its {to.kind!r} was answered before")

    def recv(self, deadline_s: float | None = None) -> Message:
        """The next message from any rank, in order of arrival. After a fault, a departure's meta has `error`."""
        message = self.inbox.get(self._limit(deadline_s))
        if message is None:
            self._check_open()
            raise DeadlineExceeded(f"rank {self.rank}: no message from anyone for {self._limit(deadline_s):g} s")
        return message

    def poll(self, calls: Sequence[ChannelHandle] = (), deadline_s: float | None = None) -> Message | None:
        """The next message, if one has arrived; with `calls`, waits for one until all calls are done or one failed."""

        def over() -> bool:
            return all(h.done for h in calls) or any(h.error is not None for h in calls)

        message = self.inbox.get(self._limit(deadline_s), over)
        if message is None:
            self._check_open()
            if not over():
                late = ", ".join(f"rank {h.to} ({h.kind!r})" for h in calls if not h.done)
                limit = self._limit(deadline_s)
                raise DeadlineExceeded(f"rank {self.rank}: for {limit:g} s no message, and no reply from {late}")
        return message

    def wait(self, handles: Sequence[ChannelHandle], deadline_s: float | None = None) -> list[Message]:
        """All replies, in the order of the handles; raises as soon as one call fails.

        Past the deadline the calls stay open: they may be waited for again, and a late reply still writes to `into`.
        """

        waiter = Waiter(self._settled, handles)
        with self._settled:
            if waiter.missing:
                waiter.over.wait_for(lambda: not waiter.missing or waiter.failed, self._limit(deadline_s))
            waiter.dismiss()
        for error in (h.error for h in handles if h.error):
            raise error
        missing = ", ".join(f"rank {h.to} ({h.kind!r})" for h in handles if not h.message)
        if missing:
            raise DeadlineExceeded(f"rank {self.rank}: no reply for {self._limit(deadline_s):g} s from {missing}")
        return [h.message for h in handles if h.message]

    def _limit(self, deadline_s: float | None) -> float:
        return self.deadline_s if deadline_s is None else deadline_s

    def _check_open(self) -> None:
        if self._closed:
            raise CommError(f"rank {self.rank}: the channel is closed")

    # Called by links.

    def count(self, sent: tuple[int, int] = (0, 0), received: tuple[int, int] = (0, 0)) -> None:
        with self._tally:
            self.traffic.sent, self.wire.sent = self.traffic.sent + sent[0], self.wire.sent + sent[1]
            self.traffic.received += received[0]
            self.wire.received += received[1]

    def settle(self, handle: ChannelHandle, message: Message) -> None:
        with self._settled:
            handle.message = message
            handle.tell_waiter()
        self.inbox.nudge()

    def note_call(self, link: Link, number: int) -> int:
        """A number for `Message.call`, valid for this connection only: a peer that reconnects gets no old replies."""
        token = next(self._tokens)
        self._asked[token] = link, number
        return token

    def take_leave(self, link: Link, orphans: Sequence[ChannelHandle]) -> None:
        """The connection ended: fail its pending calls and put its departure into the inbox."""
        with self._changed:
            self._alive.discard(link)
            if self._links.get(link.peer) is link:
                del self._links[link.peer]
            for token in [token for token, asked in list(self._asked.items()) if asked[0] is link]:
                self._asked.pop(token, None)
            self._changed.notify_all()
        if self.runner is not None:
            self.runner.departed(link.peer)
        what = "this channel was closed" if self._closed else f"rank {link.peer} left{link.why}"
        with self._settled:
            for handle in orphans:
                handle.error = Lost(f"rank {self.rank}: {what} before {handle.kind!r} was answered by rank {handle.to}")
                handle.tell_waiter()
        self.inbox.nudge()
        self.inbox.put(Message(link.peer, DEPARTED, {"error": link.fault} if link.fault else {}), None)

    # Connecting.

    def _reach(self, to: int, until: float | None = None, *, patient: bool = False) -> Link:
        """The link to a peer; dials if there is none and no other thread is connecting."""
        link = self._links.get(to)
        if link is not None:
            return link
        until = time.monotonic() + self.deadline_s if until is None else until
        with self._changed:
            busy = (self._dialling, self._accepting)
            self._changed.wait_for(lambda: self._closed or not any(to in b for b in busy), until - time.monotonic())
            self._check_open()
            if to in self._links:
                return self._links[to]
            if to not in self._addresses:
                raise CommError(f"rank {self.rank}: no connection to rank {to} and no address of it")
            self._dialling.add(to)
        try:
            return self._dial(to, until, patient)
        finally:
            with self._changed:
                self._dialling.discard(to)
                self._changed.notify_all()

    def _dial(self, to: int, until: float, patient: bool) -> Link:
        missing_until = time.monotonic() + (0.0 if to in self._met else _HEALED_S)
        while True:
            if self._gone.get(to) == self._addresses[to]:
                raise Lost(f"rank {self.rank}: rank {to} is lost; it was at {self._addresses[to]}")
            trouble = "it is busy with another connection of ours"
            try:
                sock = self._knock(to, min(until, time.monotonic() + _HANDSHAKE_S))
                if sock is not None:
                    return self._publish(to, sock)
            except OSError as error:
                trouble = f"{address_from(self.host, self._addresses[to])}: {error.strerror or error}"
                is_missing = isinstance(error, FileNotFoundError) and time.monotonic() < missing_until
                if isinstance(error, ConnectionRefusedError | FileNotFoundError) and not (patient or is_missing):
                    raise Lost(f"rank {self.rank}: rank {to} does not listen any more: {trouble}") from None
            with self._changed:
                self._changed.wait_for(lambda: self._closed or to in self._links, _RETRY_S)
                self._check_open()
                if to in self._links:
                    return self._links[to]
            if time.monotonic() >= until:
                raise DeadlineExceeded(f"rank {self.rank}: no connection to rank {to} in time: {trouble}")

    def _knock(self, to: int, until: float) -> Stream | None:
        """A connection after its handshake; None if the peer has, or is making, another."""
        family, place = resolve(address_from(self.host, self._addresses[to]))
        with ExitStack() as undo:
            plain = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            plain.settimeout(max(until - time.monotonic(), 0.001))
            plain.connect(place)
            sock = self._guarded(plain, listens=False)
            undo.callback(sock.close)
            if self._prove(sock, to, until) == frames.ACCEPTED:
                undo.pop_all()
                return sock
        return None

    def _guarded(self, sock: socket.socket, *, listens: bool) -> Stream:
        """TLS around a TCP connection, where the run uses it; nothing is sent yet."""
        if self._guard is None or sock.family == socket.AF_UNIX:
            return sock
        return self._guard.wrap(sock, listens=listens)

    def _prove(self, sock: Stream, to: int, until: float) -> int:
        try:
            if isinstance(sock, TlsStream):
                sock.shake_hands(until)
            return frames.prove(sock, self.rank, to, self._secret, until)
        except ssl.SSLError as error:
            why = error.reason or error.strerror
            raise Refused(f"rank {self.rank}: no TLS with rank {to}: {why}; have both the same tls_ca?") from None

    def _publish(self, peer: int, sock: Stream) -> Link:
        tune(sock, self.deadline_s, self.vanished_s)
        link = Link(self, peer, sock)
        with self._changed:
            if self._closed:
                sock.close()
            self._check_open()
            self._links[peer] = link
            self._met.add(peer)
            self._alive.add(link)
            link.receiver.start()
            self._changed.notify_all()
        link.offer_sharing()
        return link

    def _greet(self, sock: Stream) -> None:
        """The handshake with a peer that dialled; raises where it fails."""
        until = time.monotonic() + _HANDSHAKE_S
        if isinstance(sock, TlsStream):
            sock.shake_hands(until)
        proven = frames.challenge(sock, self.rank, self._secret, until)
        peer = proven.peer
        self._listener.trust_current()
        with self._changed:
            ours_wins = peer in self._dialling and self.rank > peer
            busy = self._closed or ours_wins or peer in self._links or peer in self._accepting
            if not busy:
                self._accepting.add(peer)
        if busy:
            frames.give_verdict(sock, proven, frames.BUSY)
            return sock.close()
        try:
            frames.give_verdict(sock, proven, frames.ACCEPTED)
            self._publish(peer, sock)
        finally:
            with self._changed:
                self._accepting.discard(peer)
                self._changed.notify_all()

    def close(self) -> None:
        """Leave: peers read what was sent to them, then see this endpoint depart. Takes seconds at most; idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            links = list(self._alive)
            self._changed.notify_all()
        self.inbox.close()
        self._listener.stop()
        for link in links:
            shut(link.sock, socket.SHUT_WR)
        until = time.monotonic() + CLOSE_S
        for link in links:
            link.join(until)
        self._listener.close()


def _fits(body: Sequence[Tensor], landing: Sequence[Tensor]) -> bool:
    """Whether a reply can be written into the caller's `into`; if not, it is sent, and the caller refuses it."""
    return len(body) == len(landing) and all(
        a.dtype == b.dtype and a.numel() == b.numel() for a, b in zip(body, landing, strict=True)
    )


def _land(body: Sequence[Tensor], landing: Sequence[Tensor]) -> None:
    """Write a reply into the caller's memory, unless it lies there already."""
    for tensor, place in zip(body, landing, strict=True):
        if tensor.data_ptr() != place.data_ptr():
            place.view(-1).copy_(tensor.reshape(-1))
