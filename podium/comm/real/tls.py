"""Mutual TLS for the channel's TCP connections: both sides show a certificate that the run's own authority signed.

Names in certificates are not checked: every rank of the run has a certificate of its authority, and the handshake of
`frames`, inside TLS, proves which rank it is. Unix sockets do not use TLS. Only version 1.3 is allowed.

Python's `ssl` requires that one thread at a time uses an OpenSSL object, and here one thread writes a connection while
another waits to read. So the socket does not block: threads call OpenSSL under a lock for what can be done at once, and
wait outside of the lock. Threads that both have work take turns of some records each.

OpenSSL encrypts straight from a tensor's memory and decrypts straight into it, one record of 16 KiB at a time; each is
a step through the interpreter, which makes TLS two to three times slower than a plain socket on one machine.

Connections end without TLS's closing message: a frame has its length, so one that was cut short is noticed, and a
connection that is cut between two frames is a departure with TLS or without. Keys do not change during a connection.
"""

from __future__ import annotations

import errno
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, final

from podium.comm.real.sockets import VANISHED_S, Pulse
from podium.config import RunConfig
from podium.errors import ConfigError

_RECORD = 16 << 10
_TURN = 16 * _RECORD  # bytes that a thread may move before a waiting thread gets its turn


@dataclass(frozen=True)
class Tls:
    """An endpoint's certificate and key, and the authority that must have signed its peers': paths of PEM files."""

    cert: str
    key: str
    ca: str


def tls_of(config: RunConfig) -> Tls | None:
    """The run's TLS settings; None where they are not set."""
    if config.tls_cert is None or config.tls_key is None or config.tls_ca is None:
        return None
    return Tls(config.tls_cert, config.tls_key, config.tls_ca)


@final
class Guard:
    """Puts TLS around the connections of one endpoint."""

    def __init__(self, tls: Tls, deadline_s: float, vanished_s: float = VANISHED_S) -> None:
        """Reads the files. A send fails when the peer takes no bytes for `deadline_s`, as without TLS."""
        self._deadline_s, self._vanished_s = deadline_s, vanished_s
        self._listening = _context(tls, ssl.PROTOCOL_TLS_SERVER)
        self._listening.num_tickets = 0  # sessions are not resumed
        self._dialling = _context(tls, ssl.PROTOCOL_TLS_CLIENT)

    def wrap(self, sock: socket.socket, *, listens: bool) -> TlsStream:
        """Takes the socket over; nothing is sent yet."""
        context = self._listening if listens else self._dialling
        return TlsStream(sock, context, self._deadline_s, listens=listens, vanished_s=self._vanished_s)


class _ClosedWhenDropped(ssl.SSLSocket):
    """Where a peer hangs up while its socket is wrapped, `ssl` raises and drops the new socket without closing it."""

    def __del__(self) -> None:
        self.close()


