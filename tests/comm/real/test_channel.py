"""The channel between endpoints: real sockets, real threads, and a real process where one has to die."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.comm.base import DEPARTED, Message
from podium.comm.real.channel import Channel
from podium.comm.real.frames import ACCEPTED, FrameError, Limits, Refused, encode_frame, prove
from podium.errors import CommError, ConfigError, DeadlineExceeded, Lost

SECRET = b"of this run"
Open = Callable[..., Channel]


def podium_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("podium-"))


@pytest.fixture(params=["unix", "tcp"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Makes a new address to listen at."""
    numbers = itertools.count()
    return lambda: f"unix:{tmp_path}/{next(numbers)}" if request.param == "unix" else "tcp:127.0.0.1:0"


@pytest.fixture
def open_channel(place: Callable[[], str]) -> Iterator[Open]:
    """Opens channels and closes them at the end, after which no thread of theirs may be left."""
    opened: list[Channel] = []

    def open_one(rank: int, **options: Any) -> Channel:
        options = {"secret": SECRET, "listen": place(), "deadline_s": 20.0} | options
        opened.append(Channel(rank, **options))
        return opened[-1]

    yield open_one
    for channel in opened:
        channel.close()
    assert podium_threads() == []


@pytest.fixture
def two(open_channel: Open) -> tuple[Channel, Channel]:
    """Ranks 0 and 1, of which 0 knows the way."""
    left, right = open_channel(0), open_channel(1)
    left.introduce({1: right.address})
    return left, right


def serve(channel: Channel, answer: Callable[[Message], Any] = lambda m: m.body) -> threading.Thread:
    """Answers calls until a peer departs."""

    def run() -> None:
        while (message := channel.recv()).kind != DEPARTED:
            channel.reply(message, {"to": message.meta}, answer(message))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def knock(address: str) -> socket.socket:
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.removeprefix("unix:"))
    else:
        sock = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
    sock.settimeout(10)
    return sock


def intrude(address: str, rank: int, peer: int) -> socket.socket:
    """A connection that knows the secret, but then sends what it likes."""
    sock = knock(address)
    while prove(sock, rank, peer, SECRET, time.monotonic() + 10) != ACCEPTED:
        sock.close()
        sock = knock(address)
    sock.settimeout(10)
    return sock


def test_a_reply_lands_in_the_very_tensors_that_were_given(two: tuple[Channel, Channel]) -> None:
    left, right = two
    server = serve(right, lambda m: [t + 1 for t in m.body])
    into = [torch.zeros(3, 5), torch.zeros((), dtype=torch.int64)]
    places = [t.data_ptr() for t in into]
    (reply,) = left.wait([left.call(1, "add", {"step": 4}, [torch.ones(15), torch.tensor(6)], into)])
    assert (reply.source, reply.kind, reply.meta) == (1, "add", {"to": {"step": 4}})
    assert all(a is b for a, b in zip(reply.body, into, strict=True))
    assert [t.data_ptr() for t in into] == places
    assert torch.equal(into[0], torch.full((3, 5), 2.0)) and int(into[1]) == 7
    left.close()
    server.join()


def test_a_reply_without_tensors_leaves_the_given_ones_alone(two: tuple[Channel, Channel]) -> None:
    left, right = two
    server = serve(right, lambda m: ())
    into = [torch.full((2,), 5.0)]
    (reply,) = left.wait([left.call(1, "ask", {}, into=into)])
    assert reply.body == () and torch.equal(into[0], torch.full((2,), 5.0))
    left.close()
    server.join()


def test_a_reply_that_does_not_fit_ends_the_connection_with_a_reason(two: tuple[Channel, Channel]) -> None:
    left, right = two
    server = serve(right)
    handle = left.call(1, "echo", {}, [torch.zeros(3)], into=[torch.zeros(4)])
    with pytest.raises(Lost, match=r"rank 1 left .*offered"):
        left.wait([handle])
    assert "offered" in left.recv().meta["error"]
    server.join()


def test_into_must_be_able_to_take_bytes(two: tuple[Channel, Channel]) -> None:
    with pytest.raises(FrameError, match="contiguous"):
        two[0].call(1, "pull", {}, into=[torch.zeros(4)[::2]])


