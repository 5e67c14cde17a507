"""A lost server is started anew, whoever misses it is told where it is now, and nobody is killed for having waited."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from podium.errors import DeadlineExceeded, Lost
from podium.launch.coordination.rules import MOST_RANKS
from tests.launch.coordination.conftest import Make
from tests.launch.coordination.place import LIMIT_S, SHORT_S, Place, wait_until
from tests.launch.coordination.test_coordinator import fall_silent

REPLACES = {"replaces_servers": True}


def lose_server(here: Place, rank: int = 2) -> None:
    """It leaves without a word, and the launcher is asked for another."""
    before = len(here.respawned)
    here.leave(rank)
    wait_until(lambda: len(here.respawned) > before)


def ask(here: Place, rank: int, server: int, old: str) -> Future[str]:
    return here.pool.submit(here.members[rank].relocate, server, old)


def test_a_lost_server_is_replaced_and_those_who_miss_it_are_told_where_it_is(place: Make) -> None:
    here = place(2, 1, rules=REPLACES)
    here.begin()
    early = ask(here, 0, 2, "unix:/2-2")  # before the loss is known
    lose_server(here)
    late = ask(here, 1, 2, "unix:/2-2")
    assert here.respawned == [(2,)]
    assert not early.done() and not late.done()
    joined = here.arrive(2)
    assert (joined.workers, joined.servers) == ((0, 1), (2,))
    assert joined.addresses == {0: "unix:/0-0", 1: "unix:/1-1", 2: "unix:/2-3"}
    assert early.result(LIMIT_S) == late.result(LIMIT_S) == "unix:/2-3"
    assert ask(here, 0, 2, "unix:/2-2").result(LIMIT_S) == "unix:/2-3"  # also once it is back
    wait_until(lambda: bool(here.told("replaced")))
    (record,), (event,) = here.records("replaced"), here.told("replaced")
    assert record["server"] == event["server"] == 2
    assert record["took_ns"] > 0
    assert [row["lost"] for row in here.records("lost")] == [2]
    here.finish(0, 1, 2)
    assert [report.rank for report in here.outcome.result(LIMIT_S)] == [0, 1]


def test_a_silent_server_is_killed_and_replaced(place: Make) -> None:
    here = place(1, 1, rules=REPLACES, still=True, runs=lambda rank: rank == 0)
    here.begin()
    fall_silent(here, 1)
    here.pass_time(21.0)
    wait_until(lambda: bool(here.respawned))
    assert here.killed == [1]
    here.members[1].close()
    here.arrive(1)
    wait_until(lambda: bool(here.told("replaced")))


def test_where_servers_are_not_replaced_the_run_ends_and_says_which(place: Make) -> None:
    here = place(2, 1)
    here.begin()
    with pytest.raises(Lost, match="server 2 is gone, and is not replaced"):
        ask(here, 0, 2, "unix:/2-2").result(LIMIT_S)
    here.leave(2)
    with pytest.raises(Lost, match=r"^server 2 was lost: its connection closed without a message"):
        here.outcome.result(LIMIT_S)


@pytest.mark.parametrize("nobody", [0, 7, MOST_RANKS])
def test_who_is_no_server_cannot_be_asked_for(place: Make, nobody: int) -> None:
    here = place(2, 1, rules=REPLACES)
    here.begin()
    with pytest.raises(Lost, match=f"server {nobody} is gone"):
        ask(here, 1, nobody, "unix:/x").result(LIMIT_S)


def test_a_server_that_stays_where_it_is_is_waited_for_no_longer_than_a_start_takes(place: Make) -> None:
    here = place(1, 1, rules=REPLACES, heartbeat_s=1.0, start_deadline_s=SHORT_S)
    here.begin()
    with pytest.raises(DeadlineExceeded, match=r"server 1 does not answer at unix:/1-1, and for 0.3 s"):
        ask(here, 0, 1, "unix:/1-1").result(LIMIT_S)


def test_a_worker_lost_with_its_server_is_a_lost_worker_and_a_server_that_lives_on(place: Make) -> None:
    here = place(3, 4, processes=[(0, 3, 6), (1, 4), (2, 5)], rules=REPLACES)
    here.begin()
    here.leave(0)
    plans = [here.regroup(1), here.regroup(2, 2)]
    assert {plan.result(LIMIT_S)[:4] for plan in plans} == {(1, (1, 2), 2, None)}
    assert here.respawned == [(3, 6)]
    joined = here.arrive(3, 6)
    assert joined.workers == (1, 2)
    assert ask(here, 1, 6, "unix:/6-0").result(LIMIT_S) == "unix:/6-3"
    wait_until(lambda: sorted(event["server"] for event in here.told("replaced")) == [3, 6])
    assert here.lost().keys() == {0}
    here.finish(1, 2)
    here.members[3].done(None)
    assert [report.rank for report in here.outcome.result(LIMIT_S)] == [1, 2]


def test_the_address_of_a_replacement_goes_with_the_next_plan(place: Make) -> None:
    here = place(2, 1, rules=REPLACES)
    here.begin()
    lose_server(here)
    here.arrive(2)
    here.leave(1)
    assert here.regroup(0).result(LIMIT_S).addresses == {2: "unix:/2-3"}


def test_the_fourth_loss_of_a_server_ends_the_run(place: Make) -> None:
    here = place(1, 1, rules=REPLACES)
    here.begin()
    for _ in range(3):
        lose_server(here, 1)
        here.arrive(1)
    wait_until(lambda: len(here.told("replaced")) == 3)
    here.leave(1)
    with pytest.raises(Lost, match=r"^server 1 was lost 4 times, .* 3 times in 20 s \(deadline_s\); the last time: it"):
        here.outcome.result(LIMIT_S)


def test_losses_that_lie_further_apart_than_the_deadline_are_replaced_for_ever(place: Make) -> None:
    here = place(1, 1, rules=REPLACES, still=True)
    here.begin()
    for n in range(5):
        lose_server(here, 1)
        here.arrive(1)
        wait_until(lambda n=n: len(here.told("replaced")) == n + 1)
        here.pass_time(21.0)


def test_a_replacement_that_dies_again_and_again_before_it_serves_ends_the_run(place: Make) -> None:
    dead = threading.Event()

    def ended(_rank: int, _seconds: float) -> str | None:
        return "it ended with exit code 3" if dead.is_set() else None

    here = place(1, 1, rules=REPLACES, ended=ended)
    here.begin()
    dead.set()
    here.leave(1)
    with pytest.raises(Lost, match=r"^server 1 was lost 4 times, .*the last time: it ended with exit code 3"):
        here.outcome.result(LIMIT_S)
    assert here.respawned == [(1,)] * 3


def test_a_replacement_that_does_not_join_in_time_is_killed_and_replaced(place: Make) -> None:
    here = place(1, 1, rules=REPLACES, still=True)
    here.begin()
    lose_server(here, 1)
    here.pass_time(21.0)
    assert len(here.respawned) == 2
    assert here.killed[-1] == 1
    assert "did not join within 20 s" in here.lost()[1]


def test_workers_that_wait_for_a_server_are_not_taken_for_hung(place: Make) -> None:
    """One has reported the loss of a worker; another cannot before it has the server back."""
    here = place(3, 3, processes=[(0, 3), (1, 4), (2, 5)], rules=REPLACES, still=True, start_deadline_s=90.0)
    here.begin()
    here.leave(0)
    wait_until(lambda: bool(here.respawned))
    reported, asking = here.regroup(1), ask(here, 2, 3, "unix:/3-0")
    here.pass_time(60.0)
    here.arrive(3)
    assert asking.result(LIMIT_S) == "unix:/3-3"
    assert here.regroup(2).result(LIMIT_S).members == reported.result(LIMIT_S).members == (1, 2)
    assert here.lost().keys() == {0}


def test_a_server_lost_after_the_last_worker_ended_is_missed_by_nobody(place: Make) -> None:
    here = place(2, 1, rules=REPLACES)
    here.begin()
    here.finish(0, 1)
    here.leave(2)
    assert len(here.outcome.result(LIMIT_S)) == 2
    assert not here.respawned
    assert here.lost().keys() == {2}


def test_a_replacement_that_nobody_waits_for_any_more_does_not_keep_the_run_from_ending(place: Make) -> None:
    here = place(2, 1, rules=REPLACES)
    here.begin()
    lose_server(here)
    here.finish(0, 1)
    assert len(here.outcome.result(LIMIT_S)) == 2
    assert 2 in here.killed


def test_a_server_lost_before_all_have_joined_ends_the_run(place: Make) -> None:
    here = place(2, 1, rules=REPLACES)
    joins: list[Future[Any]] = [here.join(0), here.join(2)]
    wait_until(lambda: 2 in here.coordinator._roster.members)
    here.leave(2)
    with pytest.raises(Lost, match=r"^server 2 was lost"):
        here.outcome.result(LIMIT_S)
    here.leave(0)
    assert all(isinstance(joined.exception(LIMIT_S), Lost) for joined in joins)
