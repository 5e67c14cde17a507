"""Exchanges by schedule over real sockets: messages that come early, twice, late, wrongly or only in part."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from podium.comm.real import frames
from podium.comm.real.channel import Channel
from podium.comm.real.frames import GIVE_UP, MOVE, Limits
from podium.comm.real.schedule_runner import ExchangeHandle, ScheduleRunner
from podium.comm.schedule import Chain, Move
from podium.errors import CommError, Lost

LIMIT_S = 20.0
N = 100
"""Elements of a message, of four bytes each."""


class End:
    """One endpoint: a channel and its runner."""

    def __init__(self, rank: int, folder: Path, deadline_s: float, limits: Limits | None) -> None:
        self.rank = rank
        listen = f"unix:{folder}/{rank}"
        self.channel = Channel(rank, secret=b"here", listen=listen, deadline_s=deadline_s, limits=limits)
        self.runner = self.channel.runner = ScheduleRunner(self.channel)

    def issue(self, number: int, chains: list[Chain], tensor: Tensor, members: tuple[int, ...] = (0, 1, 2)) -> Any:
        return self.runner.issue(number, members, chains, tensor)

    def wait(self, handle: ExchangeHandle, deadline_s: float = LIMIT_S) -> None:
        self.runner.wait(handle, deadline_s)

    def post(self, to: int, of: Any, name: Any, part: Tensor | None, kind: str = MOVE, **meta: Any) -> None:
        """A message as a runner sends it, or one that no runner would."""
        self.channel.post(to, kind, {"of": of, "name": name, **meta}, part, lambda _well: None)

    def cut(self, to: int, of: Any, name: Any, part: Tensor) -> None:
        """Half a message, and the end of the connection."""
        self.channel.post(
            to, GIVE_UP, {"generation": -5, "why": "so that there is a connection"}, None, lambda _well: None
        )
        link = self.channel._links[to]
        buffers = frames.encode_frame(MOVE, self.rank, 0, {"of": of, "name": name}, (part,), self.channel.limits)
        raw = b"".join(bytes(buffer) for buffer in buffers)
        link.sock.sendall(raw[: len(raw) - part.nbytes // 2])
        time.sleep(0.2)  # it must be received, and not be gone with the connection
        link.break_off()


Meet = Callable[..., list[End]]


@pytest.fixture
def meet(tmp_path: Path) -> Iterator[Meet]:
    ends: list[End] = []

    def make(count: int = 3, deadline_s: float = LIMIT_S, limits: Limits | None = None) -> list[End]:
        ends.extend(End(rank, tmp_path, deadline_s, limits) for rank in range(count))
        for end in ends:
            end.channel.introduce({other.rank: other.channel.address for other in ends if other is not end})
            end.runner.form(1)
        return ends

    yield make
    for end in ends:
        end.channel.close()


def adds(*peers: int, numel: int = N) -> list[Chain]:
    """Add what each of these sends, one after the other."""
    return [[Move("add", peer, 0, 0, numel) for peer in peers]]


def ones(value: float = 1.0, numel: int = N) -> Tensor:
    return torch.full((numel,), value)


def wait_until(holds: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    until = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.01)


# In order, early, late.


def test_a_message_may_come_before_its_exchange_was_begun(meet: Meet) -> None:
    here, there, _ = meet()
    for number in (3, 2, 1):
        there.post(0, (1, number), (0, 0), ones(float(number)))
    wait_until(lambda: here.runner._early_bytes == 3 * 4 * N)
    for number in (1, 2, 3):
        tensor = ones(10.0)
        here.wait(here.issue(number, adds(1), tensor))
        assert tensor.unique().tolist() == [10.0 + number]
    assert here.runner._early_bytes == 0


def test_messages_of_one_exchange_may_come_in_any_order(meet: Meet) -> None:
    here, first, second = meet()
    tensor = ones()
    handle = here.issue(1, [[Move("add", 1, 0, 0, 50), Move("put", 2, 1, 50, N), Move("add", 1, 2, 0, N)]], tensor)
    first.post(0, (1, 1), (0, 2), ones(100.0))
    second.post(0, (1, 1), (0, 1), ones(7.0, 50))
    first.post(0, (1, 1), (0, 0), ones(10.0, 50))
    here.wait(handle)
    assert tensor[:50].unique().tolist() == [111.0]
    assert tensor[50:].unique().tolist() == [107.0]


def test_a_message_of_a_later_generation_waits_for_it(meet: Meet) -> None:
    here, there, _ = meet()
    there.post(0, (2, 1), (0, 0), ones(5.0))
    there.post(0, (1, 1), (0, 0), ones(3.0))
    now, later = ones(), ones()
    here.wait(here.issue(1, adds(1), now))
    wait_until(lambda: here.runner._early_bytes == 4 * N)
    here.runner.form(2)
    here.wait(here.issue(1, adds(1), later))
    assert (float(now[0]), float(later[0])) == (4.0, 6.0)


def test_a_message_of_an_old_generation_is_ignored_and_harms_nothing(meet: Meet) -> None:
    here, there, _ = meet()
    here.runner.form(4)
    tensor = ones()
    handle = here.issue(1, adds(1), tensor)
    for generation in (1, 2, 3):
        there.post(0, (generation, 1), (0, 0), ones(50.0))
    there.post(0, (4, 1), (0, 0), ones(2.0))
    here.wait(handle)
    assert tensor.unique().tolist() == [3.0]
    assert here.runner._early_bytes == 0


def test_forming_anew_fails_what_was_under_way_and_forgets_what_was_early(meet: Meet) -> None:
    here, there, _ = meet()
    handle = here.issue(1, adds(1), ones())
    there.post(0, (1, 9), (0, 0), ones())
    wait_until(lambda: here.runner._early_bytes == 4 * N)
    here.runner.form(2)
    with pytest.raises(Lost, match="the group was dropped"):
        here.wait(handle)
    wait_until(lambda: here.runner._early_bytes == 0)  # it may have been on its way
    tensor = ones()
    there.post(0, (2, 1), (0, 0), ones())
    here.wait(here.issue(1, adds(1), tensor))
    assert tensor.unique().tolist() == [2.0]


def test_an_exchange_of_nobody_is_over_at_once(meet: Meet) -> None:
    (here,) = meet(1)
    handle = here.issue(1, [], ones(), members=(0,))
    here.wait(handle, 1.0)
    assert handle.finished


# Messages that nobody meant.

WRONG: dict[str, tuple[dict[str, Any], Tensor | None]] = {
    "too short": ({}, ones(numel=N - 1)),
    "too long": ({}, ones(numel=N + 1)),
    "empty": ({}, ones(numel=0)),
    "of another dtype": ({}, ones().double()),
    "not flat": ({}, ones().view(10, 10)),
    "without a tensor": ({}, None),
    "of another chain": ({"name": (5, 0)}, ones()),
    "of another round": ({"name": (0, 5)}, ones()),
    "without a name": ({"name": None}, ones()),
    "with a name of words": ({"name": ["a", "b"]}, ones()),
    "with a negative name": ({"name": (0, -1)}, ones()),
    "with half a number": ({"of": (1,)}, ones()),
    "with a true number": ({"of": (1, True)}, ones()),
    "of an unknown generation": ({"of": (1.5, 1)}, ones()),
}


@pytest.mark.parametrize(("meta", "part"), WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("kind", ["add", "put"])
def test_a_message_that_is_not_in_the_schedule_ends_its_connection_and_the_exchange(
    meet: Meet, kind: Any, meta: dict[str, Any], part: Tensor | None
) -> None:
    here, there, _ = meet()
    tensor = ones()
    handle = here.issue(1, [[Move(kind, 1, 0, 0, N)]], tensor)
    said = {"of": (1, 1), "name": (0, 0), **meta}
    there.post(0, said["of"], said["name"], part)
    with pytest.raises(Lost, match="rank 1 is gone"):
        here.wait(handle)
    assert tensor.unique().tolist() == [1.0]


def test_a_message_that_comes_twice_ends_its_connection(meet: Meet) -> None:
    here, there, _ = meet()
    tensor = ones()
    handle = here.issue(1, [[Move("add", 1, 0, 0, N), Move("add", 1, 1, 0, N)]], tensor)
    there.post(0, (1, 1), (0, 0), ones())
    there.post(0, (1, 1), (0, 0), ones())
    with pytest.raises(Lost, match="rank 1 is gone"):
        here.wait(handle)


def test_one_that_takes_no_part_is_cut_off_and_the_others_go_on(meet: Meet) -> None:
    here, there, stranger = meet()
    tensor = ones()
    handle = here.issue(1, adds(1), tensor, members=(0, 1))
    stranger.post(0, (1, 1), (0, 0), ones(100.0))
    wait_until(lambda: 2 in here.runner._gone)
    there.post(0, (1, 1), (0, 0), ones())
    here.wait(handle)
    assert tensor.unique().tolist() == [2.0]


def test_giving_up_must_name_a_generation(meet: Meet) -> None:
    here, there, _ = meet()
    handle = here.issue(1, adds(1), ones())
    there.post(0, None, None, None, kind=GIVE_UP, generation="all")
    with pytest.raises(Lost, match="rank 1 is gone"):
        here.wait(handle)


# Those who are lost.


def test_who_waits_for_one_hears_that_another_gave_up(meet: Meet) -> None:
    """Rank 0 waits for rank 2, which is silent; rank 1 knows why."""
    here, there, _ = meet()
    handle = here.issue(1, adds(2), ones())
    there.runner.give_up("rank 2 was lost", (0, 1, 2))
    with pytest.raises(Lost, match="rank 1 gave up: rank 2 was lost"):
        here.wait(handle)
    with pytest.raises(Lost, match="rank 1 gave up"):
        here.wait(here.issue(2, adds(1), ones()))  # nor does anything else of this generation work
    here.runner.form(2)
    tensor = ones()
    there.runner.form(2)
    there.post(0, (2, 1), (0, 0), ones())
    here.wait(here.issue(1, adds(1), tensor))
    assert tensor.unique().tolist() == [2.0]


def test_a_deadline_that_passes_is_told_to_the_others(meet: Meet) -> None:
    here, there, _ = meet()
    mine, theirs = here.issue(1, adds(2), ones()), there.issue(1, adds(2), ones())
    with pytest.raises(Lost, match=r"exchange 1 did not end in 0\.2 s; ranks \[2\] are missing"):
        here.wait(mine, 0.2)
    with pytest.raises(Lost, match="rank 0 gave up"):
        there.wait(theirs)


def test_giving_up_a_generation_that_is_over_harms_nothing(meet: Meet) -> None:
    here, there, _ = meet()
    here.runner.form(3)
    handle = here.issue(1, adds(1), ones())
    there.post(0, None, None, None, kind=GIVE_UP, generation=2, why="late")
    there.post(0, (3, 1), (0, 0), ones())
    here.wait(handle)


def test_a_generation_may_be_given_up_before_it_is_formed_here(meet: Meet) -> None:
    here, there, _ = meet()
    there.post(0, None, None, None, kind=GIVE_UP, generation=2, why="somebody else is gone")
    wait_until(lambda: 2 in here.runner._given_up)
    here.runner.form(2)
    with pytest.raises(Lost, match="rank 1 gave up: somebody else is gone"):
        here.wait(here.issue(1, adds(2), ones()))


def test_who_is_not_needed_any_more_may_leave(meet: Meet) -> None:
    here, first, second = meet()
    tensor = ones()
    handle = here.issue(1, adds(1, 2), tensor)
    first.post(0, (1, 1), (0, 0), ones())
    wait_until(lambda: handle.running is not None and not handle.running.misses(1))
    first.channel.close()
    wait_until(lambda: 1 in here.runner._gone)
    assert not handle.done
    second.post(0, (1, 1), (0, 0), ones())
    here.wait(handle)
    assert tensor.unique().tolist() == [3.0]


def test_who_has_left_before_an_exchange_needs_it_is_missed_at_once(meet: Meet) -> None:
    here, there, _ = meet()
    there.post(0, (1, 1), (0, 0), ones())
    here.wait(here.issue(1, adds(1), ones()))
    there.channel.close()
    wait_until(lambda: 1 in here.runner._gone)
    for kind in ("add", "send"):
        with pytest.raises(Lost):
            here.wait(here.issue(2, [[Move(kind, 1, 0, 0, N)]], ones()))


@pytest.mark.parametrize("kind", ["add", "put"])
def test_a_connection_that_is_cut_in_the_middle_of_a_message_fails_the_exchange(meet: Meet, kind: Any) -> None:
    here, there, _ = meet()
    tensor = ones(1.0, 50_000)
    handle = here.issue(1, [[Move(kind, 1, 0, 0, 50_000)]], tensor)
    there.cut(0, (1, 1), (0, 0), ones(9.0, 50_000))
    with pytest.raises(Lost, match="rank 1 is gone"):
        here.wait(handle)
    here.runner.form(2)  # which waits for nobody who is in the middle of a message
    assert kind == "put" or tensor.unique().tolist() == [1.0]


def test_nothing_lands_in_a_tensor_whose_exchange_has_failed(meet: Meet) -> None:
    """It is the strategy's again, which may do the step anew in it."""
    here, there, _ = meet()
    tensor = ones()
    handle = here.issue(1, [[Move("put", 1, 0, 0, N)]], tensor)
    here.runner.give_up("a test", ())
    there.post(0, (1, 1), (0, 0), ones(9.0))
    there.post(0, (2, 1), (0, 0), ones(4.0))  # behind it, so once this is here the other was dealt with
    wait_until(lambda: (2, 1) in here.runner._early)
    with pytest.raises(Lost, match="a test"):
        here.wait(handle)
    assert tensor.unique().tolist() == [1.0]


