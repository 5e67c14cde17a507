"""Sockets of the channel: addresses, listening, and the options that matter for tensors."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

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


def tune(sock: Stream, deadline_s: float) -> None:
    """Blocking calls, sends that give up after the deadline, small messages at once, dead hosts noticed."""
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


def shut(sock: Stream | None, how: int = socket.SHUT_RDWR) -> None:
    """Shut down, whatever state it is in."""
    if sock is not None:
        with suppress(OSError):  # it is closed already, or the other side was faster
            sock.shutdown(how)
