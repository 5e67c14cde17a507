"""Bare TCP sockets around a ring, all links both ways at once: what remains of an all-reduce when nobody adds.

Each node sends so many bytes to the next while it takes as many from the one before, in calls of 1 MB. Two nodes use
one connection both ways, as Podium does.
"""

from __future__ import annotations

import socket
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from podium.comm.torch_dist import file_store, look_up, publish
from podium.errors import CommError
from podium.lab.bench.peers.podium_ps import Place
from podium.lab.bench.peers.team import Team, answer
from podium.lab.bench.peers.work import DEADLINE_S
from podium.launch.clusters.namespaces import enter_namespace

_BUFFER_BYTES = 1 << 20


class BareRing:
    """One process per node, connected to the next and to the one before."""

    def __init__(self, folder: Path, places: tuple[Place, ...]) -> None:
        self._members = range(len(places))
        self._team = Team(
            "bare sockets", [partial(_node, rank, len(places), folder, place) for rank, place in enumerate(places)]
        )

    def measure(self, nbytes: int) -> float:
        """Seconds until every node has sent, and received, so many bytes; of the slowest."""
        return max(float(took) for took in self._team.ask("round", nbytes, members=self._members))

    def end(self) -> None:
        self._team.end()


def _node(rank: int, size: int, folder: Path, place: Place, pipe: Connection) -> None:
    if place.namespace is not None:
        enter_namespace(place.namespace)
    host, store = place.host or "127.0.0.1", file_store(folder / "bare")
    with socket.create_server((host, 0)) as listener:
        listener.settimeout(DEADLINE_S)
        publish(store, f"listens-{rank}", f"{host}:{listener.getsockname()[1]}")
        dials = size > 2 or rank == 0
        after = _dial(look_up(store, f"listens-{(rank + 1) % size}", DEADLINE_S)) if dials else None
        before = listener.accept()[0] if size > 2 or rank == 1 else None
    out, into = after or before, before or after
    assert out is not None and into is not None
    for sock in (out, into):
        sock.settimeout(DEADLINE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answer(pipe, {"round": lambda nbytes: _turn(out, into, nbytes)})


def _dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def _turn(out: socket.socket, into: socket.socket, nbytes: int) -> float:
    _swap(out, into, 1)  # all are here
    began = time.perf_counter()
    _swap(out, into, nbytes)
    return time.perf_counter() - began


def _swap(out: socket.socket, into: socket.socket, nbytes: int) -> None:
    """Send so many bytes while receiving as many."""
    sender = threading.Thread(target=_send, args=(out, nbytes), daemon=True)
    sender.start()
    _receive(into, nbytes)
    sender.join(DEADLINE_S)


def _send(sock: socket.socket, nbytes: int) -> None:
    body = memoryview(bytearray(min(nbytes, _BUFFER_BYTES)))
    for start in range(0, nbytes, _BUFFER_BYTES):
        sock.sendall(body[: nbytes - start])


def _receive(sock: socket.socket, nbytes: int) -> None:
    body = memoryview(bytearray(min(nbytes, _BUFFER_BYTES)))
    while nbytes:
        count = sock.recv_into(body[:nbytes])
        if count == 0:
            raise CommError("a bare socket was closed in the middle of a round")
        nbytes -= count
