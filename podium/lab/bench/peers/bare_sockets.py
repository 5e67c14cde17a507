"""Bare TCP sockets: the bandwidth of a link without computing or framing.

`BareStar`, for `bench ps`: a connection between the server and each worker; both ends send as fast as they can.
`BareRing`, for `bench collectives`: each node sends to the next and receives from the previous one, all links both ways
at once: an all-reduce without the sums. Two nodes use one connection both ways, as Podium does.
"""

from __future__ import annotations

import socket
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from podium.comm.real.process_group import file_store, look_up, publish
from podium.errors import CommError
from podium.lab.bench.peers.place import Place
from podium.lab.bench.peers.team import Team, answer
from podium.lab.bench.peers.work import DEADLINE_S, WORKERS

_STAR_BUFFER_BYTES = 4 << 20
_RING_BUFFER_BYTES = 1 << 20


class BareStar:
    """The server connected to each worker; it is the last of `places`."""

    def __init__(self, folder: Path, places: tuple[Place, ...]) -> None:
        members = [partial(_star_node, rank, folder, place) for rank, place in enumerate(places)]
        self._team = Team("bare sockets", members)

    def measure(self, seconds: float) -> float:
        """Bytes per second over the server's link, in and out together."""
        answers = self._team.ask("round", seconds, members=range(WORKERS + 1))
        return float(sum(received / took for received, took in answers))

    def end(self) -> None:
        self._team.end()


class BareRing:
    """One process per node, connected to the next and the previous one."""

    def __init__(self, folder: Path, places: tuple[Place, ...]) -> None:
        self._members = range(len(places))
        members = [partial(_ring_node, rank, len(places), folder, place) for rank, place in enumerate(places)]
        self._team = Team("bare sockets", members)

    def measure(self, nbytes: int) -> float:
        """Seconds until the slowest node has sent and received `nbytes` bytes."""
        return max(float(took) for took in self._team.ask("round", nbytes, members=self._members))

    def end(self) -> None:
        self._team.end()


def _listen(place: Place) -> tuple[socket.socket, str]:
    """A listening socket of this place, and its address."""
    place.enter(keeping_memory=False)
    host = place.host or "127.0.0.1"
    listener = socket.create_server((host, 0))
    listener.settimeout(DEADLINE_S)
    return listener, f"{host}:{listener.getsockname()[1]}"


def _dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def _star_node(rank: int, folder: Path, place: Place, pipe: Connection) -> None:
    listener, address = _listen(place)
    store = file_store(folder / "bare")
    with listener:
        if rank < WORKERS:
            server = look_up(store, "listens", DEADLINE_S)
            return answer(pipe, {"round": lambda seconds: _stream([_dial(server)], seconds)})
        publish(store, "listens", address)
        answer(pipe, {"round": lambda seconds: _stream([listener.accept()[0] for _ in range(WORKERS)], seconds)})


def _stream(connections: list[socket.socket], seconds: float) -> tuple[int, float]:
    """Bytes received over all connections while both ends send for `seconds`, and the time until the last byte."""
    received = [0] * len(connections)
    began = time.perf_counter()

    def send(sock: socket.socket) -> None:
        body = memoryview(bytearray(_STAR_BUFFER_BYTES))
        while time.perf_counter() - began < seconds:
            sock.sendall(body)
        sock.shutdown(socket.SHUT_WR)

    def receive(n: int, sock: socket.socket) -> None:
        body = bytearray(_STAR_BUFFER_BYTES)
        while count := sock.recv_into(body):
            received[n] += count

    threads = []
    for n, sock in enumerate(connections):
        sock.settimeout(DEADLINE_S)
        threads += [threading.Thread(target=send, args=(sock,), daemon=True)]
        threads += [threading.Thread(target=receive, args=(n, sock), daemon=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    took = time.perf_counter() - began
    for sock in connections:
        sock.close()
    return sum(received), took


def _ring_node(rank: int, size: int, folder: Path, place: Place, pipe: Connection) -> None:
    listener, address = _listen(place)
    store = file_store(folder / "bare")
    with listener:
        publish(store, f"listens-{rank}", address)
        dials = size > 2 or rank == 0
        after = _dial(look_up(store, f"listens-{(rank + 1) % size}", DEADLINE_S)) if dials else None
        before = listener.accept()[0] if size > 2 or rank == 1 else None
    out, into = after or before, before or after
    assert out is not None and into is not None
    for sock in (out, into):
        sock.settimeout(DEADLINE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answer(pipe, {"round": lambda nbytes: _ring_round(out, into, nbytes)})


def _ring_round(out: socket.socket, into: socket.socket, nbytes: int) -> float:
    _swap(out, into, 1)  # a barrier between neighbours
    began = time.perf_counter()
    _swap(out, into, nbytes)
    return time.perf_counter() - began


def _swap(out: socket.socket, into: socket.socket, nbytes: int) -> None:
    """Send `nbytes` while receiving as many."""
    sender = threading.Thread(target=_send, args=(out, nbytes), daemon=True)
    sender.start()
    _receive(into, nbytes)
    sender.join(DEADLINE_S)


def _send(sock: socket.socket, nbytes: int) -> None:
    body = memoryview(bytearray(min(nbytes, _RING_BUFFER_BYTES)))
    for start in range(0, nbytes, _RING_BUFFER_BYTES):
        sock.sendall(body[: nbytes - start])


def _receive(sock: socket.socket, nbytes: int) -> None:
    body = memoryview(bytearray(min(nbytes, _RING_BUFFER_BYTES)))
    while nbytes:
        count = sock.recv_into(body[:nbytes])
        if count == 0:
            raise CommError("a bare socket was closed in the middle of a round")
        nbytes -= count