# Room for what is early.

SMALL = Limits(inbox_bytes=6 * N)
"""Room for one early message, and not for two."""


def test_what_nobody_asked_for_is_not_read_beyond_the_limit(meet: Meet) -> None:
    here, there, _ = meet(limits=SMALL)
    for number in (1, 2, 3):
        there.post(0, (1, number), (0, 0), ones(float(number)))
    wait_until(lambda: here.runner._early_bytes == 4 * N)
    time.sleep(0.2)
    assert here.runner._early_bytes == 4 * N
    for number in (1, 2, 3):
        tensor = ones(0.0)
        here.wait(here.issue(number, adds(1), tensor))
        assert tensor.unique().tolist() == [float(number)]
    assert here.runner._early_bytes == 0


def test_a_message_for_an_exchange_under_way_needs_no_room(meet: Meet) -> None:
    here, first, second = meet(limits=SMALL)
    tensor = ones()
    handle = here.issue(1, adds(2), tensor)
    first.post(0, (1, 2), (0, 0), ones())
    wait_until(lambda: here.runner._early_bytes == 4 * N)
    second.post(0, (1, 1), (0, 0), ones())
    here.wait(handle)
    assert tensor.unique().tolist() == [2.0]


def test_an_early_message_for_which_there_is_never_room_ends_its_connection(meet: Meet) -> None:
    here, there, _ = meet(limits=SMALL, deadline_s=0.5)
    for number in (1, 2):
        there.post(0, (1, number), (0, 0), ones())
    wait_until(lambda: 1 in here.runner._gone)
    tensor = ones()
    with pytest.raises(CommError):
        here.wait(here.issue(2, adds(1), tensor))