def _context(tls: Tls, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = _ClosedWhenDropped
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    except OSError as error:
        raise ConfigError(f"tls_cert and tls_key: {tls.cert} and {tls.key} are no pair: {_why(error)}") from None
    try:
        context.load_verify_locations(tls.ca)
    except OSError as error:
        raise ConfigError(f"tls_ca: {tls.ca} holds no certificate of an authority: {_why(error)}") from None
    return context


def _no_password() -> NoReturn:
    """Without this callback OpenSSL would prompt on the terminal."""
    raise ConfigError("tls_key: the key must not be encrypted: ranks cannot be asked for a password")


def _why(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error.strerror or error)


@final
class TlsStream:
    """A socket's methods, as far as frames use them, over TLS. One thread may receive while another sends."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        deadline_s: float,
        *,
        listens: bool,
        vanished_s: float = VANISHED_S,
    ) -> None:
        sock.setblocking(False)
        sock.getpeername()  # raises if the peer has hung up: `wrap_socket` would then leak the socket
        self._tls = context.wrap_socket(sock, server_side=listens, do_handshake_on_connect=False)
        self._deadline_s = deadline_s
        self._pulse = Pulse(self._tls, vanished_s)
        self._timeout_s: float | None = None
        self._turn = _Turn()
        self._ended = self._closed = False

    @property
    def family(self) -> int:
        return self._tls.family

    def settimeout(self, seconds: float | None, /) -> None:
        """Limit of each call. None: receiving waits while the peer's host is alive, sending for the deadline."""
        self._timeout_s = seconds

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None:
        self._tls.setsockopt(level, option, value)

    def shake_hands(self, until: float) -> None:
        """TLS's own handshake, which comes first; raises SSLError when the other side is not trusted.

        A dialler is done before the listener has checked its certificate: a refusal reaches it as an error of its next
        receive.
        """
        while True:
            with self._turn:
                try:
                    return self._tls.do_handshake()
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                    wanted = _wanted(error)
                except ssl.SSLEOFError:
                    raise ConnectionAbortedError("the connection ended during TLS's handshake") from None
            if not self._await(wanted, until):
                raise TimeoutError("TLS's handshake took too long")

    def recv(self, nbytes: int, flags: int = 0, /) -> bytes:
        received = bytearray(nbytes)
        return bytes(received[: self.recv_into(memoryview(received), nbytes, flags)])

    def recv_into(self, view: memoryview, nbytes: int = 0, flags: int = 0, /) -> int:
        """As `socket.recv_into`; of the flags, only MSG_WAITALL has an effect."""
        total, filled, until = nbytes or view.nbytes, 0, self._until()
        while filled < total:
            got = self._read(view[filled:total], until)
            filled += got
            if got == 0 or not flags & socket.MSG_WAITALL:
                break
        return filled

    def _read(self, view: memoryview, until: float | None) -> int:
        """Read what is available, once anything is; returns its bytes, 0 at the end."""
        while True:
            filled, end = 0, min(view.nbytes, _TURN)
            with self._turn:
                self._check_open()
                try:
                    while filled < end and not self._ended:
                        got = self._tls.read(end - filled, view[filled:])
                        assert isinstance(got, int)  # not bytes, since there is a buffer
                        filled, self._ended = filled + got, got == 0
                    return filled
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                    if filled:
                        return filled
                    wanted = _wanted(error)
            if not self._await(wanted, until):
                raise TimeoutError("nothing came in time")

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        """Sends the first buffer, or several small ones as one record; returns how many bytes that was."""
        data = _first_of(buffers)
        self._write(data)
        return data.nbytes

    def sendall(self, data: bytes, /) -> None:
        self._write(memoryview(data))

    def _write(self, data: memoryview) -> None:
        until, sent = self._until(), 0
        while sent < data.nbytes:
            turn_end, wanted = sent + _TURN, 0
            with self._turn:
                self._check_open()
                try:
                    while sent < min(data.nbytes, turn_end):
                        # After a want, OpenSSL must get the same bytes again: `sent` has not changed.
                        sent += self._tls.write(data[sent:])
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                    wanted = _wanted(error)
            # When the socket is ready again, the peer has taken bytes: its deadline starts again.
            limit = time.monotonic() + self._deadline_s if until is None else until
            if wanted and not self._await(wanted, limit):
                raise BlockingIOError(errno.EAGAIN, "nothing was taken in time")

    def _until(self) -> float | None:
        return None if self._timeout_s is None else time.monotonic() + self._timeout_s

    def _await(self, wanted: int, until: float | None) -> bool:
        """Whether the socket got ready for this in time. Without a limit, waits until the peer's host has vanished."""
        ready, file = select.poll(), self._tls.fileno()
        self._check_open()
        ready.register(file, wanted)
        if until is not None:
            return bool(ready.poll(max(until - time.monotonic(), 0.0) * 1000))
        while not ready.poll(self._pulse.every_s * 1000):
            self._check_open()
            self._pulse.check()
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "the connection is closed")

    def shutdown(self, how: int, /) -> None:
        # Not SSLSocket's own method, which also drops TLS and would continue unencrypted.
        socket.socket.shutdown(self._tls, how)

    def close(self) -> None:
        with self._turn:
            self._closed = True
            self._tls.close()


class _Turn:
    """A fair lock: a waiting thread gets it before the thread that has just released it."""

    def __init__(self) -> None:
        self._next, self._held = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._held.acquire()

    def __exit__(self, *_: object) -> None:
        self._held.release()


def _wanted(error: ssl.SSLError) -> int:
    return select.POLLIN if isinstance(error, ssl.SSLWantReadError) else select.POLLOUT


def _first_of(buffers: Sequence[memoryview]) -> memoryview:
    """The first buffer, joined with the next ones as long as all fit into one record."""
    total, count = 0, 0
    for buffer in buffers:
        if total + buffer.nbytes > _RECORD:
            break
        total, count = total + buffer.nbytes, count + 1
    return buffers[0] if count < 2 else memoryview(b"".join(buffers[:count]))
