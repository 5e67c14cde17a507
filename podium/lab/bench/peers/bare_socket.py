"""Bare TCP sockets between two workers and a server, both ways at once: what a link carries when nobody thinks."""

from __future__ import annotations

import socket
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from podium.comm.torch_dist import file_store, look_up, publish
from podium.lab.bench.peers.podium_ps import Place
from podium.lab.bench.peers.team import Team, answer
from podium.lab.bench.peers.work import DEADLINE_S, WORKERS
from podium.launch.clusters.namespaces import enter_namespace

_BUFFER_BYTES = 4 << 20


class BareSockets:
    """A connection between the server and each worker; each end sends as fast as it can and takes what comes."""

    def __init__(self, folder: Path, places: tuple[Place, ...]) -> None:
        members = [partial(_node, rank, folder, place) for rank, place in enumerate(places)]
        self._team = Team("bare sockets", members)

    def measure(self, seconds: float) -> float:
        """Bytes per second over the server's link, in and out together."""
        answers = self._team.ask("round", seconds, members=range(WORKERS + 1))
        return float(sum(received / took for received, took in answers))

    def end(self) -> None:
        self._team.end()


def _node(rank: int, folder: Path, place: Place, pipe: Connection) -> None:
    if place.namespace is not None:
        enter_namespace(place.namespace)
    host, store = place.host or "127.0.0.1", file_store(folder / "bare")
    if rank < WORKERS:
        server, _, port = look_up(store, "listens", DEADLINE_S).rpartition(":")

        def dial() -> list[socket.socket]:
            return [socket.create_connection((server, int(port)), timeout=DEADLINE_S)]

        return answer(pipe, {"round": lambda seconds: _stream(dial(), seconds)})
    with socket.create_server((host, 0)) as listener:
        listener.settimeout(DEADLINE_S)
        publish(store, "listens", f"{host}:{listener.getsockname()[1]}")
        answer(pipe, {"round": lambda seconds: _stream([listener.accept()[0] for _ in range(WORKERS)], seconds)})


def _stream(connections: list[socket.socket], seconds: float) -> tuple[int, float]:
    """Bytes received over all connections while both ends send for this long, and how long it took to the last."""
    received = [0] * len(connections)
    began = time.perf_counter()

    def send(sock: socket.socket) -> None:
        body = memoryview(bytearray(_BUFFER_BYTES))
        while time.perf_counter() - began < seconds:
            sock.sendall(body)
        sock.shutdown(socket.SHUT_WR)

    def receive(n: int, sock: socket.socket) -> None:
        body = bytearray(_BUFFER_BYTES)
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