def test_the_room_of_an_early_message_that_was_cut_off_is_free_again(meet: Meet) -> None:
    here, there, other = meet(limits=SMALL)
    there.cut(0, (1, 1), (0, 0), ones())
    wait_until(lambda: 1 in here.runner._gone)
    other.post(0, (1, 2), (0, 0), ones())
    wait_until(lambda: (1, 2) in here.runner._early, 3.0)
    assert here.runner._early_bytes == 4 * N


def test_the_room_of_messages_of_a_generation_that_was_given_up_is_free_again(meet: Meet) -> None:
    here, there, other = meet(limits=SMALL)
    here.runner.give_up("a test", ())
    there.post(0, (1, 1), (0, 0), ones())
    other.post(0, (2, 1), (0, 0), ones())
    wait_until(lambda: (2, 1) in here.runner._early, 3.0)
    wait_until(lambda: here.runner._early_bytes == 4 * N, 3.0)


def test_the_room_of_a_message_whose_generation_ended_on_the_way_is_free_again(meet: Meet) -> None:
    """Its header came before the group was formed anew, its body after."""
    here, there, other = meet(limits=SMALL)
    there.post(0, None, None, None, kind=GIVE_UP, generation=0, why="so that there is a connection")
    wait_until(lambda: 1 in here.channel._links)
    part = ones()
    buffers = frames.encode_frame(MOVE, 1, 0, {"of": (1, 1), "name": (0, 0)}, (part,), SMALL)
    raw, link = b"".join(bytes(buffer) for buffer in buffers), there.channel._links[0]
    link.sock.sendall(raw[:-100])
    wait_until(lambda: here.runner._early_bytes == 4 * N, 3.0)
    here.runner.form(2)
    link.sock.sendall(raw[-100:])
    other.post(0, (2, 1), (0, 0), ones())
    wait_until(lambda: (2, 1) in here.runner._early, 3.0)
    wait_until(lambda: here.runner._early_bytes == 4 * N, 3.0)


