"""Every collective in every world, on real processes over sockets and in shared memory, gives the exact sum."""

from __future__ import annotations

import socket
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from podium.comm.base import Communicator
from podium.exchange.collectives import COLLECTIVES, make_collective
from podium.testing.worlds import Memory, Real, Virtual, World

BY_SCHEDULE = tuple(name for name in COLLECTIVES if name not in ("default", "auto", "backend", "shared"))
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
SIZES = (1, 3, 64, 1000, 65_537)


def part_of(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, so that every sum is exact whatever the order and dtype."""
    return ((torch.arange(numel) * (rank + 1)) % 7).to(dtype)


def total(size: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([part_of(rank, numel, torch.int64) for rank in range(size)]).sum(dim=0).to(dtype)


def reduce_all(comm: Communicator, names: tuple[str, ...], sizes: tuple[int, ...]) -> list[str]:
    """Everything with everything, several under way at once; what came out wrong."""
    wrong = []
    for name in names:
        collective = make_collective(name).prepare(comm)
        for numel in sizes:
            tensors = [part_of(comm.rank, numel, dtype) for dtype in DTYPES]
            comm.wait(*(collective.all_reduce(comm, tensor) for tensor in tensors))
            wants = [total(comm.size, numel, dtype) for dtype in DTYPES]
            wrong += [f"{name} {numel} {t.dtype}" for t, w in zip(tensors, wants, strict=True) if not torch.equal(t, w)]
    return wrong


def reduce_one(comm: Communicator, name: str, numel: int, dtype: torch.dtype) -> bool:
    tensor = part_of(comm.rank, numel, dtype)
    comm.wait(make_collective(name).prepare(comm).all_reduce(comm, tensor))
    return torch.equal(tensor, total(comm.size, numel, dtype))


def reduce_large(comm: Communicator, names: tuple[str, ...]) -> list[str]:
    """One large tensor after the other; the sum of rank + 1 and of a few marks that only one rank sets."""
    wrong = []
    tensor, marks = comm.allocate(LARGE, torch.float32, torch.device("cpu")), torch.arange(0, LARGE, LARGE // 1000)
    want = comm.size * (comm.size + 1) / 2
    for name in names:
        tensor.fill_(comm.rank + 1)
        if comm.rank == comm.size - 1:
            tensor[marks] += marks % 7
        comm.wait(make_collective(name).prepare(comm).all_reduce(comm, tensor))
        right = torch.equal(tensor[marks], want + marks % 7)
        tensor[marks] -= marks % 7
        if not right or not bool((tensor == want).all()):
            wrong.append(name)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("workers", range(2, 10))
@pytest.mark.parametrize("world", [Memory(), Virtual()], ids=lambda world: world.name)
def test_the_sum_in_one_process(world: World, workers: int) -> None:
    assert world.run(partial(reduce_all, names=BY_SCHEDULE, sizes=SIZES), workers) == [[]] * workers


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8, 9])
def test_the_sum_over_sockets(workers: int) -> None:
    names = (*BY_SCHEDULE, "backend", "auto")
    assert Real().run(partial(reduce_all, names=names, sizes=SIZES), workers) == [[]] * workers


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(BY_SCHEDULE),
    workers=st.integers(2, 9),
    numel=st.one_of(st.integers(1, 300), st.integers(1, 300_000)),
    dtype=st.sampled_from(DTYPES),
)
def test_the_sum_of_anything(name: str, workers: int, numel: int, dtype: torch.dtype) -> None:
    assert Memory().run(partial(reduce_one, name=name, numel=numel, dtype=dtype), workers) == [True] * workers


LARGE = 16 << 20  # floats: 64 MB


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("world", [Memory(), Real(), Real(shared=True)], ids=["memory", "sockets", "shared"])
def test_the_sum_of_64_megabytes(world: World, workers: int) -> None:
    names = ("shared",) if isinstance(world, Real) and world.shared else (*BY_SCHEDULE,)
    assert world.run(partial(reduce_large, names=names), workers) == [[]] * workers


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 4, 9])
def test_the_sum_in_shared_memory(workers: int) -> None:
    world = Real(shared=True)
    assert world.run(partial(reduce_all, names=("shared", "default", "auto"), sizes=SIZES), workers) == [[]] * workers


def storm(comm: Communicator) -> bool:
    """Many small exchanges at once, over connections that hold little: whoever receives must never wait to send."""
    ring = make_collective("ring").prepare(comm)
    channel = comm._channel  # type: ignore[attr-defined]  # the real world's
    for link in channel._links.values():
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            link.sock.setsockopt(socket.SOL_SOCKET, option, 35_000)
    for count in (6, 8, 9, 10, 11):
        for _ in range(25):
            tensors = [torch.full((3 * 16 * 256,), float(comm.rank + 1)) for _ in range(count)]
            comm.barrier()
            comm.wait(*(ring.all_reduce(comm, tensor) for tensor in tensors), deadline_s=10.0)
            if any(not bool((tensor == 6).all()) for tensor in tensors):
                return False
    return True


@pytest.mark.slow
def test_a_storm_of_small_exchanges_over_narrow_connections() -> None:
    assert Real().run(storm, 3) == [True] * 3


def gather_all(comm: Communicator) -> list[int]:
    collective = make_collective("ring").prepare(comm)
    into = torch.empty(3 * comm.size, dtype=torch.uint8)
    comm.wait(collective.all_gather(comm, torch.full((3,), comm.rank + 1, dtype=torch.uint8), into))
    return into.tolist()


@pytest.mark.parametrize("world", [Memory(), Virtual(), Real()], ids=lambda world: world.name)
def test_what_cannot_be_summed_is_gathered_by_schedule_too(world: World) -> None:
    assert world.run(gather_all, 4) == [[n for n in (1, 2, 3, 4) for _ in range(3)]] * 4
