"""One connection of the channel: frames out in order, frames in by the connection's own thread, and a bounded inbox.

The channel decides which peers to connect to; a link moves the frames and notices when its peer is gone.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, final

from torch import Tensor

from podium.comm.base import DEPARTED, Handle, Message
from podium.comm.real import frames
from podium.comm.real.arena import neighbour_of
from podium.comm.real.frames import OF_EXCHANGES, Frame, FrameError, Header, Limits
from podium.comm.real.sockets import Pulse, Stream, leaves_host, shut
from podium.errors import CommError, DeadlineExceeded, Lost

if TYPE_CHECKING:
    from podium.comm.real.channel import Channel

CLOSE_S = 2.0
"""How long `close` waits for peers to read what was sent to them."""
_HELD_FRAMES = 256
_AT_ONCE = 512  # buffers of one write
SHARING = ".sharing"
"""Kind of the frame by which one end of a link reports that it can map the other end's memory."""
_INLINE_BYTES = 64 << 10  # tensors of up to this size are sent by their caller: the socket's buffer takes them at once


@final
class ChannelHandle(Handle):
    """A call under way; `Channel.wait` returns its reply."""

    def __init__(self, to: int, kind: str, into: Sequence[Tensor] | None) -> None:
        self.to, self.kind, self.into = to, kind, into
        self.message: Message | None = None
        self.error: CommError | None = None
        self.waiter: Waiter | None = None

    @property
    def done(self) -> bool:
        return self.message is not None or self.error is not None

    def tell_waiter(self) -> None:
        """Call when it is done, under the channel's lock."""
        if self.waiter is not None:
            self.waiter.hear(self)


class Waiter:
    """A thread that waits for several calls, and is woken once, not once per call. Used under the channel's lock."""

    def __init__(self, lock: threading.Lock, handles: Sequence[ChannelHandle]) -> None:
        self.over = threading.Condition(lock)
        self._handles = handles
        with lock:
            for handle in handles:
                handle.waiter = self
            self.missing = {handle for handle in handles if not handle.done}
            self.failed = any(handle.error is not None for handle in handles)

    def hear(self, handle: ChannelHandle) -> None:
        self.missing.discard(handle)
        self.failed = self.failed or handle.error is not None
        if not self.missing or self.failed:
            self.over.notify_all()

    def dismiss(self) -> None:
        for handle in self._handles:
            if handle.waiter is self:
                handle.waiter = None