def test_replies_come_in_the_order_of_the_handles_however_they_arrive(two: tuple[Channel, Channel]) -> None:
    left, right = two
    handles = [left.call(1, "ask", {"n": n}) for n in range(3)]
    for message in reversed([right.recv() for _ in handles]):
        right.reply(message, {"n": message.meta["n"]})
    assert [m.meta["n"] for m in left.wait(handles)] == [0, 1, 2]
    assert all(h.done for h in handles)


def test_messages_of_every_size_keep_their_order(two: tuple[Channel, Channel]) -> None:
    left, right = two
    sizes = [1_000_000, 1, 0, 300_000, 5, 2_000_000, 3]
    handles = []
    for n, size in enumerate(sizes):
        if n % 3 == 2:
            left.send(1, "send", {"n": n}, [torch.full((size,), n)])
        else:
            handles.append(left.call(1, "call", {"n": n}, [torch.full((size,), n)]))
    for n, size in enumerate(sizes):
        message = right.recv()
        assert message.meta["n"] == n and torch.equal(message.body[0], torch.full((size,), n))
        if message.call:
            right.reply(message, {})
    assert len(left.wait(handles)) == len(handles)


def test_the_sink_decides_where_messages_land(open_channel: Open) -> None:
    owned = torch.zeros(8)
    right = open_channel(1, sink=lambda header: [owned] if header.kind == "push" else None)
    left = open_channel(0)
    left.introduce({1: right.address})
    left.send(1, "push", {}, [torch.arange(8.0)])
    left.send(1, "other", {}, [torch.ones(8)])
    assert right.recv().body[0] is owned and torch.equal(owned, torch.arange(8.0))
    assert right.recv().body[0] is not owned


def test_peers_that_call_each_other_at_once_share_one_connection(open_channel: Open) -> None:
    for _ in range(5):
        pair = [open_channel(0), open_channel(1)]
        addresses = {c.rank: c.address for c in pair}
        start = threading.Barrier(2)
        got: dict[int, Any] = {}

        def talk(me: Channel, start: threading.Barrier = start, got: dict[int, Any] = got) -> None:
            other = 1 - me.rank
            start.wait()
            handle = me.call(other, "hello", {"from": me.rank}, [torch.full((200_000,), me.rank)])
            message = me.recv()
            me.reply(message, {}, message.body)
            (got[me.rank],) = me.wait([handle])

        for channel in pair:
            channel.introduce(addresses)
        threads = [threading.Thread(target=talk, args=(c,)) for c in pair]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(got[r].body[0], torch.full((200_000,), r)) for r in (0, 1))
        assert [n for n in podium_threads() if "receive" in n] == ["podium-receive-0-1", "podium-receive-1-0"]
        for channel in pair:
            channel.close()


