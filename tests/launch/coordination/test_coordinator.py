"""The coordinator and the members it watches over, each with real sockets; the ranks are threads of this process."""

from __future__ import annotations

from typing import Any

import pytest

from podium.engine.recovery import Regroup
from podium.errors import ConfigError, Lost, MissingExtra, PodiumError, RankFailed, UnknownName
from podium.launch.scale import open_to_change, scale
from tests.launch.coordination.conftest import Make
from tests.launch.coordination.place import LIMIT_S, SECRET, Place, wait_until


def test_a_busy_rank_is_waited_for_beyond_the_deadline_and_then_regroups(place: Make) -> None:
    here = place(still=True, deadline_s=10.0)
    first, second = here.begin()
    first.busy("validation")
    waiting = here.regroup(second)
    here.pass_time(50.0)
    assert not waiting.done()
    first.busy(None)
    plan = here.regroup(first).result(LIMIT_S)
    assert plan == waiting.result(LIMIT_S) == Regroup(1, (0, 1), 0)
    assert not here.lost()


def test_a_rank_that_is_through_with_what_kept_it_busy_has_a_whole_deadline_to_report(place: Make) -> None:
    here = place(still=True, deadline_s=10.0)
    first, second = here.begin()
    first.busy("validation")
    waiting = here.regroup(second)
    here.pass_time(20.0)
    first.busy(None)
    here.pass_time(9.0)
    here.regroup(first).result(LIMIT_S)
    assert waiting.result(LIMIT_S).members == (0, 1)


def test_a_busy_rank_is_not_waited_for_longer_than_a_dozen_deadlines(place: Make) -> None:
    here = place(still=True, deadline_s=10.0)
    first, second = here.begin()
    first.busy("validation")
    waiting = here.regroup(second)
    wait_until(lambda: here.coordinator._roster.members[1].plan_request is not None)
    here.pass_time(119.0)
    assert not here.lost()
    here.pass_time(5.0)
    assert waiting.result(LIMIT_S).members == (1,)


def test_a_rank_that_neither_reports_nor_is_busy_is_hung_also_while_another_is_busy(place: Make) -> None:
    here = place(3, still=True, deadline_s=10.0)
    first, second, _hangs = here.begin()
    first.busy("validation")
    waiting = here.regroup(second)
    wait_until(lambda: here.coordinator._roster.members[1].plan_request is not None)
    here.pass_time(11.0)
    assert here.lost().keys() == {2}
    first.busy(None)
    here.regroup(first)
    assert waiting.result(LIMIT_S).members == (0, 1)
    assert here.killed == [2]
    assert here.lost()[2] == "hung for 10 s while the others waited for it, and killed" + RAISE.format("deadline_s")


RAISE = "; if it only needs longer, raise {}"


def fall_silent(here: Place, rank: int) -> None:
    """Once training is under way, its thread ends and its connection stays: as if the whole process stood still."""
    wait_until(lambda: any(event["event"] == "progress" for event in here.events))
    member = here.members[rank]
    member._closing.set()
    assert member._thread is not None
    member._thread.join(LIMIT_S)
    here.hear_all()


@pytest.mark.parametrize(("runs", "allowed_s", "setting"), [(True, 60.0, "deadline_s"), (False, 6.0, "heartbeat_s")])
def test_a_silent_process_is_given_the_deadline_if_it_runs_and_a_heartbeat_if_not(
    place: Make, runs: bool, allowed_s: float, setting: str
) -> None:
    here = place(still=True, runs=lambda _rank: runs, heartbeat_s=6.0, deadline_s=60.0)
    first, _ = here.begin()
    fall_silent(here, 1)
    here.pass_time(allowed_s - 0.1)
    assert not here.lost()
    here.pass_time(1.0)
    assert here.regroup(first).result(LIMIT_S).members == (0,)
    assert here.killed == [1]
    assert f"longer than {setting} allows, and killed" in here.lost()[1]
    assert here.lost()[1].endswith(RAISE.format(setting))


def test_where_nobody_can_say_how_a_process_is_a_few_heartbeats_of_silence_are_allowed(place: Make) -> None:
    here = place(still=True, owns_processes=False, heartbeat_s=6.0, deadline_s=60.0)
    first, _ = here.begin()
    fall_silent(here, 1)
    here.pass_time(29.9)
    assert not here.lost()
    here.pass_time(1.0)
    assert here.regroup(first).result(LIMIT_S).members == (0,)
    assert "heartbeat_s" in here.lost()[1]


