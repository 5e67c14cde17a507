"""A message of one server to another that comes late: real servers on real channels, one connection through a gate."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from podium.comm.base import Meta
from podium.comm.clocks import WallClock
from podium.comm.real.channel import Channel
from podium.comm.real.communicator import RealCommunicator
from podium.records.recorder import Recorder
from podium.servers.gate import Rules
from podium.servers.pushes.gathered import GatheredPushes
from podium.servers.pushes.immediate import ImmediatePushes
from podium.servers.server import CopyOptions, Server, ServerOptions
from tests.servers.test_server_protocol import IN_STEP, Fake, make_flat

WAIT_S = 20.0
WORKERS, FIRST, SECOND = (0, 1), 2, 3


class Gate:
    """A connection to `target` that forwards what the dialler says only while it is open; answers pass freely."""

    def __init__(self, folder: Path, target: str) -> None:
        self.address = f"unix:{folder}/gate"
        self.open = threading.Event()
        self.open.set()
        self.held = threading.Event()
        """Something waits at the gate."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address.removeprefix("unix:"))
        self._listener.listen()
        self._target = target.removeprefix("unix:")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        dialler, _ = self._listener.accept()
        self._listener.close()
        with dialler, socket.socket(socket.AF_UNIX) as listener:
            listener.connect(self._target)
            back = threading.Thread(target=self._pass, args=(listener, dialler, False), daemon=True)
            back.start()
            self._pass(dialler, listener, True)
            back.join(WAIT_S)

    def _pass(self, source: socket.socket, to: socket.socket, gated: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if gated and not self.open.is_set():
                    self.held.set()
                    assert self.open.wait(WAIT_S)
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the other side has hung up

    def end(self) -> None:
        self.open.set()
        self._thread.join(WAIT_S)


class Set:
    """Two workers that the test speaks for, and two servers in threads; what the first says to the second is gated."""

    def __init__(self, folder: Path, stack: ExitStack, replicas: int) -> None:
        ranks = (*WORKERS, FIRST, SECOND)
        places = {rank: f"unix:{folder}/{rank}" for rank in ranks}
        self.gate = Gate(folder, places[SECOND])
        stack.callback(self.gate.end)  # last: it ends with the channels
        self.channels = {}
        for rank in ranks:
            self.channels[rank] = Channel(rank, secret=b"of this test", listen=places[rank], deadline_s=WAIT_S)
            stack.callback(self.channels[rank].close)
        for rank in WORKERS:
            self.channels[rank].introduce(places)
        self.channels[FIRST].connect_all({SECOND: self.gate.address})
        self.servers, threads = {}, []
        for rank in (FIRST, SECOND):
            flat, optimizer = make_flat()
            copies = CopyOptions(replicas=replicas)
            server = Server(
                self.comm(rank), flat, optimizer, recorder=Recorder(rank), options=ServerOptions(copies=copies)
            )
            self.servers[rank] = server
            threads.append(threading.Thread(target=server.serve, daemon=True))
            threads[-1].start()
        stack.callback(lambda: [thread.join(WAIT_S) for thread in threads])
        self.fakes = {rank: Fake(self.comm(rank), WAIT_S) for rank in WORKERS}
        stack.callback(lambda: [self.channels[rank].close() for rank in WORKERS])
        for fake in self.fakes.values():  # so that their departure is noticed
            fake.wait(*[fake.comm.call(rank, "probe", {}) for rank in (FIRST, SECOND)])

    def comm(self, rank: int) -> RealCommunicator:
        channel = self.channels[rank]
        return RealCommunicator(
            rank, WORKERS, (FIRST, SECOND), WallClock(), group=None, channel=channel, deadline_s=WAIT_S
        )

    def let_through(self) -> None:
        """Open the gate, and wait until the second server has what waited there."""
        before = self.channels[SECOND].wire.received
        self.gate.open.set()
        wait_for(lambda: self.channels[SECOND].wire.received > before)
        self.probe()

    def probe(self) -> None:
        """The second server has done all that came before this."""
        fake = self.fakes[0]
        fake.wait(fake.comm.call(SECOND, "probe", {}))


@contextmanager
def two_servers(folder: Path, replicas: int = 1) -> Iterator[Set]:
    with ExitStack() as stack:
        yield Set(folder, stack, replicas)


def wait_for(come_true: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not come_true():
        assert time.monotonic() < until
        time.sleep(0.001)


def segment(*name: int, **other: Any) -> Meta:
    return {"segment": list(name), **other}


def gathered(server: Server) -> GatheredPushes:
    assert isinstance(server.segment.policy, GatheredPushes)
    return server.segment.policy


def immediate(server: Server) -> ImmediatePushes:
    assert isinstance(server.segment.policy, ImmediatePushes)
    return server.segment.policy


def test_word_of_a_loss_that_comes_after_the_survivors_began_anew_is_not_taken_for_another_loss(tmp_path: Path) -> None:
    """Otherwise the second server would answer that the step did not happen, and all would regroup for nothing."""
    with two_servers(tmp_path) as two:
        survivor = two.fakes[0]
        survivor.seed(IN_STEP, slices=4, **segment(0, 0, leases=False))
        two.gate.open.clear()
        two.channels[1].close()
        assert two.gate.held.wait(WAIT_S), "the first server tells the second of the loss"
        survivor.seed(IN_STEP, slices=4, workers=[0], **segment(1, 0, leases=False))
        two.let_through()
        answer = survivor.push(0)
        assert "lost" not in answer
        assert gathered(two.servers[SECOND]).execution.lost is None
        survivor.leave()


def test_word_of_a_worker_that_rests_is_not_taken_for_the_next_segment(tmp_path: Path) -> None:
    """Otherwise nobody would wait for it at the second server, and the others could run ahead as far as they like."""
    rules = Rules(bound=1)
    with two_servers(tmp_path) as two:
        first, second = two.fakes[0], two.fakes[1]
        first.seed(rules, slices=2, **segment(0, 0))
        two.gate.open.clear()
        leases = [first.draw()["lease"], second.draw()["lease"]]
        assert "lease" not in first.push(leases[0])
        waiting = first.comm.call(FIRST, "draw", {"done": leases[0], "votes": first.votes})
        assert two.gate.held.wait(WAIT_S), "the first server tells the second that there is nothing left for it"
        second.push(leases[1])
        assert "lease" not in second.draw(done=leases[1])
        first.wait(waiting)
        calls = [fake.comm.call(rank, "leave", {}) for fake in (first, second) for rank in (FIRST, SECOND)]
        first.wait(*calls[:2])
        second.wait(*calls[2:])
        first.seed(rules, slices=8, **segment(0, 1))
        two.let_through()
        assert immediate(two.servers[SECOND]).clocks.resting == set()


def test_acknowledgements_to_a_lost_server_are_not_for_the_one_in_its_place(tmp_path: Path) -> None:
    """It would answer a worker before the copy is there."""
    with two_servers(tmp_path, replicas=2) as two:
        two.fakes[0].seed(Rules(), slices=8, **segment(0, 0))
        replicas = two.servers[SECOND].parts.replicas
        for life in (replicas.life + 1, replicas.life):
            two.channels[FIRST].send(SECOND, "mirrored", {"number": 100 + life, "life": life, "segment": [0, 0]})
        wait_for(lambda: replicas.acks.get(FIRST, 0) >= 100)
        assert replicas.acks[FIRST] == 100 + replicas.life


@pytest.mark.parametrize("late", [[0, 5], [1, 0]])
def test_what_is_of_a_later_segment_waits_until_that_begins(tmp_path: Path, late: list[int]) -> None:
    with two_servers(tmp_path) as two:
        fake, server = two.fakes[0], two.servers[SECOND]
        fake.seed(IN_STEP, slices=4, **segment(0, 4, leases=False))
        two.channels[FIRST].send(SECOND, "decision", {"abort": 1, "segment": late})
        wait_for(lambda: bool(server.peers.early))
        assert gathered(server).execution.lost is None
        fake.seed(IN_STEP, slices=4, workers=[0], **{"segment": late, "leases": False})
        wait_for(lambda: gathered(server).execution.lost == 1)
