"""Members of a segment: who is waited for, and until when."""

from __future__ import annotations

from podium.comm.base import Message
from podium.servers.members import Members


def members() -> Members:
    made = Members([7])
    made.begin([0, 1, 2, 3], serve_only=[3])
    return made


def leave(made: Members, *workers: int) -> None:
    for worker in workers:
        made.leave(Message(worker, "leave", {}))


def test_a_worker_that_skips_is_not_waited_for_at_the_end_and_one_that_broke_out_is() -> None:
    made = members()
    made.skip(1, broke=False)
    made.skip(2, broke=True)
    assert made.present == [0, 2, 3], "one that broke out still takes the result home"
    assert made.live == [0, 3] and made.training == [0]


def test_all_have_left_once_the_last_present_worker_has() -> None:
    made = members()
    leave(made, 0, 1)
    made.is_through(2)  # it has the state from the server that this one replaced
    assert not made.all_left
    made.depart(3)
    assert made.all_left
    made.let_go()
    assert made.all_through and not made.left


def test_nobody_has_left_where_nobody_waits() -> None:
    made = members()
    for worker in made.workers:
        made.depart(worker)
    assert made.all_gone and not made.all_left


def test_a_worker_that_had_left_is_no_loss() -> None:
    made = members()
    leave(made, 0)
    for worker in (0, 1, 7):
        made.depart(worker)
    assert [made.forget(worker) for worker in (0, 1, 7)] == [False, True, False]


def test_whoever_is_gone_stays_gone_in_the_next_segment() -> None:
    made = members()
    made.depart(1)
    made.skip(2, broke=False)
    made.begin([0, 1, 2], serve_only=[])
    assert made.present == [0, 2] and made.training == [0, 2]


def test_those_that_only_served_train_where_nobody_else_is_left() -> None:
    made = members()
    for worker in (0, 1, 2):
        made.depart(worker)
    assert made.training == []
    made.train_all()
    assert made.training == [3]
