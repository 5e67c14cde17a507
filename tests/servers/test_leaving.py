"""A segment ends, and a server is lost over it: whoever it has let go has gone home, and the others must get there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from podium.comm.base import Message, Meta
from podium.servers.gate import Rules
from podium.servers.server import Server
from tests.servers.test_unequal_leases import FIRST, SECOND, WORKERS, Net, work

NAME = [0, 0]


@pytest.fixture
def net(tmp_path: Path) -> Net:
    net = Net(tmp_path, [1] * WORKERS)
    body = tuple(r.of(net.flat.params) for r in net.layouts[0].ranges)
    net.servers[FIRST].take_up(Message(0, "seed", {**work(), "segment": NAME}, body, 0))
    return net


def say(server: Server, kind: str, ranks: Sequence[int], meta: Meta | None = None) -> None:
    for rank in ranks:
        server.take_up(Message(rank, kind, meta or {}, (), rank))


def answered(net: Net, kind: str) -> list[int]:
    """Workers that were answered since this was last asked."""
    found = [rank for rank in range(WORKERS) if any(message.kind == kind for message in net.queue(FIRST, rank))]
    for rank in range(WORKERS):
        net.queue(FIRST, rank).clear()
    return found


def test_whoever_the_lost_server_has_let_go_is_not_waited_for(net: Net) -> None:
    say(net.servers[FIRST], "leave", range(WORKERS))
    assert answered(net, "leave") == [0, 1, 2]
    net.replace_first()  # after its answer to worker 0 was out: the others ask again
    server = net.servers[FIRST]
    say(server, "leave", [1, 2])
    assert answered(net, "leave") == []
    say(server, "home", [0], {"segment": NAME})
    assert answered(net, "leave") == [1, 2]


def test_word_from_one_that_has_gone_home_is_not_taken_for_the_next_segment(net: Net) -> None:
    server = net.servers[FIRST]
    say(server, "leave", range(WORKERS))
    body = tuple(r.of(net.flat.params) for r in net.layouts[0].ranges)
    server.take_up(Message(0, "seed", {**work(), "segment": [0, 1]}, body, 0))
    answered(net, "leave")
    say(server, "home", [1, 2], {"segment": NAME})  # late: they are at work by now
    assert answered(net, "home") == [1, 2]
    say(server, "leave", [0])
    assert answered(net, "leave") == []


def test_nobody_owes_a_word_to_a_server_that_was_restored_between_two_segments(net: Net) -> None:
    """It cannot know that its segment is over, and would give up after a dozen deadlines."""
    net.replace_first()
    server = net.servers[FIRST]
    assert server.segments.is_idle
    say(server, "draw", [0], {"done": -1, "votes": [False] * 3})
    assert not server.segments.is_idle


def test_a_restored_server_hears_who_rests(net: Net) -> None:
    """Otherwise its gate waits for pushes of workers for whom there is nothing left to do."""
    server = net.servers[FIRST]
    body = tuple(r.of(net.flat.params) for r in net.layouts[0].ranges)
    server.take_up(Message(0, "seed", {**work(), "rules": Rules(bound=1).to_dict(), "segment": NAME}, body, 0))
    server.segment.policy.rest({1, 2})
    net.queue(FIRST, SECOND).clear()
    server.take_up(Message(SECOND, "hello", {"segment": NAME}))
    assert [message.meta.get("rest") for message in net.queue(FIRST, SECOND)] == [[1, 2]]
