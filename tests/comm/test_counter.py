"""The counter that workers draw from, tried in threads, in virtual time and on real processes."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from podium.comm.base import Communicator, Counters
from podium.comm.real.counters import FileCounter, StoreCounter
from podium.comm.real.process_group import client_store, named_part
from podium.errors import CommError, Lost
from podium.launch.clusters.description import uniform
from podium.testing.worlds import Memory, Real, Virtual, World

DRAWS = 40


class CounterContract:
    """One promise per test; an implementation supplies `world`."""

    def test_every_number_is_drawn_by_one_worker_turn_by_turn_and_from_the_start_after_regrouping(
        self, world: World
    ) -> None:
        parts = world.run(_draw_and_regroup, workers=3)
        for turn in range(3):
            drawn = [number for part in parts for number in part[turn]]
            assert sorted(drawn) == list(range(3 * DRAWS)), f"turn {turn}"
            assert all(part[turn] == sorted(part[turn]) for part in parts)


class TestMemoryCounter(CounterContract):
    @pytest.fixture
    def world(self) -> World:
        return Memory()

    def test_it_is_lost_with_the_first_worker(self) -> None:
        assert isinstance(Memory().attempt(_draw_without_the_first, workers=2)[1], Lost)


class TestVirtualCounter(CounterContract):
    @pytest.fixture
    def world(self) -> World:
        return Virtual()

    def test_it_is_lost_with_the_first_worker(self) -> None:
        assert isinstance(Virtual().attempt(_draw_without_the_first, workers=2)[1], Lost)

    def test_a_draw_costs_a_round_trip_to_the_first_worker_who_has_none_to_make(self) -> None:
        cluster = uniform(2, mbit=None, latency_us=100.0, seconds_per_sample=1e-3)
        (first, own), (second, other) = Virtual(cluster).run(_time_a_draw, workers=2)
        assert {first, second} == {0, 1}
        assert own == 0
        assert 200_000 <= other < 220_000

    def test_who_is_nearer_draws_first_and_always_does(self) -> None:
        cluster = uniform(3, latency_us=100.0, seconds_per_sample=1e-3)
        runs = [Virtual(cluster).run(_draw_one_after_a_pass, workers=3) for _ in range(2)]
        assert runs == [[2, 1, 0]] * 2


class TestRealCounter(CounterContract):
    @pytest.fixture
    def world(self) -> World:
        return Real()


def test_drawing_inside_a_backward_pass_is_refused() -> None:
    (outcome,) = Memory().attempt(_draw_in_backward, workers=1)
    assert isinstance(outcome, CommError)
    assert "backward" in str(outcome)


def test_workers_may_be_a_turn_apart_but_nobody_goes_back_to_one_that_is_over() -> None:
    counters = Counters()
    assert [counters.draw(0, turn, 2) for turn in (10, 20, 10, 20)] == [0, 0, 2, 2]
    for turn in (30, 40, 50):
        counters.draw(0, turn, 1)
    assert len(counters.values) == Counters.KEPT
    with pytest.raises(Lost, match="turn 10 of generation 0 is over"):
        counters.draw(0, 10, 1)
    assert counters.draw(1, 0, 1) == 0, "a new generation begins anew"


def test_a_counter_in_a_file_stays_small_and_gives_up_on_a_lock_at_the_deadline(tmp_path: Path) -> None:
    path = tmp_path / "counters"
    mine, other = FileCounter(path, 0.1), FileCounter(path, 0.1)
    for turn in range(50):
        assert (mine.draw(0, turn, 1), other.draw(0, turn, 3), mine.draw(0, turn, 1)) == (0, 1, 4)
    assert path.stat().st_size == 24 * Counters.KEPT
    holder = os.open(path, os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    began = time.monotonic()
    with pytest.raises(Lost, match=r"locked by another worker for 0\.1 s"):
        mine.draw(0, 49, 1)
    assert time.monotonic() - began < 5
    os.close(holder)
    assert mine.draw(0, 49, 1) == 5


def test_a_counter_in_a_store_deletes_turns_that_are_over() -> None:
    store = client_store("127.0.0.1", 0, 5.0, is_host=True, world_size=1)
    before = store.num_keys()
    mine, other = (StoreCounter(named_part(store, "run")) for _ in range(2))
    for turn in range(20):
        assert (mine.draw(0, turn, 1), other.draw(0, turn, 3), mine.draw(0, turn, 1)) == (0, 1, 4)
    assert store.num_keys() - before <= Counters.KEPT
    assert mine.draw(1, 0, 1) == 0


def test_a_counter_whose_store_is_gone_is_lost() -> None:
    host = client_store("127.0.0.1", 0, 2.0, is_host=True, world_size=2)
    counter = StoreCounter(client_store("127.0.0.1", host.port, 2.0, is_host=False, world_size=2))
    assert counter.draw(0, 0, 1) == 0
    del host
    with pytest.raises(Lost, match="out of reach"):
        counter.draw(0, 1, 1)


# What ranks do.


def _draw_and_regroup(comm: Communicator) -> list[list[int]]:
    turns = []
    for turn in (0, 7):
        turns.append([comm.draw(turn) for _ in range(DRAWS)])
        comm.barrier()
    comm.regroup(comm.generation + 1, comm.workers)
    turns.append([comm.draw(7) for _ in range(DRAWS)])
    comm.barrier()
    return turns


def _draw_without_the_first(comm: Communicator) -> int:
    if comm.rank == 0:
        raise ValueError("gone")
    while comm.recv().source != 0:
        pass
    return comm.draw(0)


def _time_a_draw(comm: Communicator) -> tuple[int, int]:
    before = comm.clock.now_ns()
    drawn = comm.draw(0)
    took = comm.clock.now_ns() - before
    assert comm.waited_ns == took
    comm.barrier()
    return drawn, took


def _draw_one_after_a_pass(comm: Communicator) -> int:
    comm.clock.begin_pass(3 - comm.rank)
    comm.clock.reach(1.0)
    drawn = comm.draw(0)
    comm.barrier()
    return drawn


def _draw_in_backward(comm: Communicator) -> int:
    with comm.backward_pass():
        return comm.draw(0)
