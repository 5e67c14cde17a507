"""Collectives in shared memory: real processes on one host, what they agree on, and what happens when they do not."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from podium.comm.base import Communicator
from podium.comm.real.arena import Arena, Neighbour, Place
from podium.comm.real.shared_memory import DTYPES, Address, SharedMemoryGroup
from podium.errors import CommError, Lost
from podium.testing.worlds import Real

WORKERS = 3
SHARED = Real(shared=True)
DEADLINE_S = 50.0
"""Nobody here has to wait for so long: who does has not noticed something."""


def part_of(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers: every sum is exact."""
    return ((torch.arange(numel) * (rank + 1)) % 5).to(dtype)


def total(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([part_of(r, numel, torch.int64) for r in range(WORKERS)]).sum(0).to(dtype)


def inside(comm: Communicator, tensor: Tensor) -> Tensor:
    """The same tensor in memory that others can reach."""
    return comm.allocate(tensor.numel(), tensor.dtype, tensor.device).copy_(tensor)


def every_kind(comm: Communicator) -> list[str]:
    """Sums and gathers of all dtypes and many sizes, in the arena and outside, several under way; what is wrong."""
    wrong, sizes = [], (1, 2, 63, 64, 65, 191, 193, 4097, 70_000)
    assert comm.shares_host
    for numel in sizes:
        sums, wants, handles = [], [], []
        gathers = []
        for dtype in DTYPES:
            mine = part_of(comm.rank, numel, dtype)
            for tensor in (inside(comm, mine), mine.clone()):
                sums.append(tensor)
                wants.append(total(numel, dtype))
                handles.append(comm.all_reduce(tensor))
            into = torch.empty(WORKERS * numel, dtype=dtype)
            gathers.append(into)
            handles.append(comm.all_gather(mine, into))
        comm.wait(*reversed(handles))  # whatever the order in which they are waited for
        wrong += [f"sum {numel} {t.dtype}" for t, w in zip(sums, wants, strict=True) if not torch.equal(t, w)]
        for into in gathers:
            rows = torch.stack([part_of(r, numel, into.dtype) for r in range(WORKERS)])
            if not torch.equal(into.view(WORKERS, numel), rows):
                wrong.append(f"gather {numel} {into.dtype}")
    return wrong


@pytest.mark.slow
def test_sums_and_gathers_of_every_dtype_and_size_inside_and_outside_the_arena() -> None:
    assert SHARED.run(every_kind, WORKERS) == [[]] * WORKERS


def within(comm: Communicator) -> list[float]:
    """Two neighbours in one segment: only what was asked for is touched."""
    whole = inside(comm, torch.full((300,), float(comm.rank + 1)))
    comm.wait(comm.all_reduce(whole[100:200]))
    return [float(whole[:100].sum()), float(whole[100:200].sum()), float(whole[200:].sum())]


def test_only_the_part_that_was_given_is_added_up() -> None:
    assert SHARED.run(within, WORKERS) == [[100.0 * (r + 1), 600.0, 100.0 * (r + 1)] for r in range(WORKERS)]


def nothing(comm: Communicator) -> list[Any]:
    """Zero elements, before and after others."""
    empty, into, one = torch.empty(0), torch.empty(0), torch.ones(3)
    comm.wait(comm.all_reduce(empty))
    comm.wait(comm.all_reduce(one))
    comm.wait(comm.all_gather(empty, into), comm.all_reduce(torch.empty(0, dtype=torch.float64)))
    return [empty.numel(), into.numel(), one.tolist()]


def test_nothing_adds_up_to_nothing() -> None:
    assert SHARED.run(nothing, WORKERS) == [[0, 0, [3.0] * 3]] * WORKERS


def unusual(comm: Communicator) -> list[Any]:
    """Tensors that are no plain run of memory, or that autograd knows, and a broadcast of each."""
    whole = torch.zeros(4, 4)
    slanted, known = whole.t()[:, :2], torch.ones(3, requires_grad=True)
    slanted += comm.rank
    comm.wait(comm.all_reduce(slanted), comm.all_reduce(known))
    copied = torch.full((2, 3), float(comm.rank)).t()
    comm.wait(comm.broadcast(copied, 1))
    return [whole.tolist(), known.tolist(), copied.tolist()]


def test_what_is_no_plain_run_of_memory_is_added_up_where_it_is() -> None:
    rows = [[3.0] * 4] * 2 + [[0.0] * 4] * 2
    assert SHARED.run(unusual, WORKERS) == [[rows, [3.0] * 3, [[1.0] * 2] * 3]] * WORKERS


def issue_wrongly(comm: Communicator, what: str) -> tuple[str, str]:
    """One rank gives something else than the others; what each hears."""
    odd = comm.rank == 1
    tensor, into = torch.ones(8), torch.empty(8 * WORKERS)
    if odd and what == "size":
        tensor = torch.ones(9)
    elif odd and what == "dtype":
        tensor = tensor.double()
    elif what == "unknown dtype":
        tensor = torch.ones(8, dtype=torch.complex64)
    elif odd and what == "too small to gather into":
        into = torch.empty(9)
    gathers = what == "too small to gather into" or (odd and what == "a gather")
    try:
        comm.wait(comm.all_gather(tensor, into) if gathers else comm.all_reduce(tensor))
    except CommError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


WRONG = ["size", "dtype", "a gather", "unknown dtype", "too small to gather into"]


@pytest.mark.parametrize("what", WRONG)
def test_whoever_gives_something_else_is_noticed_by_all_at_once(what: str) -> None:
    found = SHARED.run(partial(issue_wrongly, what=what), WORKERS, deadline_s=DEADLINE_S)
    assert all(kind != "nothing" and "in time" not in text for kind, text in found), found
    if what in ("size", "dtype", "a gather"):
        assert [kind for kind, _ in found] == ["CommError"] * WORKERS
        assert "rank 1" in found[0][1] and "rank 0" in found[1][1] and "rank 1" in found[2][1]


def end_in_the_middle(comm: Communicator, how: str) -> str | None:
    """One exchange that works, then one in which rank 1 is missing."""
    comm.wait(comm.all_reduce(torch.ones(5)))
    if comm.rank == 1:
        if how == "exit":
            os._exit(0)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "abandon":
            comm.abandon()
            return None
        time.sleep(3.0)  # late: longer than the others wait
        return None
    try:
        comm.wait(comm.all_reduce(torch.ones(5)), deadline_s=1.0 if how == "late" else None)
    except Lost as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("how", "words"), [("exit", "gone"), ("kill", "gone"), ("abandon", "gave up"), ("late", "did not come in time")]
)
def test_one_who_does_not_come_is_missed(how: str, words: str) -> None:
    outcomes = SHARED.attempt(partial(end_in_the_middle, how=how), WORKERS, deadline_s=DEADLINE_S)
    heard = [outcomes[0], outcomes[2]]
    assert all(isinstance(one, str) for one in heard), outcomes
    assert any(f"rank 1 {words}" in text or f"rank 1 is {words}" in text for text in heard), heard
    assert all("rank" in text for text in heard)  # one may hear of it from the other, who gave up
    assert how == "late" or all("in time" not in text for text in heard)


