"""Sockets of the channel: addresses, listening, and the options that matter for tensors."""

from __future__ import annotations

import ipaddress
import os
import re
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
"""`unix:/path` or `tcp:host:port` (port 0 takes a free one), or both of one endpoint: see `BothWays`."""


class BothWays(NamedTuple):
    """An endpoint that ranks of its own host reach by a Unix socket, and ranks of other hosts by TCP.

    As an address: `host:ID;unix:/path;tcp:host:port`. ID is a random word that all ranks of the host share.
    """

    host: str
    near: Address
    far: Address

    @classmethod
    def of(cls, address: Address) -> BothWays | None:
        """None for a plain address; raises where it is neither a plain one nor of this form."""
        if not address.startswith("host:"):
            return None
        parts = address.removeprefix("host:").split(";")
        schemes = [part.partition(":")[0] for part in parts[1:]]
        if schemes != ["unix", "tcp"] or not _HOST.fullmatch(parts[0]):
            raise ConfigError(f"an address of both ways must be host:ID;unix:/path;tcp:host:port, got {address!r}")
        return cls(*parts)

    def __str__(self) -> Address:
        return f"host:{self.host};{self.near};{self.far}"


_HOST = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Stream(Protocol):
    """What frames need of a connection; sockets and TLS streams have it."""

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


def address_from(host: str, address: Address) -> Address:
    """The plain address by which an endpoint of `host` reaches this one; `host` is empty where all are on one host."""
    both = BothWays.of(address)
    if both is None:
        return address
    return both.near if both.host == host else both.far


def resolve(address: Address) -> tuple[int, Any]:
    """Family and address for `socket.bind` or `connect`; of a plain address."""
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
    """A listening socket; raises where other hosts can reach it and there is no secret."""
    family, place = resolve(address)
    if family != socket.AF_UNIX and not secret and not ipaddress.ip_address(place[0]).is_loopback:
        raise ConfigError(f"{address} can be reached from outside: a secret is needed to listen there, got none")
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        if family == socket.AF_UNIX:
            os.chmod(place, 0o600)  # before `listen`, so that other users can connect at no moment
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen at {address}: {error.strerror}") from None
    return sock


def remake_folder(folder: Path) -> None:
    """Make a private folder again that a cleaner of temporary files has removed; does nothing where it exists.

    Raises where a folder of that name exists now that other users own or can enter.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}, where ranks meet, cannot be made again: {error.strerror}") from None
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{folder}, where ranks meet, must be a folder of this user's that nobody else can enter; it was removed, "
            "and another was made in its place"
        )


def address_of(listener: socket.socket) -> Address:
    """The address it listens at, with the port that port 0 got."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    return f"tcp:[{name[0]}]:{name[1]}" if listener.family == socket.AF_INET6 else f"tcp:{name[0]}:{name[1]}"


VANISHED_S = 25.0
"""A host that acknowledges nothing for this long has vanished: its power failed, or the network between broke."""
SHORTEST_VANISHED_S = 4.0
"""Below this, a live host would count as vanished: a kernel whose buffers are full drops packets, and their sender
retries after 0.2, 0.4, 0.8 s."""
_CHECKS = 5  # how often the receiver checks in that time


def tune(sock: Stream, deadline_s: float, vanished_s: float = VANISHED_S) -> None:
    """Set options: blocking calls, sends that fail after the deadline, no delay of small messages, keepalive.

    On an idle connection keepalive probes the other host every fifth of `vanished_s`. While sent data is unacknowledged
    the kernel does not probe, and would retransmit for a quarter of an hour. In both cases `Pulse` notices that no
    answer comes. TCP_USER_TIMEOUT is the last resort, since it would also end a connection whose receiver is alive and
    only slow to read.
    """
    sock.settimeout(None)
    # Python's own timeout would double the system calls, and cut large ones into pieces.
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

    It reads the kernel's statistics: how many segments with data were sent, whether probes are unanswered, and when the
    last acknowledgement came. A live peer acknowledges what it gets, also while it reads nothing and its window is
    shut; the kernel then probes less and less often, so silence alone means nothing. Does nothing for a Unix socket,
    which does not leave the host.
    """

    def __init__(self, sock: socket.socket, limit_s: float = VANISHED_S) -> None:
        self._sock, self._limit_s = sock, limit_s
        self._looked = time.monotonic()
        self._sent = self._facts().sent
        self._since: float | None = None  # since when data waits for an acknowledgement
        self.every_s = limit_s / _CHECKS
        """How often `check` should be called."""

    def check(self) -> None:
        """Raises TimeoutError once data that was sent is not acknowledged for the limit."""
        facts, now = self._facts(), time.monotonic()
        if now - facts.silent_s > self._looked:
            self._since = None
        elif self._since is None and (facts.sent > self._sent or facts.probes):
            self._since = now
        self._looked, self._sent = now, facts.sent
        # The silence may have begun just after the previous check, and the next check would be too late.
        if self._since is not None and now - self._since >= self._limit_s - 2 * self.every_s:
            raise TimeoutError(f"its host acknowledged nothing for {facts.silent_s:.1f} s")

    def _facts(self) -> _Facts:
        if self._sock.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
            return _Facts()
        try:
            raw = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:  # already closed, which the receiver will find
            return _Facts()
        if len(raw) < _TCP_INFO.size:  # a kernel before 4.6
            return _Facts()
        probes, silent_ms, sent = _TCP_INFO.unpack(raw)
        return _Facts(probes, silent_ms / 1000, sent)


class _Facts(NamedTuple):
    """The kernel's statistics of a connection."""

    probes: int = 0  # unanswered probes
    silent_s: float = 0.0  # since the last acknowledgement
    sent: int = 0  # segments with data, retransmissions too


_TCP_INFO = struct.Struct("@3xB52xI96xI")
"""Of Linux's `struct tcp_info`: tcpi_probes, tcpi_last_ack_recv and tcpi_data_segs_out."""


def leaves_host(sock: socket.socket) -> bool:
    """Whether the other end of a connection is on another host, judged by its address."""
    if sock.family == socket.AF_UNIX:
        return False
    try:
        return bool(sock.getpeername()[0] != sock.getsockname()[0])
    except OSError:  # it has ended already
        return False


def shut(sock: Stream | None, how: int = socket.SHUT_RDWR) -> None:
    """Shut down; does nothing where it is closed already."""
    if sock is not None:
        with suppress(OSError):  # closed already, here or by the other side
            sock.shutdown(how)