def test_the_coordinators_store_is_one_as_process_groups_use_it(place: Make) -> None:
    here = place(2)
    first, second = (member.store() for member in here.begin())
    assert not first.check(["generation-0/a"])
    first.set("generation-0/a", b"\x00\xff")
    assert second.check(["generation-0/a"]) and not second.check(["generation-0/a", "generation-0/b"])
    assert second.get("generation-0/a") == b"\x00\xff"
    assert [first.add("generation-0/n", 2), second.add("generation-0/n", 3)] == [2, 5]
    assert second.delete_key("generation-0/a") and not second.deleteKey("generation-0/a")
    assert not first.check(["generation-0/a"])


def test_a_launcher_that_takes_long_to_answer_costs_nobody(place: Make) -> None:
    busy: list[int] = []

    def ended(rank: int, wait_s: float) -> str | None:
        """How a newcomer is: the answer takes an hour, once."""
        if busy == [0]:
            busy.append(1)
            here.clock.advance(3600.0)
        return None

    here = place(still=True, runs=lambda _rank: False, ended=ended, heartbeat_s=6.0, start_deadline_s=1e6)
    here.begin()
    busy.append(0)
    with open_to_change(here.folder, here.coordinator.address, SECRET):
        scale(here.folder, workers=3)
    wait_until(lambda: len(busy) == 2)
    here.hear_all()
    assert not here.lost() and here.killed == []


def test_a_coordinator_that_stood_still_itself_blames_nobody(place: Make) -> None:
    here = place(still=True, runs=lambda _rank: False, heartbeat_s=6.0)
    here.begin()
    fall_silent(here, 1)
    here.clock.advance(3600.0)
    here.hear_all()
    assert not here.lost()


def words(error: str, message: str, place: str = "") -> dict[str, Any]:
    return {"error": error, "message": message, "place": place, "traceback": "", "log": ""}


def test_a_failure_before_joining_ends_the_run_with_the_ranks_own_error(place: Make) -> None:
    here = place()
    here.members[1].failed(words("ValueError", "ValueError: too soon", "loop.py:2 in <module>"))
    with pytest.raises(RankFailed, match=r"^rank 1: ValueError: too soon\n  at loop.py:2 in <module>$"):
        here.outcome.result(LIMIT_S)


CLASSES: dict[str, tuple[str, type[PodiumError]]] = {
    "unknown name": (UnknownName.__name__, ConfigError),
    "missing extra": (MissingExtra.__name__, ConfigError),
    "configuration": (ConfigError.__name__, ConfigError),
    "the user's": ("KeyError", RankFailed),
    "a name of the module that is no error": ("Iterable", RankFailed),
}


@pytest.mark.parametrize(("name", "cls"), CLASSES.values(), ids=CLASSES.keys())
def test_a_ranks_error_keeps_its_exit_code(place: Make, name: str, cls: type[PodiumError]) -> None:
    here = place()
    here.members[0].failed(words(name, "what it said"))
    with pytest.raises(PodiumError, match=r"^rank 0: what it said$") as caught:
        here.outcome.result(LIMIT_S)
    assert type(caught.value) is cls


def test_a_rank_that_got_no_reply_says_what_to_raise(place: Make) -> None:
    here = place()
    for member in here.begin():
        member.failed(words("DeadlineExceeded", "no reply for 20 s from rank 2 ('push')"))
    with pytest.raises(PodiumError, match=r"^rank \d: no reply for 20 s .*raise deadline_s$"):
        here.outcome.result(LIMIT_S)


def test_the_last_words_of_a_lost_rank_are_not_heard(place: Make) -> None:
    here = place(still=True, heartbeat_s=6.0, deadline_s=60.0, runs=lambda _rank: False)
    first, _ = here.begin()
    fall_silent(here, 1)
    here.pass_time(7.0)
    here.regroup(first).result(LIMIT_S)
    here.members[1].failed(words("ValueError", "too late"))
    here.hear_all()
    assert not here.outcome.done()


def test_a_run_that_loses_its_last_worker_ends_with_the_advice(place: Make) -> None:
    here = place(1, still=True, heartbeat_s=6.0, deadline_s=12.0, runs=lambda _rank: True)
    here.begin()
    fall_silent(here, 0)
    here.pass_time(13.0)
    with pytest.raises(Lost, match=r"^worker 0 was lost: silent for .* last heard of at step 1; .*raise deadline_s$"):
        here.outcome.result(LIMIT_S)
