"""The point-to-point tensor channel: calls, replies and messages between endpoints, over TCP or Unix sockets.

Any two endpoints share one connection, used both ways, so its end fails pending calls on both sides and reaches a
receiver as a message, in order after all that came before. Whoever needs the connection first dials. When both dial
at once, the higher rank's dial wins: it answers the other's with BUSY, and the lower rank waits for it to come in.

Each connection has a thread that receives; a second one, started when first needed, sends what cannot go at once.
What is received lands straight in the caller's `into`, in what the sink offers, or in fresh tensors.

The inbox is bounded. When it is full, connections are no longer read, and their senders come to a halt. Replies
queue behind the messages of the same connection, so an endpoint that expects many messages must keep receiving.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, final

from torch import Tensor

from podium.comm import frames
from podium.comm.base import DEPARTED, Handle, Message, Meta, Traffic
from podium.comm.frames import Frame, FrameError, Header, Limits, Sink
from podium.errors import CommError, ConfigError, DeadlineExceeded, Lost

Address = str
"""`unix:/path` or `tcp:host:port`; port 0 takes a free one."""

_HANDSHAKE_S = 5.0
_CLOSE_S = 2.0  # how long `close` lets peers read what was sent to them
_RETRY_S = 0.05
_MAX_STRANGERS = 64  # connections in their handshake; one more drops the oldest
_MAX_PATH = 107  # of a Unix socket, on Linux
_INLINE_BYTES = 64 << 10  # a call of up to this size is sent by its caller: the socket's buffer takes it at once
_SOCKET_BUFFER = 4 << 20  # the kernel lowers it to what it allows


@final
class ChannelHandle(Handle):
    """A call under way; `Channel.wait` returns its reply."""

    def __init__(self, to: int, kind: str, into: Sequence[Tensor] | None) -> None:
        self.to, self.kind, self.into = to, kind, into
        self.message: Message | None = None
        self.error: CommError | None = None

    @property
    def done(self) -> bool:
        return self.message is not None or self.error is not None


class _Inbox:
    """Messages that wait to be received, bounded by number and by bytes. Room is taken before a body is read."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        lock = threading.Lock()
        self._filled, self._drained = threading.Condition(lock), threading.Condition(lock)
        self._waiting: deque[tuple[Message, int | None]] = deque()
        self._count = self._bytes = 0
        self._closed = False

    def reserve(self, nbytes: int) -> None:
        with self._drained:
            self._drained.wait_for(lambda: self._closed or self._has_room(nbytes))
            self._count, self._bytes = self._count + 1, self._bytes + nbytes

    def _has_room(self, nbytes: int) -> bool:
        fits = self._count < self._limits.inbox_messages and self._bytes + nbytes <= self._limits.inbox_bytes
        return self._count == 0 or fits

    def release(self, nbytes: int) -> None:
        with self._drained:
            self._release(nbytes)

    def _release(self, nbytes: int) -> None:
        self._count, self._bytes = self._count - 1, self._bytes - nbytes
        self._drained.notify_all()

    def put(self, message: Message, reserved: int | None) -> None:
        """`reserved` bytes are given back when the message is taken; None for a departure, which needs no room."""
        with self._filled:
            self._waiting.append((message, reserved))
            self._filled.notify()

    def get(self, deadline_s: float) -> Message | None:
        with self._filled:
            self._filled.wait_for(lambda: self._waiting or self._closed, deadline_s)
            if self._closed or not self._waiting:
                return None
            message, reserved = self._waiting.popleft()
            if reserved is not None:
                self._release(reserved)
            return message

    def close(self) -> None:
        with self._filled:
            self._closed = True
            self._filled.notify_all()
            self._drained.notify_all()


