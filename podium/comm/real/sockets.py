"""Sockets of the channel: addresses, listening, and the options that matter for tensors."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from podium.errors import ConfigError

Address = str
"""`unix:/path` or `tcp:host:port`; port 0 takes a free one."""


class Stream(Protocol):
    """What frames need of a connection: a socket has it, and so has TLS around one."""

    @property
    def family(self) -> int: ...
    def recv(self, nbytes: int, flags: int = 0, /) -> bytes: ...
    def recv_into(self, view: memoryview, nbytes: int = 0, flags: int = 0, /) -> int: ...
    def sendmsg(self, buffers: Sequence[memoryview], /) -> int: ...
    def sendall(self, data: bytes, /) -> None: ...
    def settimeout(self, seconds: float | None, /) -> None: ...
    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


_MAX_PATH = 107  # of a Unix socket, on Linux
_SOCKET_BUFFER = 4 << 20  # the kernel lowers it to what it allows


def resolve(address: Address) -> tuple[int, Any]:
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


def listen_at(address: Address, secret: bytes) -> socket.socket:
    """A listening socket; one that others can reach is refused without a secret."""
    family, place = resolve(address)
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


def remake_folder(folder: Path) -> None:
    """Make a private folder again that a cleaner of temporary files has removed; does nothing where it is there.

    Others may have made one of that name in the meantime: then it is refused.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}, where ranks meet, cannot be made again: {error.strerror}") from None
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{folder}, where ranks meet, must be a folder of this user's that nobody else can enter; it was removed, "
            "and somebody has made another in its place"
        )


def address_of(listener: socket.socket) -> Address:
    """Where it really listens, a free port filled in."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    return f"tcp:[{name[0]}]:{name[1]}" if listener.family == socket.AF_INET6 else f"tcp:{name[0]}:{name[1]}"


VANISHED_S = 25.0
"""A host that acknowledges nothing for this long has vanished: its power failed, or the network between broke."""
SHORTEST_VANISHED_S = 4.0
"""Below this, a host that lives would count as vanished: a kernel whose buffers are full drops what comes, and whoever
sent it tries again after 0.2, 0.4, 0.8 s."""
_CHECKS = 5  # how often the receiver looks, in that time


def tune(sock: Stream, deadline_s: float, vanished_s: float = VANISHED_S) -> None:
    """Blocking calls, sends that give up after the deadline, small messages at once, dead hosts noticed.

    On an idle connection keepalive asks the other host every fifth of `vanished_s` whether it is there. Where something
    was sent, the kernel does not, and would try to send it for a quarter of an hour. In both cases `Pulse` notices that
    no answer comes. TCP_USER_TIMEOUT comes last, since it would also end a connection whose receiver lives and is only
    slow to read.
    """
    sock.settimeout(None)
    # A timeout of Python's would make every call two, and cut large ones into pieces.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(deadline_s))
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(vanished_s / _CHECKS))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    part = max(1, int(vanished_s / 5))
    options = {"TCP_KEEPIDLE": part, "TCP_KEEPINTVL": part, "TCP_KEEPCNT": 4}
    options["TCP_USER_TIMEOUT"] = int((deadline_s + VANISHED_S) * 1000)
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _timeval(seconds: float) -> bytes:
    whole, micros = divmod(max(int(seconds * 1e6), 1), 1_000_000)
    return struct.pack("@ll", whole, micros)


class Pulse:
    """Notices that the host at the other end of a TCP connection has vanished.

    It looks at what the kernel knows: how many segments with data have left, whether probes are unanswered, and when an
    acknowledgement came last. A peer that lives acknowledges what it gets, also while it reads nothing and its window
    is shut; the kernel then asks ever more seldom, so silence alone means nothing. Does nothing for a Unix socket: its
    host is ours.
    """

    def __init__(self, sock: socket.socket, limit_s: float = VANISHED_S) -> None:
        self._sock, self._limit_s = sock, limit_s
        self._looked = time.monotonic()
        self._sent = self._facts().sent
        self._since: float | None = None  # since when something waits for an acknowledgement
        self.every_s = limit_s / _CHECKS
        """How often it should be asked."""

    def check(self) -> None:
        """Raises TimeoutError once nothing was acknowledged for the limit, though something was sent."""
        facts, now = self._facts(), time.monotonic()
        if now - facts.silent_s > self._looked:
            self._since = None
        elif self._since is None and (facts.sent > self._sent or facts.probes):
            self._since = now
        self._looked, self._sent = now, facts.sent
        # It may have begun just after the time before, and it is too late when asked next time.
        if self._since is not None and now - self._since >= self._limit_s - 2 * self.every_s:
            raise TimeoutError(f"its host acknowledged nothing for {facts.silent_s:.1f} s")

    def _facts(self) -> _Facts:
        if self._sock.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
            return _Facts()
        try:
            raw = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:  # it is closed already, which the receiver will find
            return _Facts()
        if len(raw) < _TCP_INFO.size:  # a kernel before 4.6
            return _Facts()
        probes, silent_ms, sent = _TCP_INFO.unpack(raw)
        return _Facts(probes, silent_ms / 1000, sent)


class _Facts(NamedTuple):
    """What the kernel knows of a connection."""

    probes: int = 0  # probes that nobody has answered
    silent_s: float = 0.0  # since the last acknowledgement
    sent: int = 0  # segments with data, those that were sent again too


_TCP_INFO = struct.Struct("@3xB52xI96xI")
"""Of Linux's `struct tcp_info`: tcpi_probes, tcpi_last_ack_recv and tcpi_data_segs_out."""


def leaves_host(sock: socket.socket) -> bool:
    """Whether the other end of a connection is on another host, as far as addresses tell."""
    if sock.family == socket.AF_UNIX:
        return False
    try:
        return bool(sock.getpeername()[0] != sock.getsockname()[0])
    except OSError:  # it has ended already
        return False


def shut(sock: Stream | None, how: int = socket.SHUT_RDWR) -> None:
    """Shut down, whatever state it is in."""
    if sock is not None:
        with suppress(OSError):  # it is closed already, or the other side was faster
            sock.shutdown(how)