class Inbox:
    """Messages that wait to be received, bounded by number and by bytes. Room is reserved before a body is read."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        lock = threading.Lock()
        self._filled, self._drained = threading.Condition(lock), threading.Condition(lock)
        self._waiting: deque[tuple[Message, int | None]] = deque()
        self._count = self._bytes = 0
        self._closed = False
        self._minds_calls = False  # whether a thread waits for a message or for a call

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
        """`reserved` bytes are released when the message is taken; None for a departure, which needs no room."""
        with self._filled:
            self._waiting.append((message, reserved))
            self._filled.notify()

    def get(self, deadline_s: float, over: Callable[[], bool] | None = None) -> Message | None:
        """The next message; None past the deadline, when closed, or once `over()`, which is called at every nudge."""
        with self._filled:
            self._minds_calls = over is not None
            is_over = over or _never
            self._filled.wait_for(lambda: self._waiting or self._closed or is_over(), deadline_s)
            self._minds_calls = False
            if self._closed or not self._waiting:
                return None
            message, reserved = self._waiting.popleft()
            if reserved is not None:
                self._release(reserved)
            return message

    def nudge(self) -> None:
        """A call has ended: wake threads that wait for a message or for that call."""
        if self._minds_calls:
            with self._filled:
                self._filled.notify_all()

    def close(self) -> None:
        with self._filled:
            self._closed = True
            self._filled.notify_all()
            self._drained.notify_all()


def _never() -> bool:
    return False


class Link:
    """One connection to one peer. Frames are sent in the order of `transmit`."""

    def __init__(self, channel: Channel, peer: int, sock: Stream) -> None:
        self.channel, self.peer, self.sock = channel, peer, sock
        self.numbers = itertools.count(1)
        self.fault: str | None = None
        self.shares = False
        """Whether the peer has reported that it can map our memory."""
        self._neighbour = neighbour_of(sock) if isinstance(sock, socket.socket) else None
        self.maps = self._neighbour is not None
        """Whether we can map the peer's memory."""
        self.sums = channel.sums and isinstance(sock, socket.socket) and leaves_host(sock)
        """Whether bodies are sent with a checksum: if the run wants it, on a plain connection that leaves this host."""
        self._pulse = Pulse(sock, channel.vanished_s) if isinstance(sock, socket.socket) else None
        self._turn = threading.Condition(threading.Lock())  # guards all that follows
        self._tickets, self._serving, self._sending, self._broken = 0, 0, False, False
        self._pending: dict[int, ChannelHandle] = {}
        self._held: list[memoryview] = []  # frames that wait for the next one, …
        self._held_body = 0  # … and their bytes of tensors
        self._reserved: int | None = None
        name = f"{channel.rank}-{peer}"
        self._sender = ThreadPoolExecutor(1, f"podium-send-{name}")  # starts its thread when first used
        self.receiver = threading.Thread(target=self._receive, name=f"podium-receive-{name}", daemon=True)

    # Sending.

    def expect(self, number: int, handle: ChannelHandle) -> None:
        with self._turn:
            self._check_whole()
            self._pending[number] = handle

    def transmit(
        self,
        buffers: list[memoryview],
        *,
        later: bool = False,
        more: bool = False,
        sent: Callable[[bool], None] | None = None,
        wanted: Callable[[], bool] | None = None,
    ) -> None:
        """Send a frame. `later`: if it cannot be sent at once, the sender's thread may send it after this returns.

        `more`: another follows at once; a frame without a body waits for it and travels with it. With `sent` this never
        blocks, so that a receiving thread may use it: `sent(ok)` is called once the frame was written, or has failed.
        A frame that still waits when `wanted()` is no longer true is left out, which counts as failed.
        """
        with self._turn:
            self._check_whole()
            self._held += buffers
            self._held_body += sum(buffer.nbytes for buffer in buffers[1:])
            if more and len(buffers) == 1 and len(self._held) < _HELD_FRAMES:
                return
            buffers, self._held = self._held, []
            body, self._held_body = self._held_body, 0
            large = body > _INLINE_BYTES
            ticket, self._tickets = self._tickets, self._tickets + 1
            gone = 0
            if sent is not None and not large and ticket == self._serving:
                gone = self._write_some(buffers)
            if sent is not None and gone == sum(buffer.nbytes for buffer in buffers):
                self._serving += 1
                self._turn.notify_all()
            elif sent is not None or (later and (large or ticket != self._serving)):
                # Under the lock, so in the order of tickets: the one thread must not wait for a frame behind it.
                # An error breaks the link, and so reaches the thread that waits for the reply.
                self._sender.submit(self._send, ticket, buffers, body, sent, gone, wanted if not gone else None)
                return
        if sent is None:
            return self._send(ticket, buffers, body)
        self.channel.count(sent=(body, gone))
        sent(True)

    def _send(
        self,
        ticket: int,
        buffers: list[memoryview],
        body: int,
        sent: Callable[[bool], None] | None = None,
        gone: int = 0,
        wanted: Callable[[], bool] | None = None,
    ) -> None:
        """Write a frame of which `gone` bytes were written before, and report the outcome to `sent`."""
        try:
            if not self._write(ticket, buffers, body, gone, wanted):
                assert sent is not None
                return sent(False)
        except CommError:
            if sent is not None:
                sent(False)
            raise
        if sent is not None:
            sent(True)

    def _write_some(self, buffers: list[memoryview]) -> int:
        """Write as much as the socket takes without blocking; called under the lock by the thread whose turn it is."""
        if not isinstance(self.sock, socket.socket):
            return 0
        try:
            return self.sock.sendmsg(buffers[:_AT_ONCE], [], socket.MSG_DONTWAIT)
        except OSError:  # it is full; or closed, which the sender's thread will find too
            return 0

    def _write(
        self,
        ticket: int,
        buffers: list[memoryview],
        body: int,
        gone: int,
        wanted: Callable[[], bool] | None,
    ) -> bool:
        """Write a frame when its turn has come, and wait until it is written; `body` of its bytes are tensors'.

        Returns whether it was written, or was not wanted any more.
        """
        with self._turn:
            came = self._serving == ticket or self._turn.wait_for(
                lambda: self._broken or self._serving == ticket, self.channel.deadline_s
            )
            self._check_whole()
            if came and wanted is not None and not wanted():
                self._serving += 1
                self._turn.notify_all()
                return False
            self._sending |= came
        if not came:
            raise self._give_up()
        # Before the bytes go: the peer may answer before this thread runs again, and whoever gets the answer may ask.
        self.channel.count(sent=(body, sum(buffer.nbytes for buffer in buffers)))
        try:
            frames.send_buffers(self.sock, frames.after(buffers, gone))
        except BlockingIOError:  # by SO_SNDTIMEO: nothing went out for the whole deadline
            raise self._give_up() from None
        except OSError as error:
            self.break_off()
            raise Lost(f"rank {self.channel.rank}: rank {self.peer} has left ({error.strerror})") from None
        finally:
            with self._turn:
                self._sending, self._serving = False, self._serving + 1
                self._turn.notify_all()
        return True

    def _give_up(self) -> DeadlineExceeded:
        took = f"{self.channel.deadline_s:g} s"
        self.break_off(f"it took nothing for {took}")
        return DeadlineExceeded(
            f"rank {self.channel.rank}: sending to rank {self.peer} made no progress for {took}; connection dropped"
        )

    def _check_whole(self) -> None:
        if self._broken:
            raise Lost(f"rank {self.channel.rank}: rank {self.peer} has left{self.why}")

    @property
    def why(self) -> str:
        return f" ({self.fault})" if self.fault else ""

    def offer_sharing(self) -> None:
        """If the peer's memory can be mapped here, tell it so."""
        if self._neighbour is not None:
            self.transmit(frames.encode_frame(SHARING, self.channel.rank, 0, {}), later=True)

    # Receiving.

    def _receive(self) -> None:
        fault: str | None = "receiving from it failed"
        try:
            fault = self._receive_frames()
        finally:
            self._depart(fault)

    def _receive_frames(self) -> str | None:
        """Receive until the end; returns what was wrong, if anything."""
        try:
            attach = None if self._neighbour is None else self._neighbour.attach
            idle = None if self._pulse is None else self._pulse.check
            while (frame := frames.read_frame(self.sock, self.channel.limits, self._place, attach, idle)) is not None:
                self._deliver(frame)
        except (FrameError, OSError) as error:
            return str(error)
        return None

    def _place(self, header: Header) -> Sequence[Tensor] | None:
        """Where the body goes; blocks while the inbox is full."""
        if header.source != self.peer or header.kind == DEPARTED:
            raise FrameError(f"rank {self.peer} sent {header.kind[:40]!r} in the name of rank {header.source}")
        if header.kind == SHARING:
            return None
        if header.kind in OF_EXCHANGES:
            if self.channel.runner is None or header.call:
                raise FrameError(f"rank {self.peer} sent {header.kind!r}, and no exchange is under way here")
            return self.channel.runner.place(header)
        if header.call < 0:
            handle = self._pending.get(-header.call)
            if handle is None:
                raise FrameError(f"rank {self.peer} answered call {-header.call}, which is not open")
            return handle.into if header.tensors else None
        self.channel.inbox.reserve(header.body_bytes)
        self._reserved = header.body_bytes
        return self.channel.sink(header) if self.channel.sink is not None and header.tensors else None

    def _deliver(self, frame: Frame) -> None:
        header = frame.header
        self.channel.count(received=(header.body_bytes, frame.wire_bytes))
        if header.kind == SHARING:
            self.shares = self.channel.arena is not None
            return
        if header.kind in OF_EXCHANGES:
            assert self.channel.runner is not None
            return self.channel.runner.arrived(header, frame.body)
        message = Message(header.source, header.kind, header.meta, frame.body, landing=frame.landing)
        if header.call < 0:
            with self._turn:
                handle = self._pending.pop(-header.call)
            if header.landing is not None:  # the peer has written it into our `into`
                message = message._replace(body=tuple(handle.into or ()), landing=None)
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
        shut(self.sock, socket.SHUT_RDWR)

    def _depart(self, fault: str | None) -> None:
        self.break_off(fault)
        if self._reserved is not None:
            self.channel.inbox.release(self._reserved)
        with self._turn:
            # The descriptor may be reused the moment it is closed, so no thread may be sending on it.
            self._turn.wait_for(lambda: not self._sending, CLOSE_S)
            orphans = list(self._pending.values())
            self._pending.clear()
        self._sender.shutdown()
        self.sock.close()
        self.channel.take_leave(self, orphans)

    def join(self, until: float) -> None:
        """Wait for the peer to hang up; past `until`, break off."""
        self.receiver.join(max(until - time.monotonic(), 0))
        self.break_off()
        self.receiver.join(CLOSE_S)