class _Link:
    """One connection to one peer. Frames leave in the order in which they were given."""

    def __init__(self, channel: Channel, peer: int, sock: socket.socket) -> None:
        self.channel, self.peer, self.sock = channel, peer, sock
        self.numbers = itertools.count(1)
        self.fault: str | None = None
        self._turn = threading.Condition(threading.Lock())  # guards all that follows
        self._tickets, self._serving, self._sending, self._broken = 0, 0, False, False
        self._pending: dict[int, ChannelHandle] = {}
        self._reserved: int | None = None
        name = f"{channel.rank}-{peer}"
        self._sender = ThreadPoolExecutor(1, f"podium-send-{name}")  # starts its thread when first used
        self.receiver = threading.Thread(target=self._receive, name=f"podium-receive-{name}", daemon=True)

    # Sending.

    def expect(self, number: int, handle: ChannelHandle) -> None:
        with self._turn:
            self._check_whole()
            self._pending[number] = handle

    def transmit(self, buffers: list[memoryview], *, later: bool = False) -> None:
        """Send a frame. `later` lets one that cannot go at once go from the sender's thread when this has returned."""
        large = sum(buffer.nbytes for buffer in buffers) > _INLINE_BYTES
        with self._turn:
            self._check_whole()
            ticket, self._tickets = self._tickets, self._tickets + 1
            if later and (large or ticket != self._serving):
                # An error breaks the link, and so reaches whoever waits for the reply.
                self._sender.submit(self._send, ticket, buffers)
                return
        self._send(ticket, buffers)

    def _send(self, ticket: int, buffers: list[memoryview]) -> None:
        """The one place where frames are written, one at a time and in order."""
        with self._turn:
            came = self._serving == ticket or self._turn.wait_for(
                lambda: self._broken or self._serving == ticket, self.channel.deadline_s
            )
            self._check_whole()
            self._sending |= came
        if not came:
            raise self._give_up()
        try:
            wire = frames.send_buffers(self.sock, buffers)
        except BlockingIOError:  # by SO_SNDTIMEO: nothing went out for the whole deadline
            raise self._give_up() from None
        except OSError as error:
            self.break_off()
            raise Lost(f"rank {self.channel.rank}: rank {self.peer} has left ({error.strerror})") from None
        finally:
            with self._turn:
                self._sending, self._serving = False, self._serving + 1
                self._turn.notify_all()
        self.channel.count(sent=(wire - buffers[0].nbytes, wire))

    def _give_up(self) -> DeadlineExceeded:
        took = f"{self.channel.deadline_s:g} s"
        self.break_off(f"it took nothing for {took}")
        return DeadlineExceeded(
            f"rank {self.channel.rank}: sending to rank {self.peer} did not go on for {took}; its connection is dropped"
        )

    def _check_whole(self) -> None:
        if self._broken:
            raise Lost(f"rank {self.channel.rank}: rank {self.peer} has left{self.why}")

    @property
    def why(self) -> str:
        return f" ({self.fault})" if self.fault else ""

    # Receiving.

    def _receive(self) -> None:
        fault: str | None = "receiving from it failed"
        try:
            fault = self._receive_frames()
        finally:
            self._depart(fault)

    def _receive_frames(self) -> str | None:
        """Receive until the end; says what was wrong, if anything was."""
        try:
            while (frame := frames.read_frame(self.sock, self.channel.limits, self._place)) is not None:
                self._deliver(frame)
        except (FrameError, OSError) as error:
            return str(error)
        return None

    def _place(self, header: Header) -> Sequence[Tensor] | None:
        """Where the body goes; blocks while the inbox is full."""
        if header.source != self.peer or header.kind == DEPARTED:
            raise FrameError(f"rank {self.peer} sent {header.kind[:40]!r} in the name of rank {header.source}")
        if header.call < 0:
            handle = self._pending.get(-header.call)
            if handle is None:
                raise FrameError(f"rank {self.peer} answered call {-header.call}, for which nobody waits")
            return handle.into if header.tensors else None
        self.channel.inbox.reserve(header.body_bytes)
        self._reserved = header.body_bytes
        return self.channel.sink(header) if self.channel.sink is not None and header.tensors else None

    def _deliver(self, frame: Frame) -> None:
        header = frame.header
        self.channel.count(received=(header.body_bytes, frame.wire_bytes))
        message = Message(header.source, header.kind, header.meta, frame.body)
        if header.call < 0:
            with self._turn:
                handle = self._pending.pop(-header.call)
            self.channel.settle(handle, message)
            return
        if header.call:
            message = message._replace(call=self.channel.note_call(self, header.call))
        self.channel.inbox.put(message, self._reserved)
        self._reserved = None

    # Ending.

    def break_off(self, fault: str | None = None) -> None:
        """End the connection. The receiving thread reads what has arrived, then announces the departure."""
        with self._turn:
            if not self._broken:
                self._broken, self.fault = True, fault
            self._turn.notify_all()
        _shut(self.sock, socket.SHUT_RDWR)

    def _depart(self, fault: str | None) -> None:
        self.break_off(fault)
        if self._reserved is not None:
            self.channel.inbox.release(self._reserved)
        with self._turn:
            # The descriptor may be used by others the moment it is closed, so nobody may be sending on it.
            self._turn.wait_for(lambda: not self._sending, _CLOSE_S)
            orphans = list(self._pending.values())
            self._pending.clear()
        self._sender.shutdown()
        self.sock.close()
        self.channel.take_leave(self, orphans)

    def join(self, until: float) -> None:
        """Wait for the peer to hang up; past `until`, break off."""
        self.receiver.join(max(until - time.monotonic(), 0))
        self.break_off()
        self.receiver.join(_CLOSE_S)


