"""More or fewer ranks while the run goes on: asked for over the same channel, carried out by the next plan."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Callable
from typing import Any

import pytest

from podium.engine.recovery import Regroup
from podium.errors import ConfigError, Lost, RankFailed
from podium.launch.scale import ScaleAnswer, open_to_change, scale
from tests.launch.coordination.conftest import Make
from tests.launch.coordination.place import LIMIT_S, SECRET, Place, wait_until


def ask(here: Place, **numbers: int | None) -> ScaleAnswer:
    with open_to_change(here.folder, here.coordinator.address, SECRET):
        return scale(here.folder, **numbers)


def called_together(here: Place, *ranks: int) -> None:
    wait_until(lambda: all(here.members[rank].change_requested() for rank in ranks))


def plans(here: Place, steps: dict[int, int]) -> Regroup:
    """All of these wait for a plan, newcomers (-1 steps) first, and get the same."""
    new = [rank for rank, done in steps.items() if done < 0]
    old = [rank for rank in steps if rank not in new]
    waiting = [here.regroup(rank, -1, -1) for rank in new]
    if new:
        called_together(here, *old)
    waiting += [here.regroup(rank, steps[rank]) for rank in old]
    first, *others = [each.result(LIMIT_S) for each in waiting]
    assert all(other == first for other in others)
    return first


# More.


def test_hosts_that_cannot_be_added_cost_the_run_nothing(place: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    here = place(2)
    here.begin()
    for error in (OSError(24, "Too many open files"), RankFailed("no Ray answers")):

        def fail(lines: object, error: Exception = error) -> int:
            raise error

        monkeypatch.setattr(here.launcher, "add_hosts", fail, raising=False)
        with pytest.raises(ConfigError, match=r"Too many open files|no Ray answers"):
            ask(here, hosts=["host4"])
    here.hear_all()
    assert not here.outcome.done() and not here.lost()


def test_newcomers_start_beside_the_run_and_are_in_the_plan_once_they_are_ready(place: Make) -> None:
    here = place(2, 1)
    here.begin()
    assert ask(here, workers=4) == ScaleAnswer(4, 1, (3, 4), ())
    assert here.started == [("worker", 3), ("worker", 4)]
    assert [(row["workers"], row["servers"]) for row in here.records("scaled")] == [(4, 1)]
    joined = here.arrive(3)
    assert (joined.workers, joined.servers) == ((0, 1), (2,))
    assert joined.addresses[2] == "unix:/2-2"
    third = here.regroup(3, -1, -1)
    here.arrive(4)
    here.hear_all()
    assert not here.members[0].change_requested()  # nobody waits for those who are not ready
    fourth = here.regroup(4, -1, -1)
    called_together(here, 0, 1)
    plan = plans(here, {0: 7, 1: 7})
    assert plan == third.result(LIMIT_S) == fourth.result(LIMIT_S)
    assert plan == Regroup(1, (0, 1, 3, 4), 0, None, {3: "unix:/3-3", 4: "unix:/4-4"})
    assert not any(here.members[rank].change_requested() for rank in (0, 1, 3, 4))
    wait_until(lambda: bool(here.told("regroup")))
    (event,) = here.told("regroup")
    assert event["members"] == [0, 1, 3, 4]
    here.finish(0, 1, 3, 4, 2)
    assert [report.rank for report in here.outcome.result(LIMIT_S)] == [0, 1, 3, 4]


def test_the_state_comes_from_the_furthest_of_those_that_were_there(place: Make) -> None:
    here = place(2)
    here.begin()
    ask(here, workers=3)
    here.arrive(2)
    assert plans(here, {0: 6, 1: 7, 2: -1}).source == 1


def test_a_newcomer_counts_like_the_others_and_numbers_are_never_used_twice(place: Make) -> None:
    here = place(2)
    here.begin()
    ask(here, workers=3)
    here.arrive(2)
    plans(here, {0: 1, 1: 1, 2: -1})
    here.members[2].progress({"event": "progress", "step": 9, "position": 9})
    here.leave(0)
    assert plans(here, {1: 8, 2: 9}) == Regroup(2, (1, 2), 2, None, {2: "unix:/2-2"})
    here.leave(2)
    assert plans(here, {1: 9}).members == (1,)
    assert ask(here, workers=2).starting == (3,)
    here.arrive(3)
    assert plans(here, {1: 9, 3: -1}).members == (1, 3)


def test_a_newcomer_that_has_not_taken_over_the_state_cannot_give_it_to_others(place: Make) -> None:
    here = place(1)
    here.begin()
    ask(here, workers=2)
    here.arrive(1)
    plans(here, {0: 5, 1: -1})
    here.leave(0)
    here.regroup(1, 0)
    with pytest.raises(Lost, match=r"^all workers that held the state were lost; worker 1 had not copied it$"):
        here.outcome.result(LIMIT_S)


def test_new_servers_serve_from_the_next_plan_on(place: Make) -> None:
    here = place(2, 1)
    here.begin()
    assert ask(here, servers=3) == ScaleAnswer(2, 3, (3, 4), ())
    assert here.started == [("server", 3), ("server", 4)]
    assert here.arrive(3).servers == (2, 3, 4)
    assert not here.members[0].change_requested()
    here.arrive(4)
    called_together(here, 0, 1)
    plan = plans(here, {0: 2, 1: 2})
    assert plan == Regroup(1, (0, 1), 0, (2, 3, 4), {3: "unix:/3-3", 4: "unix:/4-4"})
    here.finish(0, 1, 2, 3, 4)
    assert len(here.outcome.result(LIMIT_S)) == 2


def test_a_new_server_that_is_lost_is_replaced_like_the_first(place: Make) -> None:
    here = place(1, 1, rules={"replaces_servers": True})
    here.begin()
    ask(here, servers=2)
    here.arrive(2)
    called_together(here, 0)  # the plan is to hold the new server
    plans(here, {0: 2})
    here.leave(2)
    wait_until(lambda: here.respawned == [(2,)])
    assert here.arrive(2).servers == (1, 2)
    assert here.members[0].relocate(2, "unix:/2-2") == "unix:/2-3"


def test_whoever_comes_to_a_run_that_is_stopping_is_told_so(place: Make) -> None:
    stop = threading.Event()
    here = place(1, stop=stop)
    here.begin()
    ask(here, workers=2)
    stop.set()
    wait_until(here.members[0].stop_requested)
    here.arrive(1)
    wait_until(here.members[1].stop_requested)
    with pytest.raises(ConfigError, match="must not be ending"):
        ask(here, workers=3)


# Fewer.


def test_those_with_the_highest_numbers_retire_and_their_reports_do_not_count(place: Make) -> None:
    here = place(3, 2)
    here.begin()
    assert ask(here, workers=1, servers=1) == ScaleAnswer(1, 1, (), (1, 2, 4))
    assert not here.started
    called_together(here, 0, 1, 2)
    plan = plans(here, {0: 3, 1: 4, 2: 4})
    assert plan == Regroup(1, (0,), 0, (3,), {})
    here.finish(1, 2, 4)
    assert not here.outcome.done()
    here.finish(0, 3)
    assert [report.rank for report in here.outcome.result(LIMIT_S)] == [0]


def test_a_retired_process_may_be_lost_or_fail_without_harm(place: Make) -> None:
    here = place(3)
    here.begin()
    ask(here, workers=1)
    plans(here, {0: 1, 1: 1, 2: 1})
    here.members[1].failed({"error": "ValueError", "message": "too late to matter", "place": "", "traceback": ""})
    here.leave(2)
    wait_until(lambda: here.lost().keys() == {1, 2})
    here.finish(0)
    assert len(here.outcome.result(LIMIT_S)) == 1


def test_a_retired_process_that_does_not_end_is_killed(place: Make) -> None:
    here = place(2, still=True)
    here.begin()
    ask(here, workers=1)
    plans(here, {0: 1, 1: 1})
    here.finish(0)
    here.pass_time(21.0)
    assert len(here.outcome.result(LIMIT_S)) == 1
    assert here.killed == [1]


def test_nobody_retires_for_one_that_was_lost_meanwhile(place: Make) -> None:
    here = place(3)
    here.begin()
    ask(here, workers=2)
    here.leave(0)
    wait_until(lambda: bool(here.lost()))
    assert plans(here, {1: 1, 2: 1}).members == (1, 2)


def test_what_is_already_so_needs_no_change(place: Make) -> None:
    here = place(2, 1)
    here.begin()
    assert ask(here, workers=2, servers=1) == ScaleAnswer(2, 1, (), ())
    assert ask(here, workers=3).starting == (3,)  # no change is under way


# What goes wrong on the way.


def test_a_newcomer_that_ends_before_it_joins_is_left_out(place: Make) -> None:
    ends: dict[int, str] = {}
    here = place(2, ended=lambda rank, _seconds: ends.get(rank))
    here.begin()
    ask(here, workers=4)
    here.arrive(2)
    waiting = here.regroup(2, -1, -1)
    ends[3] = "killed by SIGKILL"
    called_together(here, 0, 1)
    assert plans(here, {0: 1, 1: 1}).members == waiting.result(LIMIT_S).members == (0, 1, 2)
    assert here.lost() == {3: "killed by SIGKILL"}
    assert [row["lost"] for row in here.records("lost")] == [3]


def die_without_a_word(here: Place) -> None:
    here.arrive(2)
    here.leave(2)


def raise_before_joining(here: Place) -> None:
    here.member(2).failed({"error": "ConfigError", "message": "no such file", "place": "", "traceback": ""})


def raise_after_joining(here: Place) -> None:
    here.arrive(2)
    here.members[2].failed({"error": "ValueError", "message": "no such file", "place": "", "traceback": ""})


def never_ask(here: Place) -> None:
    here.arrive(2)


def never_join(here: Place) -> None:
    pass


FATES = [die_without_a_word, raise_before_joining, raise_after_joining, never_ask, never_join]


@pytest.mark.parametrize("fate", FATES, ids=lambda fate: fate.__name__)
def test_a_newcomer_that_comes_to_nothing_does_not_disturb_the_run(place: Make, fate: Callable[[Place], None]) -> None:
    here = place(2, still=True)
    here.begin()
    ask(here, workers=3)
    fate(here)
    here.pass_time(21.0)
    wait_until(lambda: here.lost().keys() == {2})
    assert 2 in here.killed
    assert not here.members[0].change_requested()
    wait_until(lambda: ask(here, workers=2) == ScaleAnswer(2, 0, (), ()))
    here.finish(0, 1)
    assert len(here.outcome.result(LIMIT_S)) == 2


def test_a_loss_while_newcomers_start_is_settled_without_them(place: Make) -> None:
    here = place(3)
    here.begin()
    ask(here, workers=5)
    here.arrive(3)
    waiting = here.regroup(3, -1, -1)
    here.leave(0)
    assert plans(here, {1: 4, 2: 4}).members == (1, 2)
    assert not waiting.done()
    here.arrive(4)
    fifth = here.regroup(4, -1, -1)
    called_together(here, 1, 2)
    plan = plans(here, {1: 6, 2: 6})
    assert plan == waiting.result(LIMIT_S) == fifth.result(LIMIT_S)
    assert plan[:3] == (2, (1, 2, 3, 4), 1)


def test_a_loss_after_the_workers_were_called_together_makes_one_plan_of_both(place: Make) -> None:
    here = place(3)
    here.begin()
    ask(here, workers=4)
    here.arrive(3)
    waiting = here.regroup(3, -1, -1)
    called_together(here, 0, 1, 2)
    here.leave(0)
    wait_until(lambda: bool(here.lost()))
    assert plans(here, {1: 4, 2: 5}) == waiting.result(LIMIT_S)
    assert waiting.result().members == (1, 2, 3)
    assert waiting.result().source == 2


def test_a_newcomer_lost_after_the_workers_were_called_together_lets_them_go_on(place: Make) -> None:
    here = place(2)
    here.begin()
    ask(here, workers=3)
    here.arrive(2)
    here.regroup(2, -1, -1)
    called_together(here, 0, 1)
    here.leave(2)
    wait_until(lambda: bool(here.lost()))
    assert plans(here, {0: 4, 1: 4}).members == (0, 1)
    assert not here.members[0].change_requested()


def test_newcomers_that_wait_do_not_make_stragglers_of_those_who_train(place: Make) -> None:
    here = place(2, still=True)
    here.begin()
    ask(here, workers=3)
    here.arrive(2)
    here.regroup(2, -1, -1)
    called_together(here, 0, 1)
    here.pass_time(60.0)  # a step may take its time
    assert not here.lost()
    assert plans(here, {0: 4, 1: 4}).members == (0, 1, 2)


def test_a_run_that_ends_first_does_not_wait_for_newcomers(place: Make) -> None:
    here = place(1, 1)
    here.begin()
    ask(here, workers=3, servers=2)
    here.arrive(2)
    here.regroup(2, -1, -1)
    here.finish(0, 1)
    assert [report.rank for report in here.outcome.result(LIMIT_S)] == [0]
    assert set(here.killed) >= {2, 3, 4}


def test_changes_do_not_count_as_regroups_that_led_nowhere(place: Make) -> None:
    here = place(1, 1)
    here.begin()
    for n in range(5):
        ask(here, servers=2 if n % 2 == 0 else 1)
        if n % 2 == 0:
            here.arrive(2 + n // 2)
        called_together(here, 0)
        assert plans(here, {0: 1}).members == (0,)


def test_what_the_launcher_cannot_start_is_refused_and_leaves_no_trace(place: Make) -> None:
    def start(_role: str, rank: int) -> None:
        if rank == 2:
            raise RankFailed("rank 2 could not be started: no memory")

    here = place(1, start=start)
    here.begin()
    with pytest.raises(ConfigError, match="rank 2 could not be started: no memory"):
        ask(here, workers=3)
    assert here.killed == [1]
    assert not here.lost()
    assert ask(here, workers=2).starting == (3,)


# Requests that are refused.

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a strategy that cannot": ({"rules": {"survives_loss": False}}, {"workers": 3}, "must survive the loss"),
    "a reason of the launcher's": ({"rules": {"fixed": "shares are set"}}, {"workers": 3}, "scale: shares are set"),
    "nobody": ({}, {"workers": 0}, "workers must be a whole number from 1 to 4096, got 0"),
    "too many": ({}, {"workers": 4097}, "from 1 to 4096, got 4097"),
    "more than samples": ({"rules": {"most_workers": 8}}, {"workers": 9}, "from 1 to 8, as many as a global step"),
    "not a number": ({}, {"workers": "3"}, "whole number from 1 to 4096, got '3'"),
    "neither": ({}, {}, "must be given, got neither"),
    "servers where there are none": ({"servers": 0}, {"servers": 1}, "since the strategy has none, got 1"),
    "no server": ({}, {"servers": 0}, "servers must be a whole number from 1 to 4096, got 0"),
    "servers beside workers": (
        {"processes": [(0, 2), (1,)]},
        {"servers": 2},
        "servers must stay 1, since they live in the workers' processes, got 2",
    ),
    "a worker with a server": (
        {"processes": [(0,), (1, 2)]},
        {"workers": 1},
        "worker 1 with server 2 cannot retire: the server is needed",
    ),
    "a launcher that cannot": ({"owns_processes": False}, {"workers": 3}, "must be able to start ranks"),
}


@pytest.mark.parametrize(("run", "asked", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_is_refused_with_the_reason(
    place: Make, run: dict[str, Any], asked: dict[str, Any], why: str
) -> None:
    here = place(2, **{"servers": 1, **run})
    here.begin()
    with pytest.raises(ConfigError, match=why):
        ask(here, **asked)
    assert not here.started
    assert not here.outcome.done()


def test_one_change_at_a_time(place: Make) -> None:
    here = place(2)
    here.begin()
    ask(here, workers=3)
    with pytest.raises(ConfigError, match="one is under way"):
        ask(here, workers=4)


def test_a_run_that_is_still_starting_is_asked_too_early(place: Make) -> None:
    here = place(2)
    with pytest.raises(ConfigError, match="still starting"):
        ask(here, workers=3)


# The file that says where to ask.


def test_the_control_file_is_the_owners_alone_and_goes_with_the_run(place: Make) -> None:
    here = place(1)
    path = here.folder / "control.json"
    path.write_text("left by another")
    path.chmod(0o644)
    with open_to_change(here.folder, here.coordinator.address, SECRET):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert json.loads(path.read_text()) == {"coordinator": here.coordinator.address, "secret": SECRET.hex()}
    assert not path.exists()


@pytest.mark.slow
def test_a_launcher_that_is_gone_is_named(place: Make) -> None:
    here = place(1)
    with (
        open_to_change(here.folder, f"unix:{here.folder}/gone", SECRET),
        pytest.raises(Lost, match=rf"^scale: the launcher of {here.folder} does not answer; has the run ended"),
    ):
        scale(here.folder, workers=2)