def generations(comm: Communicator) -> list[float]:
    """Many generations in a row, tensors coming and going: an old segment must not be found at a new address."""
    found = []
    for generation in range(1, 13):
        comm.abandon()
        comm.regroup(generation, range(WORKERS))
        assert comm.shares_host
        kept = []
        for n in range(3):
            tensor = inside(comm, torch.full((2000 * (n + 1),), float(comm.rank + generation)))
            comm.wait(comm.all_reduce(tensor))
            outside = torch.full((1500 * (n + 1),), float(comm.rank + generation))
            comm.wait(comm.all_reduce(outside))
            kept += [float(tensor.mean()), float(outside.mean())]
        assert len(set(kept)) == 1
        found.append(kept[0])
    return found


def test_several_generations_in_a_row() -> None:
    expected = [3.0 * generation + 3.0 for generation in range(1, 13)]
    assert SHARED.run(generations, WORKERS) == [expected] * WORKERS


def without_one(comm: Communicator) -> list[float]:
    """Rank 0 leaves; the others are a group of two, with another rank first."""
    comm.wait(comm.all_reduce(torch.ones(2)))
    if comm.rank == 0:
        return []
    stale = comm.all_reduce(torch.ones(2))  # rank 0 never comes to this one
    comm.abandon()
    with pytest.raises(Lost):
        comm.wait(stale)
    comm.regroup(1, (1, 2))
    tensor = torch.tensor([1.0, 2.0]) * comm.rank
    comm.wait(comm.all_reduce(tensor))
    with pytest.raises(Lost):
        comm.wait(stale)  # it does not come back to life
    return tensor.tolist()