# Many at once.


def test_many_exchanges_at_once_between_all_of_them(meet: Meet) -> None:
    """Everybody sends to everybody, in exchanges that are begun in another order on each."""
    ends, count, numel = meet(), 20, 3000
    results: dict[int, list[Tensor]] = {}

    def take_part(end: End) -> None:
        others = [rank for rank in range(3) if rank != end.rank]
        sends: list[Chain] = [[Move("send", other, 0, 0, numel) for other in others]]
        tensors = [torch.full((2 * numel,), float(end.rank + n)) for n in range(count)]
        handles = []
        for n in range(count):
            receives = [[Move("add", other, 0, numel, 2 * numel)] for other in others]
            chains = [*_numbered(end.rank, sends, receives)]
            handles.append(end.issue(n + 1, chains, tensors[n]))
        for handle in reversed(handles):
            end.wait(handle)
        results[end.rank] = tensors

    threads = [threading.Thread(target=take_part, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    for rank, tensors in results.items():
        for n, tensor in enumerate(tensors):
            assert tensor[:numel].unique().tolist() == [float(rank + n)]
            assert tensor[numel:].unique().tolist() == [3.0 + 3 * n]
    assert results.keys() == {0, 1, 2}


def _numbered(rank: int, sends: list[Chain], receives: list[Chain]) -> list[Chain]:
    """Chain i is what rank i sends; each adds what it gets from i in chain i."""
    others = [other for other in range(3) if other != rank]
    return [sends[0] if i == rank else receives[others.index(i)] for i in range(3)]
