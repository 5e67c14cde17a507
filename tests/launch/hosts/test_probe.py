"""What agents measure, on one machine: a probe that measures another over loopback."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from podium.comm.base import Message, Meta
from podium.comm.real.sockets import Address
from podium.launch.hosts.check import choose_pairs
from podium.launch.hosts.probe import Probe, compute, rate_of

SECRET = b"sixteen bytes at least"


class Asked:
    """A probe and the answers that it gives."""

    def __init__(self, number: int, folder: Path) -> None:
        folder.mkdir()
        self.probe = Probe(number, "127.0.0.1", folder, SECRET, None)
        self._answers: queue.Queue[Meta] = queue.Queue()

    def ask(self, kind: str, **meta: object) -> Meta:
        self.probe.take(Message(0, kind, meta), lambda _, answer: self._answers.put(answer))
        return self._answers.get(timeout=30)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Asked, Asked, Address]]:
    """Two probes, and where the second one listens."""
    a, b = Asked(0, tmp_path / "a"), Asked(1, tmp_path / "b")
    yield a, b, b.ask("listen")["address"]
    for asked in (a, b):
        asked.probe.close()


def test_a_link_is_measured_again_and_again(pair: tuple[Asked, Asked, Address]) -> None:
    a, _, address = pair
    for _ in range(2):
        found = a.ask("measure", peer=1, address=address, budget_s=0.1)
        assert found["round_trip_us"] > 0 and found["mbit"] > 1


def test_only_peers_that_listen_are_reached(pair: tuple[Asked, Asked, Address]) -> None:
    a, b, address = pair
    assert a.ask("reach", peers={"1": address}) == {"failed": {}}
    b.probe.close()
    failed = a.ask("reach", peers={"1": address})["failed"]
    assert failed == {"1": f"{address}: Connection refused"}
    assert "Connection refused" in a.ask("measure", peer=1, address=address, budget_s=0.1)["error"]


def test_a_stranger_is_not_measured(pair: tuple[Asked, Asked, Address], tmp_path: Path) -> None:
    _, _, address = pair
    stranger = Probe(2, "127.0.0.1", tmp_path, b"another secret of sixteen", None)
    answers: queue.Queue[Meta] = queue.Queue()
    stranger.take(Message(0, "reach", {"peers": {"1": address}}), lambda _, answer: answers.put(answer))
    assert list(answers.get(timeout=30)["failed"]) == ["1"]


def test_the_rate_leaves_out_the_first_third() -> None:
    steady = [float(n) for n in range(31)]
    assert rate_of(steady) == pytest.approx(1.0)
    burst = [0.0, *(0.1 * n for n in range(1, 11)), *(1.0 + n for n in range(1, 30))]
    assert rate_of(burst) == pytest.approx(1.0), "ten answers at once do not count"
    assert rate_of([0.0, 0.01, 5.0]) == pytest.approx(2 / 5), "one answer in the time that counts: all are taken"


def test_a_product_of_matrices_is_timed() -> None:
    assert compute(samples=1)["cpu_ms"] > 0


def test_pairs_are_all_measured_or_each_host_with_the_next_and_some_more() -> None:
    every = [(a, b) for a in range(40) for b in range(a + 1, 40)]
    assert choose_pairs(every, most=len(every)) == every
    some = choose_pairs(every, most=100)
    assert len(some) == len(set(some)) == 100 and set(some) <= set(every)
    assert {(n, n + 1) for n in range(39)} <= set(some)