def test_an_exchange_of_an_abandoned_generation_fails_and_the_next_works() -> None:
    assert SHARED.run(without_one, WORKERS) == [[], [3.0, 6.0], [3.0, 6.0]]


# One group, without others.


def test_a_wait_for_one_that_somebody_else_carries_out_ends_at_its_deadline() -> None:
    """The group's own thread may be stuck in an exchange before: that is no success."""
    group = SharedMemoryGroup(Arena(), DEADLINE_S)
    handle = group.all_reduce(torch.ones(4))
    with group._turn, pytest.raises(Lost, match=r"did not end in 0\.1 s"):
        group.wait(handle, 0.1)
    with pytest.raises(Lost):
        group.wait(handle, 0.1)


def test_closing_fails_all_that_was_issued() -> None:
    group = SharedMemoryGroup(Arena(), DEADLINE_S)
    handles = [group.all_reduce(torch.ones(4)) for _ in range(3)]
    group.close()
    for handle in handles:
        with pytest.raises(Lost, match="dropped"):
            group.wait(handle, 1.0)
    with pytest.raises(Lost):
        group.wait(group.all_reduce(torch.ones(4)), 1.0)


def test_a_peer_that_cannot_be_reached_is_told_at_once() -> None:
    group = SharedMemoryGroup(Arena(), DEADLINE_S)
    with pytest.raises((OSError, ValueError)):
        group.meet(0, {1: Address(os.getpid(), Place(0, 0, 0))})


def test_an_address_travels_as_numbers() -> None:
    group = SharedMemoryGroup(Arena(), DEADLINE_S)
    address = group.address
    assert Address.from_json(address.to_json()) == address
    assert Neighbour(address.pid).attach(address.place, torch.int64, (8,)).tolist()[:2] == [0, 0]


def test_two_groups_of_one_process_add_up_with_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are cores to spare, exchanges run by themselves: here that is made believe."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    arenas = [Arena(), Arena()]
    groups = [SharedMemoryGroup(arena, DEADLINE_S) for arena in arenas]
    for rank, group in enumerate(groups):
        group.meet(rank, {1 - rank: groups[1 - rank].address})
    assert all(group._engine is not None for group in groups)
    tensors = [arena.allocate(50_000, torch.float32).fill_(rank + 1.0) for rank, arena in enumerate(arenas)]
    handles = [group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)]
    until = time.monotonic() + 20.0
    while not all(handle.done for handle in handles) and time.monotonic() < until:
        time.sleep(0.01)
    assert all(handle.finished for handle in handles), "nobody waited for it, and it was not carried out"
    for group, handle, tensor in zip(groups, handles, tensors, strict=True):
        group.wait(handle, 1.0)
        assert tensor.unique().tolist() == [3.0]
    waiting = threading.Thread(target=groups[1].close)
    waiting.start()
    with pytest.raises(Lost, match="gave up"):
        groups[0].wait(groups[0].all_reduce(tensors[0]), DEADLINE_S)
    waiting.join(DEADLINE_S)
    groups[0].close()
    assert not waiting.is_alive()
