"""What every communicator promises, tried in threads, in virtual time and on real processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from podium.comm.base import Communicator
from podium.launch.clusters.description import uniform
from podium.testing.communicators import CommunicatorContract
from podium.testing.worlds import Memory, Real, Virtual, World


class TestMemory(CommunicatorContract):
    @pytest.fixture
    def world(self) -> World:
        return Memory()


class TestVirtual(CommunicatorContract):
    @pytest.fixture(params=["fifo", "fair"])
    def world(self, request: pytest.FixtureRequest) -> World:
        return Virtual(uniform(4, sharing=request.param))


@pytest.mark.parametrize("computes_us", [0, 40, 60, 1000])
def test_in_virtual_time_polling_finds_what_has_arrived_by_the_ranks_own_clock(computes_us: int) -> None:
    cluster = uniform(2, latency_us=50.0, mbit=None)
    (_, (found, now)), again = (Virtual(cluster).run(partial(_poll_after, us=computes_us), 2) for _ in range(2))
    assert found == (computes_us > 50)  # a message without a body takes the latency and next to nothing else
    assert now == computes_us * 1000, "polling takes no time"
    assert again == [None, (found, now)]


class TestVirtualOnOneNode(CommunicatorContract):
    @pytest.fixture
    def world(self) -> World:
        return Virtual(uniform(1))


class TestReal(CommunicatorContract):
    @pytest.fixture
    def world(self) -> World:
        return Real()


class TestRealAcrossHosts(CommunicatorContract):
    @pytest.fixture(params=["two a host", "one a host"])
    def world(self, request: pytest.FixtureRequest) -> World:
        return Real(hosts=pairs if request.param == "two a host" else apart)


def pairs(rank: int) -> str:
    return f"host-{rank // 2}"


def apart(rank: int) -> str:
    return f"host-{rank}"


def dealt(rank: int) -> str:
    return f"host-{rank % 2}"


@pytest.mark.parametrize(
    ("hosts", "workers", "numel"),
    [
        (pairs, 4, 40_000),
        (apart, 3, 40_000),
        *(
            pytest.param(hosts, workers, numel, marks=pytest.mark.slow)
            for hosts, workers in [(pairs, 5), (apart, 4), (dealt, 5)]
            for numel in (100, 40_000, 1_000_003)
        ),
    ],
)
def test_sums_across_hosts_have_the_bits_of_shared_memory(
    hosts: Callable[[int], str], workers: int, numel: int
) -> None:
    noise = partial(_sum_of_noise, numel=numel)
    worlds = (Memory(), Real(shared=True), Real(hosts=hosts))
    sums = [[hash(tuple(total)) for total in world.run(noise, workers=workers)] for world in worlds]
    assert sums[0] == sums[1] == sums[2]


def test_memory_and_virtual_time_add_up_to_the_same_bits() -> None:
    sums = [world.run(_sum_of_noise, workers=5) for world in (Memory(), Memory(), Virtual())]
    assert sums[0] == sums[1] == sums[2]
    assert len({tuple(total) for total in sums[0]}) == 1


def _poll_after(comm: Communicator, us: int) -> tuple[bool, int] | None:
    if comm.rank == 0:
        comm.send(1, "hello", {})
        return None
    comm.clock.touch(us * 4000)  # 4 GB a second
    found = comm.poll()
    return found is not None and found.kind == "hello", comm.clock.now_ns()


def _sum_of_noise(comm: Communicator, numel: int = 100) -> list[float]:
    noise = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))
    comm.wait(comm.all_reduce(noise))
    return noise.tolist()