def test_all_pairs_connect_when_all_ranks_dial_at_once(open_channel: Open) -> None:
    channels = [open_channel(rank) for rank in range(5)]
    addresses = {c.rank: c.address for c in channels}
    threads = [threading.Thread(target=c.connect_all, args=(addresses,)) for c in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    receivers = [n for n in podium_threads() if "receive" in n]
    assert receivers == [f"podium-receive-{a}-{b}" for a in range(5) for b in range(5) if a != b]


def test_connecting_waits_for_a_peer_that_starts_late(open_channel: Open, tmp_path: Path) -> None:
    left, where = open_channel(0), f"unix:{tmp_path}/late"
    thread = threading.Thread(target=left.connect_all, args=({1: where},))
    thread.start()
    right = open_channel(1, listen=where)
    thread.join()
    left.send(1, "hello", {})
    assert right.recv().kind == "hello"


def test_many_threads_may_call_at_once(two: tuple[Channel, Channel]) -> None:
    left, right = two
    server = serve(right)
    wrong: list[int] = []

    def work(n: int) -> None:
        for size in (1, 100_000, 10):
            body = torch.full((size,), n)
            (reply,) = left.wait([left.call(1, "echo", {"n": n}, [body])])
            if reply.meta != {"to": {"n": n}} or not torch.equal(reply.body[0], body):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    left.close()
    server.join()


def test_bytes_are_counted_on_both_sides(two: tuple[Channel, Channel]) -> None:
    left, right = two
    server = serve(right, lambda m: [torch.zeros(10)])
    left.wait([left.call(1, "push", {}, [torch.zeros(1000), torch.zeros(3, dtype=torch.int8)])])
    assert (left.traffic.sent, left.traffic.received) == (4003, 40)
    assert left.wire.sent > 4003 and left.wire.received > 40
    left.close()
    server.join()
    assert (right.traffic.sent, right.traffic.received) == (40, 4003)
    assert (right.wire.sent, right.wire.received) == (left.wire.received, left.wire.sent)


def test_messages_that_are_no_longer_wanted_are_not_sent(open_channel: Open) -> None:
    may_read, reading, wanted = threading.Event(), threading.Event(), threading.Event()

    def sink(header: Any) -> None:
        reading.set()
        assert may_read.wait(20)

    left, right = open_channel(0), open_channel(1, sink=sink)
    left.introduce({1: right.address})
    wanted.set()
    outcomes: list[bool] = []
    for n in range(5):  # the first fills the connection, the others wait
        left.post(1, "part", {"n": n}, torch.zeros(4_000_000), outcomes.append, wanted=wanted.is_set)
    assert reading.wait(20)
    wanted.clear()
    left.post(1, "later", {}, None, outcomes.append)
    may_read.set()
    messages = [right.recv()]
    while messages[-1].kind != "later":
        messages.append(right.recv())
    assert [message.meta for message in messages] == [{"n": 0}, {}]
    until = time.monotonic() + 20
    while len(outcomes) < 6 and time.monotonic() < until:  # the sender's thread tells a moment later
        time.sleep(0.001)
    assert sorted(outcomes) == [False] * 4 + [True] * 2


# Leaving.


def _child(parent: str, listen: str) -> None:
    channel = Channel(1, secret=SECRET, listen=listen)
    channel.introduce({0: parent})
    for n in range(5):
        channel.send(0, "count", {"n": n}, [torch.full((50_000,), n)])
    channel.recv()  # the parent's call, which is never answered
    channel.send(0, "asked", {})
    signal.pause()


def test_a_killed_process_fails_its_calls_and_arrives_as_a_departure_in_order(
    open_channel: Open, place: Callable[[], str]
) -> None:
    channel = open_channel(0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    child = context.Process(target=_child, args=(channel.address, place()), daemon=True)
    child.start()
    assert child.pid is not None
    first = channel.recv(60)
    handle = channel.call(1, "never", {}, into=[torch.zeros(4)])
    messages = [first]
    while messages[-1].kind != "asked":
        messages.append(channel.recv())
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(Lost, match=r"rank 0: rank 1 left.*'never'"):
        channel.wait([handle])
    messages.append(channel.recv())
    child.join()
    assert [m.kind for m in messages] == ["count"] * 5 + ["asked", DEPARTED]
    assert [m.meta["n"] for m in messages[:5]] == list(range(5)) and messages[-1].source == 1


def test_the_departure_of_one_fails_a_wait_for_several_at_once(open_channel: Open) -> None:
    left, right, other = open_channel(0), open_channel(1), open_channel(2)
    left.introduce({1: right.address, 2: other.address})
    handles = [left.call(1, "slow", {}), left.call(2, "gone", {})]
    other.recv()
    other.close()
    with pytest.raises(Lost, match="rank 2"):
        left.wait(handles)
    right.reply(right.recv(), {"late": True})
    assert left.wait(handles[:1])[0].meta == {"late": True}


def test_what_was_sent_before_closing_is_received_before_the_departure(two: tuple[Channel, Channel]) -> None:
    left, right = two
    right.introduce({0: left.address})
    right.send(0, "unread", {}, [torch.zeros(1000)])
    for n in range(20):
        left.send(1, "last words", {"n": n}, [torch.zeros(200_000)])
    left.close()
    messages = [right.recv() for _ in range(21)]
    assert [m.meta.get("n") for m in messages[:20]] == list(range(20))
    assert messages[20] == Message(0, DEPARTED, {})


def test_a_peer_that_left_is_lost_and_one_that_comes_back_is_found(open_channel: Open, tmp_path: Path) -> None:
    where = f"unix:{tmp_path}/1"
    left, right = open_channel(0), open_channel(1, listen=where)
    left.introduce({1: where})
    left.send(1, "hello", {})
    assert right.recv().kind == "hello"
    right.close()
    assert left.recv().kind == DEPARTED
    with pytest.raises(Lost, match="rank 1"):
        left.call(1, "hello", {})
    again = open_channel(1, listen=where)
    left.send(1, "hello again", {})
    assert again.recv().kind == "hello again"


def test_a_peer_that_comes_back_gets_no_reply_to_an_old_call(open_channel: Open, tmp_path: Path) -> None:
    server, where = open_channel(0), f"unix:{tmp_path}/1"
    worker = open_channel(1, listen=where)
    worker.introduce({0: server.address})
    worker.call(0, "old", {})
    old = server.recv()
    worker.close()
    assert server.recv().kind == DEPARTED
    worker = open_channel(1, listen=where)
    worker.introduce({0: server.address})
    handle = worker.call(0, "new", {})
    new = server.recv()
    with pytest.raises(Lost, match="rank 1"):
        server.reply(old, {"which": "old"})
    server.reply(new, {"which": "new"})
    assert worker.wait([handle])[0].meta == {"which": "new"}


def test_a_call_is_answered_once_and_a_message_not_at_all(two: tuple[Channel, Channel]) -> None:
    left, right = two
    handle = left.call(1, "ask", {})
    left.send(1, "tell", {})
    asked, told = right.recv(), right.recv()
    with pytest.raises(FrameError, match="JSON"):
        right.reply(asked, {"not": object()})
    right.reply(asked, {})
    with pytest.raises(CommError, match="answered before"):
        right.reply(asked, {})
    with pytest.raises(CommError, match="expects no reply"):
        right.reply(told, {})
    left.wait([handle])


def test_an_unknown_rank_is_named(two: tuple[Channel, Channel]) -> None:
    with pytest.raises(CommError, match="rank 7"):
        two[0].send(7, "hello", {})


def test_closing_leaves_nothing_behind_and_may_be_repeated(place: Callable[[], str]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    left, right = (Channel(rank, secret=SECRET, listen=place()) for rank in (0, 1))
    right.connect_all({0: left.address})
    pending = left.call(1, "never", {}, [torch.zeros(100_000)])
    stranger = knock(left.address)
    left.close()
    left.close()
    with pytest.raises(Lost, match="this channel was closed"):
        left.wait([pending])
    for use in (left.recv, lambda: left.send(1, "late", {}), lambda: left.connect_all({1: right.address})):
        with pytest.raises(CommError, match="closed"):
            use()
    right.close()
    stranger.close()
    assert podium_threads() == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert not any(Path(c.address.removeprefix("unix:")).exists() for c in (left, right))


def test_closing_wakes_whoever_receives(two: tuple[Channel, Channel]) -> None:
    raised: list[CommError] = []

    def receive() -> None:
        try:
            two[0].recv()
        except CommError as error:
            raised.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    two[0].close()
    thread.join()
    assert "closed" in str(raised[0])


# Deadlines and limits.


def test_a_wait_past_its_deadline_says_for_whom_for_what_and_for_how_long(two: tuple[Channel, Channel]) -> None:
    left, right = two
    handle = left.call(1, "pull", {})
    with pytest.raises(DeadlineExceeded, match=r"rank 0: no reply for 0\.05 s from rank 1 \('pull'\)"):
        left.wait([handle], 0.05)
    right.reply(right.recv(), {"late": True})
    assert left.wait([handle])[0].meta == {"late": True}
    with pytest.raises(DeadlineExceeded, match=r"rank 0: no message from anyone for 0\.05 s"):
        left.recv(0.05)


def test_sending_to_one_who_does_not_read_ends_at_the_deadline(open_channel: Open) -> None:
    left, right = open_channel(0, deadline_s=0.3), open_channel(1, limits=Limits(inbox_messages=1))
    left.introduce({1: right.address})
    with pytest.raises(DeadlineExceeded, match=r"rank 0: sending to rank 1 made no progress for 0\.3 s"):
        for _ in range(100):
            left.send(1, "flood", {}, [torch.zeros(500_000)])
    departure = left.recv()
    assert departure.kind == DEPARTED and "0.3 s" in departure.meta["error"]


def test_a_call_to_one_who_does_not_read_returns_and_fails_in_wait(open_channel: Open) -> None:
    left, right = open_channel(0, deadline_s=0.3), open_channel(1, limits=Limits(inbox_messages=1))
    left.introduce({1: right.address})
    handles = [left.call(1, "flood", {}, [torch.zeros(2_000_000)]) for _ in range(12)]
    with pytest.raises(Lost, match=r"rank 1 left \(it took nothing for 0\.3 s\)"):
        left.wait(handles, 20)


def test_a_full_inbox_stops_the_sender_and_loses_nothing(open_channel: Open) -> None:
    left, right = open_channel(0), open_channel(1, limits=Limits(inbox_bytes=3_000_000))
    left.introduce({1: right.address})

    def flood() -> None:
        for n in range(40):
            left.send(1, "flood", {"n": n}, [torch.full((250_000,), n)])

    thread = threading.Thread(target=flood)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive() and right.traffic.received <= 3_000_000
    assert [right.recv().meta["n"] for _ in range(40)] == list(range(40))
    thread.join()


def test_a_message_larger_than_the_inbox_gets_in_alone(open_channel: Open) -> None:
    left, right = open_channel(0), open_channel(1, limits=Limits(inbox_bytes=1000))
    left.introduce({1: right.address})
    left.send(1, "small", {}, [torch.zeros(10)])
    left.call(1, "large", {}, [torch.zeros(1_000_000)])
    assert [right.recv().kind, right.recv().kind] == ["small", "large"]


# Strangers and liars.


def test_a_wrong_secret_is_refused_while_the_right_one_works(open_channel: Open) -> None:
    server, stranger, worker = open_channel(0), open_channel(1, secret=b"another"), open_channel(2)
    for channel in (stranger, worker):
        channel.introduce({0: server.address})
    with pytest.raises(Refused, match="rank 1: rank 0 refused"):
        stranger.send(0, "let me in", {})
    worker.send(0, "hello", {})
    assert server.recv().source == 2


def test_a_dialler_notices_a_listener_without_the_secret(open_channel: Open) -> None:
    worker = open_channel(1)
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def pretend() -> None:
            sock, _ = fake.accept()
            with sock:
                sock.sendall(b"PODM\0\1" + bytes(32))
                sock.recv(4096)
                sock.sendall(bytes([ACCEPTED]) + bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        worker.introduce({0: f"tcp:127.0.0.1:{fake.getsockname()[1]}"})
        with pytest.raises(Refused, match="does not hold this run's secret"):
            worker.send(0, "hello", {})
        thread.join()


def test_a_rank_is_not_taken_for_another(open_channel: Open) -> None:
    server, worker = open_channel(0), open_channel(1)
    worker.introduce({5: server.address})
    with pytest.raises(Refused):
        worker.send(5, "hello", {})


def test_a_crowd_that_says_nothing_keeps_nobody_out(two: tuple[Channel, Channel]) -> None:
    left, right = two
    crowd = [knock(right.address) for _ in range(200)]
    left.send(1, "hello", {})
    assert right.recv().kind == "hello"
    assert sum("admit" in name for name in podium_threads()) <= 80
    for sock in crowd:
        sock.close()


LIES = {
    "garbage": b"GET / HTTP/1.1\r\n\r\n" * 4,
    "another's name": b"".join(encode_frame("push", 3, 0, {})),
    "a forged departure": b"".join(encode_frame(DEPARTED, 9, 0, {})),
    "an unasked reply": b"".join(encode_frame("push", 9, -1, {})),
    "too large": b"".join(encode_frame("push", 9, 0, {}, [torch.zeros(5000)])),
    "half a frame": b"".join(encode_frame("push", 9, 0, {}, [torch.zeros(50)]))[:-3],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_malformed_frame_costs_its_sender_the_connection_and_nobody_else(open_channel: Open, lie: str) -> None:
    server, worker = open_channel(0, limits=Limits(body_bytes=10_000)), open_channel(1)
    worker.introduce({0: server.address})
    worker.send(0, "before", {})
    assert server.recv().kind == "before"
    with intrude(server.address, 9, 0) as liar:
        liar.sendall(b"".join(encode_frame("honest", 9, 0, {})) + LIES[lie])
        with contextlib.suppress(OSError):  # it may have been shown the door already
            liar.shutdown(socket.SHUT_WR)
        assert server.recv() == Message(9, "honest", {})
        departure = server.recv()
        assert (departure.source, departure.kind) == (9, DEPARTED) and departure.meta["error"]
    handle = worker.call(0, "after", {})
    server.reply(server.recv(), {})
    worker.wait([handle])


def test_a_message_cut_short_gives_its_room_back(open_channel: Open) -> None:
    server, worker = open_channel(0, limits=Limits(inbox_messages=1)), open_channel(1)
    with intrude(server.address, 9, 0) as liar:
        liar.sendall(LIES["half a frame"])
    assert server.recv().kind == DEPARTED
    worker.introduce({0: server.address})
    for n in range(3):
        worker.send(0, "hello", {"n": n})
    assert [server.recv().meta for _ in range(3)] == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_random_bytes_at_the_door_and_inside_harm_nobody(open_channel: Open) -> None:
    server, worker = open_channel(0), open_channel(1)
    worker.introduce({0: server.address})
    valid = b"".join(encode_frame("push", 9, 0, {"step": 1}, [torch.zeros(4)]))

    @settings(max_examples=40, deadline=None)
    @given(st.binary(max_size=120), st.integers(0, len(valid) * 8 - 1))
    def fuzz(noise: bytes, bit: int) -> None:
        with knock(server.address) as stranger:
            stranger.sendall(noise)
        damaged = bytearray(valid)
        damaged[bit // 8] ^= 1 << bit % 8
        with intrude(server.address, 9, 0) as liar:
            liar.sendall(bytes(damaged) + noise)
        while (message := server.recv()).kind != DEPARTED:
            assert message.source == 9
        worker.send(0, "hello", {})
        assert server.recv().source == 1

    fuzz()


# Addresses.


def test_what_cannot_be_listened_at_is_refused_with_a_reason(tmp_path: Path) -> None:
    def refuse(listen: str, what: str, secret: bytes = SECRET) -> None:
        with pytest.raises(ConfigError, match=what):
            Channel(0, secret=secret, listen=listen)

    refuse(f"unix:{tmp_path}/{'x' * 120}", "at most 107 bytes")
    refuse("unix:", "must be unix:/path or tcp:host:port")
    refuse("udp:127.0.0.1:0", "must be unix:/path or tcp:host:port")
    refuse("tcp:127.0.0.1:70000", "must be unix:/path or tcp:host:port")
    refuse("tcp:0.0.0.0:0", "a secret is needed", secret=b"")
    refuse(f"unix:{tmp_path}/none/s", "cannot listen at")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refuse(f"tcp:127.0.0.1:{taken.getsockname()[1]}", "cannot listen at .*in use")
    with pytest.raises(ConfigError, match="deadline_s must be above 0"):
        Channel(0, secret=SECRET, listen="tcp:127.0.0.1:0", deadline_s=0)
    assert podium_threads() == []


def test_a_unix_socket_is_for_its_user_only(open_channel: Open, tmp_path: Path) -> None:
    open_channel(0, listen=f"unix:{tmp_path}/s", secret=b"")
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600


def test_a_free_port_is_found_and_told(open_channel: Open) -> None:
    channel = open_channel(0, listen="tcp:localhost:0", secret=b"")
    assert int(channel.address.rpartition(":")[2]) > 0


@pytest.mark.parametrize("let_go", [False, True])
def test_a_folder_that_is_removed_is_made_again_unless_the_name_was_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, let_go: bool
) -> None:
    monkeypatch.setattr("podium.comm.real.listener._HEAL_S", 0.02)
    folder = tmp_path / "meet"
    folder.mkdir(mode=0o700)
    channel = Channel(0, secret=SECRET, listen=f"unix:{folder}/0", deadline_s=20.0)
    looked = threading.Event()
    heal = channel._listener._heal

    def look() -> None:
        heal()
        looked.set()

    monkeypatch.setattr(channel._listener, "_heal", look)
    try:
        if let_go:
            channel.let_name_go()
        (folder / "0").unlink()
        folder.rmdir()
        looked.clear()
        assert looked.wait(10.0)
        looked.clear()
        assert looked.wait(10.0)  # a whole look after the removal
        assert folder.exists() is not let_go
    finally:
        channel.close()


@pytest.mark.parametrize("listen", ["unix", "tcp"])
def test_a_channel_that_closes_does_not_wait_until_it_would_look_after_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listen: str
) -> None:
    monkeypatch.setattr("podium.comm.real.listener._HEAL_S", 3600.0)
    where = f"unix:{tmp_path}/0" if listen == "unix" else "tcp:127.0.0.1:0"
    channel = Channel(0, secret=SECRET, listen=where, deadline_s=20.0)
    before = len(os.listdir("/proc/self/fd"))
    channel.close()
    assert not channel._listener._acceptor.is_alive()
    assert len(os.listdir("/proc/self/fd")) < before
