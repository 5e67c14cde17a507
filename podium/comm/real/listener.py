"""Accepts an endpoint's connections, and restores the name of its Unix socket when it is removed.

An endpoint listens at one address, or where its run is on several hosts at a Unix socket and at a TCP port.

A connection is a stranger until its handshake is done. The number of strangers is limited and each has its own thread,
so that many silent connections cannot block a real peer.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, final

from podium.comm.real.link import CLOSE_S
from podium.comm.real.sockets import Address, BothWays, Stream, address_of, listen_at, remake_folder, shut
from podium.errors import CommError, ConfigError

_RETRY_S = 0.05
_HEAL_S = 1.0
"""How often a listener checks that its Unix socket still has its name: temporary files are cleaned up."""
_MAX_STRANGERS = 64  # connections in their handshake; one more drops the oldest


class _Door(NamedTuple):
    """A listening socket."""

    socket: socket.socket
    address: Address
    inode: int  # of a Unix socket's file: shows whether it is still ours

    @classmethod
    def open(cls, address: Address, secret: bytes) -> _Door:
        sock = listen_at(address, secret)
        path = _path(address)
        return cls(sock, address_of(sock), 0 if path is None else path.stat().st_ino)


@final
class Listener:
    """The listening sockets of an endpoint, and the connections whose handshake is not done yet."""

    def __init__(
        self,
        listen: Address,
        secret: bytes,
        name: str,
        *,
        wrap: Callable[[socket.socket], Stream],
        greet: Callable[[Stream], None],
    ) -> None:
        """`wrap` may put TLS around a connection; `greet` does the handshake, and raises where it fails."""
        self._secret, self._name, self._wrap, self._greet = secret, name, wrap, greet
        self._lock = threading.Lock()  # guards all that follows
        self._closed = self._names_let_go = False
        self._strangers: dict[threading.Thread, Stream | None] = {}  # None once the handshake has succeeded
        both = BothWays.of(listen)
        with ExitStack() as undo:
            self._doors: list[_Door] = []
            for address in (listen,) if both is None else (both.near, both.far):
                self._doors.append(_Door.open(address, secret))
                undo.callback(self._doors[-1].socket.close)
            undo.pop_all()
        addresses = [door.address for door in self._doors]
        self.address: Address = addresses[0] if both is None else str(BothWays(both.host, *addresses))
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)  # shutting a Unix socket down does not end a wait with a timeout
        self._acceptor = threading.Thread(target=self._accept, name=f"podium-accept-{name}", daemon=True)

    def start(self) -> None:
        self._acceptor.start()

    def trust_current(self) -> None:
        """The handshake of this thread's stranger has succeeded."""
        with self._lock:
            self._strangers[threading.current_thread()] = None

    def let_name_go(self) -> None:
        """From now on, do not restore the name of the Unix socket when it is removed."""
        with self._lock:
            self._names_let_go = True

    def stop(self) -> None:
        """Take no more connections, and end all handshakes."""
        with self._lock:
            self._closed = True
            sockets = (*(door.socket for door in self._doors), *self._strangers.values())
        os.eventfd_write(self._wake, 1)
        for sock in sockets:
            shut(sock)

    def close(self) -> None:
        """After `stop`: wait for the threads, and remove the sockets."""
        with self._lock:
            strangers = list(self._strangers)
        for thread in (self._acceptor, *strangers):
            thread.join(CLOSE_S)
        if not self._acceptor.is_alive():
            os.close(self._wake)
        for door in self._doors:
            door.socket.close()
            path = _path(door.address)
            if path is not None:
                with suppress(OSError):  # already removed by a cleaner; the folder's name may be taken, too
                    path.unlink()

    def _heal(self) -> None:
        """Listen again where the name of the Unix socket was removed: peers that have not dialled yet need it."""
        for i, door in enumerate(self._doors):
            path = _path(door.address)
            if path is not None and not self._names_let_go and not self._closed:
                self._heal_door(i, path)

    def _heal_door(self, i: int, path: Path) -> None:
        door = self._doors[i]
        with suppress(OSError):
            if path.stat().st_ino == door.inode:
                return
        with suppress(OSError, ConfigError):  # a peer that dials finds no socket, and raises
            remake_folder(path.parent)
            path.unlink(missing_ok=True)
            again = _Door.open(door.address, self._secret)
            with self._lock:
                if self._closed:
                    return again.socket.close()
                again.socket.settimeout(_HEAL_S)
                self._doors[i] = again
            door.socket.close()

    def _accept(self) -> None:
        for door in self._doors:
            door.socket.settimeout(_HEAL_S)  # the peer that dialled may have hung up since
        while not self._closed:
            ready = self._dialled()
            if not ready:
                self._heal()
            for door in ready:
                self._take_from(door)

    def _take_from(self, door: _Door) -> None:
        try:
            plain, _ = door.socket.accept()
        except TimeoutError:
            return
        except OSError:
            if not self._closed:
                time.sleep(_RETRY_S)  # out of file descriptors, most likely, which may pass
            return
        try:
            self._admit(self._wrap(plain))
        except OSError:  # it has hung up already
            plain.close()

    def _dialled(self) -> list[_Door]:
        """The doors with a connection; waits for one, for `stop`, or until it is time to check the socket's name."""
        waiting = select.poll()
        for door in self._doors:
            waiting.register(door.socket, select.POLLIN)
        waiting.register(self._wake, select.POLLIN)
        ready = {number for number, _ in waiting.poll(_HEAL_S * 1000)}
        return [door for door in self._doors if door.socket.fileno() in ready and not self._closed]

    def _admit(self, sock: Stream) -> None:
        """Do the handshake with a stranger in a new thread."""
        with self._lock:
            if self._closed:
                return sock.close()
            self._drop_oldest()
            thread = threading.Thread(
                target=self._shake_hands, args=(sock,), name=f"podium-admit-{self._name}", daemon=True
            )
            self._strangers[thread] = sock
            thread.start()

    def _shake_hands(self, sock: Stream) -> None:
        """Close the connection where its handshake fails."""
        try:
            self._greet(sock)
        except (OSError, CommError):
            sock.close()
        finally:
            with self._lock:
                del self._strangers[threading.current_thread()]

    def _drop_oldest(self) -> None:
        silent = [thread for thread, sock in self._strangers.items() if sock is not None]
        if len(silent) >= _MAX_STRANGERS:
            shut(self._strangers[silent[0]])
            self._strangers[silent[0]] = None


def _path(address: Address) -> Path | None:
    """The file of a Unix socket."""
    return Path(address.removeprefix("unix:")) if address.startswith("unix:") else None
