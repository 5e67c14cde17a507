"""Accepts an endpoint's connections, and restores the name of its Unix socket when it is removed.

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
from contextlib import suppress
from pathlib import Path
from typing import final

from podium.comm.real.link import CLOSE_S
from podium.comm.real.sockets import Address, Stream, address_of, listen_at, remake_folder, shut
from podium.errors import CommError, ConfigError

_RETRY_S = 0.05
_HEAL_S = 1.0
"""How often a listener checks that its Unix socket still has its name: temporary files are cleaned up."""
_MAX_STRANGERS = 64  # connections in their handshake; one more drops the oldest


@final
class Listener:
    """A listening socket, and the connections whose handshake is not done yet."""

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
        self._closed = False
        self._strangers: dict[threading.Thread, Stream | None] = {}  # None once the handshake has succeeded
        self._socket, self._inode = self._open(listen)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)  # shutting a Unix socket down does not end a wait with a timeout
        self.address: Address = address_of(self._socket)
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
            self._inode = 0

    def stop(self) -> None:
        """Take no more connections, and end all handshakes."""
        with self._lock:
            self._closed = True
            sockets = (self._socket, *self._strangers.values())
        os.eventfd_write(self._wake, 1)
        for sock in sockets:
            shut(sock)

    def close(self) -> None:
        """After `stop`: wait for the threads, and remove the socket."""
        with self._lock:
            strangers = list(self._strangers)
        for thread in (self._acceptor, *strangers):
            thread.join(CLOSE_S)
        if not self._acceptor.is_alive():
            os.close(self._wake)
        self._socket.close()
        if self.address.startswith("unix:"):
            with suppress(OSError):  # already removed by a cleaner; the folder's name may be taken, too
                Path(self.address.removeprefix("unix:")).unlink()

    def _open(self, address: Address) -> tuple[socket.socket, int]:
        """Listen there; returns the socket and, of a Unix socket, the inode, which shows whether the file is ours."""
        sock = listen_at(address, self._secret)
        return sock, Path(address.removeprefix("unix:")).stat().st_ino if address.startswith("unix:") else 0

    def _heal(self) -> None:
        """Listen again where the name of the Unix socket was removed: peers that have not dialled yet need it."""
        if not self._inode or self._closed:
            return
        path = Path(self.address.removeprefix("unix:"))
        with suppress(OSError):
            if path.stat().st_ino == self._inode:
                return
        with suppress(OSError, ConfigError):  # a peer that dials finds no socket, and raises
            remake_folder(path.parent)
            path.unlink(missing_ok=True)
            listener, inode = self._open(self.address)
            with self._lock:
                if self._closed:
                    return listener.close()
                listener.settimeout(_HEAL_S)
                before, self._socket, self._inode = self._socket, listener, inode
            before.close()

    def _accept(self) -> None:
        self._socket.settimeout(_HEAL_S)  # the peer that dialled may have hung up since
        while not self._closed:
            try:
                if not self._is_dialled():
                    self._heal()
                    continue
                plain, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                if not self._closed:
                    time.sleep(_RETRY_S)  # out of file descriptors, most likely, which may pass
                continue
            try:
                self._admit(self._wrap(plain))
            except OSError:  # it has hung up already
                plain.close()

    def _is_dialled(self) -> bool:
        """Wait for a connection, for `stop`, or until it is time to check the socket's name."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        waiting.register(self._wake, select.POLLIN)
        ready = [number for number, _ in waiting.poll(_HEAL_S * 1000)]
        return self._socket.fileno() in ready and not self._closed

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