@final
class Channel:
    """One endpoint's connections to the others. All methods may be used from any thread."""

    def __init__(
        self,
        rank: int,
        *,
        secret: bytes,
        listen: Address,
        limits: Limits | None = None,
        deadline_s: float = 60.0,
        sink: Sink | None = None,
    ) -> None:
        """Listens at once. `sink` runs on a receiving thread and must not block; replies never ask it."""
        if not deadline_s > 0:
            raise ConfigError(f"channel of rank {rank}: deadline_s must be above 0, got {deadline_s}")
        self.rank, self.deadline_s, self.sink = rank, deadline_s, sink
        self.limits = limits or Limits()
        self.inbox = _Inbox(self.limits)
        self.traffic, self.wire = Traffic(), Traffic()  # bytes of tensors; bytes at the sockets, handshakes left out
        self._secret = secret
        self._tally = threading.Lock()
        self._settled = threading.Condition(threading.Lock())
        self._changed = threading.Condition(threading.Lock())  # guards all that follows
        self._addresses: dict[int, Address] = {}
        self._links: dict[int, _Link] = {}
        self._alive: set[_Link] = set()
        self._dialling: set[int] = set()
        self._accepting: set[int] = set()
        self._strangers: dict[threading.Thread, socket.socket | None] = {}  # None once they have proved themselves
        self._asked: dict[int, tuple[_Link, int]] = {}
        self._tokens = itertools.count(1)
        self._closed = False
        self._listener = _listen(listen, secret)
        self.address: Address = _address_of(self._listener)
        self._acceptor = threading.Thread(target=self._accept, name=f"podium-accept-{rank}", daemon=True)
        self._acceptor.start()

    # Meeting the others.

    def introduce(self, addresses: Mapping[int, Address]) -> None:
        """Learn where others listen. Nothing is dialled until it is needed."""
        with self._changed:
            self._addresses.update({rank: address for rank, address in addresses.items() if rank != self.rank})

    def connect_all(self, addresses: Mapping[int, Address], deadline_s: float | None = None) -> None:
        """Connect to all of them now, waiting for those that do not listen yet. All ranks may do so at once."""
        self.introduce(addresses)
        until = time.monotonic() + self._limit(deadline_s)
        for rank in sorted(set(addresses) - {self.rank}):
            self._reach(rank, until, patient=True)

    # Messages. Their meaning is that of `podium.comm.base.Communicator`.

    def send(self, to: int, kind: str, meta: Meta, body: Sequence[Tensor] = ()) -> None:
        """One way; has taken the body when it returns."""
        self._reach(to).transmit(frames.encode_frame(kind, self.rank, 0, meta, body, self.limits))

    def call(
        self, to: int, kind: str, meta: Meta, body: Sequence[Tensor] = (), into: Sequence[Tensor] | None = None
    ) -> ChannelHandle:
        """Ask and expect a reply. The body must not change, nor `into` be used, until the reply is there.

        A reply without tensors leaves `into` alone; one that does not fit ends the connection. When the peer is lost,
        `into` may hold part of a reply.
        """
        for tensor in into or ():
            frames.byte_view(tensor)  # refuse here, in the caller's face, what cannot be received into
        link, handle = self._reach(to), ChannelHandle(to, kind, into)
        number = next(link.numbers)
        buffers = frames.encode_frame(kind, self.rank, number, meta, body, self.limits)
        link.expect(number, handle)
        link.transmit(buffers, later=True)
        return handle

    def reply(self, to: Message, meta: Meta, body: Sequence[Tensor] = ()) -> None:
        """Answer a call, once; has taken the body when it returns."""
        asked = self._asked.get(to.call)
        if asked is not None:
            link, number = asked
            buffers = frames.encode_frame(to.kind, self.rank, -number, meta, body, self.limits)
            if self._asked.pop(to.call, None) is not None:
                return link.transmit(buffers)
        if to.call == 0:
            raise CommError(f"rank {self.rank}: {to.kind!r} from rank {to.source} expects no reply")
        raise Lost(f"rank {self.rank}: rank {to.source} has left, or its {to.kind!r} was answered before")

    def recv(self, deadline_s: float | None = None) -> Message:
        """The next message from anyone, in order of arrival. A departure is one; its meta has `error` after a fault."""
        message = self.inbox.get(self._limit(deadline_s))
        if message is None:
            self._check_open()
            raise DeadlineExceeded(f"rank {self.rank}: no message from anyone for {self._limit(deadline_s):g} s")
        return message

    def wait(self, handles: Sequence[ChannelHandle], deadline_s: float | None = None) -> list[Message]:
        """All replies, in the order of the handles; raises as soon as one of them cannot come any more.

        Past the deadline the calls stay open: they may be waited for again, and a late reply still writes to `into`.
        """

        def over() -> bool:
            return any(h.error for h in handles) or all(h.message for h in handles)

        with self._settled:
            self._settled.wait_for(over, self._limit(deadline_s))
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
            self._settled.notify_all()

    def note_call(self, link: _Link, number: int) -> int:
        """A number for `Message.call`, good for this connection only: a peer that comes back gets no old replies."""
        token = next(self._tokens)
        self._asked[token] = link, number
        return token

    def take_leave(self, link: _Link, orphans: Sequence[ChannelHandle]) -> None:
        """The connection is over: fail the calls that hung on it and tell whoever receives."""
        with self._changed:
            self._alive.discard(link)
            if self._links.get(link.peer) is link:
                del self._links[link.peer]
            for token in [token for token, asked in list(self._asked.items()) if asked[0] is link]:
                self._asked.pop(token, None)
            self._changed.notify_all()
        what = "this channel was closed" if self._closed else f"rank {link.peer} left{link.why}"
        with self._settled:
            for handle in orphans:
                handle.error = Lost(f"rank {self.rank}: {what} before {handle.kind!r} was answered by rank {handle.to}")
            self._settled.notify_all()
        self.inbox.put(Message(link.peer, DEPARTED, {"error": link.fault} if link.fault else {}), None)

    # Connecting.

    def _reach(self, to: int, until: float | None = None, *, patient: bool = False) -> _Link:
        """The link to a peer; dials if there is none and nobody else is at it."""
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

    def _dial(self, to: int, until: float, patient: bool) -> _Link:
        while True:
            trouble = "it is busy with another connection of ours"
            try:
                sock = self._knock(to, min(until, time.monotonic() + _HANDSHAKE_S))
                if sock is not None:
                    return self._publish(to, sock)
            except OSError as error:
                trouble = f"{self._addresses[to]}: {error.strerror or error}"
                if isinstance(error, ConnectionRefusedError | FileNotFoundError) and not patient:
                    raise Lost(f"rank {self.rank}: rank {to} does not listen any more: {trouble}") from None
            with self._changed:
                self._changed.wait_for(lambda: self._closed or to in self._links, _RETRY_S)
                self._check_open()
                if to in self._links:
                    return self._links[to]
            if time.monotonic() >= until:
                raise DeadlineExceeded(f"rank {self.rank}: no connection to rank {to} in time: {trouble}")

    def _knock(self, to: int, until: float) -> socket.socket | None:
        """A connection on which both sides have proved themselves; None if the peer has, or is making, another."""
        family, place = _resolve(self._addresses[to])
        with ExitStack() as undo:
            sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.settimeout(max(until - time.monotonic(), 0.001))
            sock.connect(place)
            if frames.prove(sock, self.rank, to, self._secret, until) == frames.ACCEPTED:
                undo.pop_all()
                return sock
        return None

    def _publish(self, peer: int, sock: socket.socket) -> _Link:
        _tune(sock, self.deadline_s)
        link = _Link(self, peer, sock)
        with self._changed:
            if self._closed:
                sock.close()
            self._check_open()
            self._links[peer] = link
            self._alive.add(link)
            link.receiver.start()
            self._changed.notify_all()
        return link

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if not self._closed:
                    time.sleep(_RETRY_S)  # out of file descriptors, most likely, which may pass
                continue
            with self._changed:
                if self._closed:
                    return sock.close()
                self._drop_oldest_stranger()
                name = f"podium-admit-{self.rank}"
                thread = threading.Thread(target=self._admit, args=(sock,), name=name, daemon=True)
                self._strangers[thread] = sock
                thread.start()

    def _drop_oldest_stranger(self) -> None:
        """Keep room for one more handshake, so that a crowd that says nothing cannot keep out one that speaks."""
        silent = [thread for thread, sock in self._strangers.items() if sock is not None]
        if len(silent) >= _MAX_STRANGERS:
            _shut(self._strangers[silent[0]])
            self._strangers[silent[0]] = None

    def _admit(self, sock: socket.socket) -> None:
        """Shake hands with whoever dialled; one who fails is dropped, and nothing else happens."""
        try:
            self._greet(sock)
        except (OSError, CommError):
            sock.close()
        finally:
            with self._changed:
                del self._strangers[threading.current_thread()]

    def _greet(self, sock: socket.socket) -> None:
        until = time.monotonic() + _HANDSHAKE_S
        peer, transcript = frames.challenge(sock, self.rank, self._secret, until)
        with self._changed:
            self._strangers[threading.current_thread()] = None
            ours_wins = peer in self._dialling and self.rank > peer
            busy = self._closed or ours_wins or peer in self._links or peer in self._accepting
            if not busy:
                self._accepting.add(peer)
        if busy:
            frames.give_verdict(sock, self._secret, transcript, frames.BUSY)
            return sock.close()
        try:
            frames.give_verdict(sock, self._secret, transcript, frames.ACCEPTED)
            self._publish(peer, sock)
        finally:
            with self._changed:
                self._accepting.discard(peer)
                self._changed.notify_all()

    def close(self) -> None:
        """Leave: peers read what was sent to them, then see us depart. Takes seconds at most; twice does no harm."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            links, strangers = list(self._alive), dict(self._strangers)
            self._changed.notify_all()
        self.inbox.close()
        for sock in (self._listener, *strangers.values()):
            _shut(sock)
        for link in links:
            _shut(link.sock, socket.SHUT_WR)
        until = time.monotonic() + _CLOSE_S
        for link in links:
            link.join(until)
        for thread in (self._acceptor, *strangers):
            thread.join(_CLOSE_S)
        self._listener.close()
        if self.address.startswith("unix:"):
            Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)


# Sockets.


def _resolve(address: Address) -> tuple[int, Any]:
    """Family and place of an address, as `socket` takes them."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest and "\0" not in rest:
        if len(os.fsencode(rest)) > _MAX_PATH:
            raise ConfigError(f"the path of a Unix socket must be at most {_MAX_PATH} bytes, got {len(rest)}: {rest}")
        return socket.AF_UNIX, rest
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"an address must be unix:/path or tcp:host:port, got {address!r}")
    try:
        family, _, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"{address}: no such host: {error.strerror}") from None
    return family, place


def _listen(address: Address, secret: bytes) -> socket.socket:
    family, place = _resolve(address)
    if family != socket.AF_UNIX and not secret and not ipaddress.ip_address(place[0]).is_loopback:
        raise ConfigError(f"{address} can be reached from outside: a secret is needed to listen there, got none")
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        if family == socket.AF_UNIX:
            os.chmod(place, 0o600)  # nobody can connect before `listen`, so there is no moment when others could
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen at {address}: {error.strerror}") from None
    return sock


def _address_of(listener: socket.socket) -> Address:
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    return f"tcp:[{name[0]}]:{name[1]}" if listener.family == socket.AF_INET6 else f"tcp:{name[0]}:{name[1]}"


def _tune(sock: socket.socket, deadline_s: float) -> None:
    sock.settimeout(None)
    # A timeout of Python's would make every call two, and cut large ones into pieces.
    seconds, micros = divmod(max(int(deadline_s * 1e6), 1), 1_000_000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", seconds, micros))
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # a host that vanished is noticed in 25 s, not in hours
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _shut(sock: socket.socket | None, how: int = socket.SHUT_RDWR) -> None:
    if sock is not None:
        with suppress(OSError):  # it is closed already, or the other side was faster
            sock.shutdown(how)
