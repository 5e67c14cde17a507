"""Late workers: the launcher is told of them after half a deadline, and again once no worker is late."""

from __future__ import annotations

from podium.comm.base import Meta
from podium.servers.leases.late_workers import LateWorkers

DEADLINE_S = 8.0


class Watch:
    """A server's late workers, at a time that the test sets."""

    def __init__(self) -> None:
        self.now_s, self.told = 100.0, list[Meta]()
        self.late = LateWorkers(9, DEADLINE_S, self.told.append, lambda: self.now_s)

    def look(self, awaited: set[int], after_s: float = 0.0, waiting: tuple[int, ...] = (5,)) -> None:
        self.now_s += after_s
        if self.late.is_due:
            self.late.look(awaited, waiting)


def test_a_worker_is_late_after_half_the_deadline() -> None:
    watch = Watch()
    watch.look({1, 2})
    watch.look({1, 2}, after_s=3.9)
    assert watch.told == []
    watch.look({1, 2}, after_s=1.0)
    (told,) = watch.told
    assert told["server"] == 9 and told["waiting"] == [5]
    assert [worker for worker, _ in told["late"]] == [1, 2]


def test_whoever_was_heard_of_is_late_from_then_on_only() -> None:
    watch = Watch()
    watch.look({1, 2})
    watch.late.heard(1)
    watch.look({1, 2}, after_s=4.5)
    (told,) = watch.told
    assert dict(told["late"]) == {1: 0.0, 2: 4.5}


def test_that_nobody_is_late_any_more_is_told_once() -> None:
    watch = Watch()
    watch.look({1})
    watch.look({1}, after_s=4.5)
    watch.look(set(), after_s=2.0)
    watch.look(set(), after_s=2.0)
    assert [told["late"] for told in watch.told] == [[(1, 4.5)], []]


def test_a_server_looks_now_and_then() -> None:
    watch = Watch()
    assert watch.late.is_due
    watch.look({1})
    watch.now_s += 0.5
    assert not watch.late.is_due
    watch.now_s += 0.6
    assert watch.late.is_due


def test_without_a_launcher_to_tell_it_never_looks() -> None:
    late = LateWorkers(9, DEADLINE_S, None)
    assert late.look_s is None and not late.is_due
