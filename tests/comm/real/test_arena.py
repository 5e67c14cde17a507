"""Shared memory: real processes that find one another's tensors, and nothing else."""

from __future__ import annotations

import contextlib
import fcntl
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from podium.comm.base import DEPARTED, Message
from podium.comm.real import frames
from podium.comm.real.arena import Arena, Neighbour, Place
from podium.comm.real.channel import Channel
from podium.errors import Lost

SECRET = b"of this run"
START_S = 60.0
LARGE = 100_000
"""Elements: enough that their bytes cannot hide in a header."""
Start = Callable[..., tuple[int, Connection]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process with a pipe to it, and ends it after the test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with contextlib.ExitStack() as at_end:

        def one(main: Callable[..., None], *args: Any) -> tuple[int, Connection]:
            mine, theirs = context.Pipe()
            child = context.Process(target=main, args=(theirs, *args), daemon=True)
            child.start()
            theirs.close()
            at_end.callback(child.join, 10)
            at_end.callback(child.kill)
            at_end.callback(mine.close)
            assert child.pid is not None
            return child.pid, mine

        yield one


def hear(pipe: Connection) -> Any:
    assert pipe.poll(START_S), "the other process says nothing"
    return pipe.recv()


# Places.


def owner(pipe: Connection) -> None:
    """Has two tensors in its arena; says where, and later what is in them."""
    arena = Arena()
    first, second = arena.allocate(1000, torch.float32), arena.allocate(7, torch.int64)
    first.copy_(torch.arange(1000))
    second.fill_(3)
    unsealed = os.memfd_create("podium-arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    strange = {"unsealed": (unsealed, os.fstat(unsealed).st_ino)}
    with open(__file__) as plain:
        strange["file"] = (plain.fileno(), os.fstat(plain.fileno()).st_ino)
        places = [arena.locate(t) for t in (first, second, first[10:20].view(2, 5))]
        pipe.send((places, strange))
        while pipe.poll(START_S) and pipe.recv() == "what is there":
            pipe.send((first.tolist(), second.tolist()))


def test_a_tensor_is_found_and_written_to_from_another_process(start: Start) -> None:
    pid, pipe = start(owner)
    (first, second, part), _ = hear(pipe)
    neighbour = Neighbour(pid)
    mine = neighbour.attach(first, torch.float32, (1000,))
    assert mine.tolist() == list(range(1000))
    assert neighbour.attach(second, torch.int64, (7,)).tolist() == [3] * 7
    assert neighbour.attach(part, torch.float32, (2, 5)).tolist() == [[*range(10, 15)], [*range(15, 20)]]
    mine[0], neighbour.attach(part, torch.float32, (10,))[0] = -5.0, -6.0
    pipe.send("what is there")
    values, _ = hear(pipe)
    assert values[:11] == [-5.0, *range(1, 10), -6.0]


def test_the_memory_of_a_killed_owner_stays_readable(start: Start) -> None:
    pid, pipe = start(owner)
    (first, second, _), _ = hear(pipe)
    neighbour = Neighbour(pid)
    mine = neighbour.attach(first, torch.float32, (1000,))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EOFError):
        hear(pipe)
    mine[1] = 9.0
    assert mine.tolist() == [0.0, 9.0, *range(2, 1000)]
    assert neighbour.attach(first, torch.float32, (2,)).tolist() == [0.0, 9.0]
    gone_by = time.monotonic() + START_S
    while os.path.exists(f"/proc/{pid}/fd/{second.file}") and time.monotonic() < gone_by:
        time.sleep(0.01)
    with pytest.raises(OSError):
        neighbour.attach(second, torch.int64, (7,))


def test_a_place_where_nothing_lies_is_refused(start: Start) -> None:
    pid, pipe = start(owner)
    (first, second, _), strange = hear(pipe)
    refused: dict[str, tuple[Place, tuple[int, ...]]] = {
        "another inode": (first._replace(inode=first.inode + 1), (1000,)),
        "another segment's inode": (first._replace(inode=second.inode), (1000,)),
        "no such file": (first._replace(file=9999), (1000,)),
        "a pipe or a socket": (first._replace(file=0), (1000,)),
        "a file on disk": (first._replace(file=strange["file"][0], inode=strange["file"][1]), (1,)),
        "not sealed": (first._replace(file=strange["unsealed"][0], inode=strange["unsealed"][1]), (1,)),
        "before the beginning": (first._replace(offset=-4), (1,)),
        "between two elements": (first._replace(offset=2), (1,)),
        "past the end": (first._replace(offset=first.offset + 4), (1 << 20,)),
        "far past the end": (first._replace(offset=1 << 62), (1,)),
        "more than there is": (first, (1 << 40, 1 << 40)),
    }
    for neighbour in (Neighbour(pid), Neighbour(pid)):
        for what, (place, shape) in refused.items():
            with pytest.raises((OSError, ValueError)):
                neighbour.attach(place, torch.float32, shape)
                pytest.fail(what)
        assert neighbour.attach(first, torch.float32, (1000,)).tolist() == list(range(1000)), "and nothing was spoilt"


def test_a_segment_neither_shrinks_nor_grows_for_anyone() -> None:
    arena = Arena()
    tensor = arena.allocate(5000, torch.float64)
    place = arena.locate(tensor)
    assert place is not None
    theirs = os.open(f"/proc/{os.getpid()}/fd/{place.file}", os.O_RDWR)
    for file in (place.file, theirs):
        for size in (0, 4096, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(file, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(theirs)
    assert tensor.tolist() == [0.0] * 5000


def test_tensors_that_lie_elsewhere_are_not_located() -> None:
    arena = Arena()
    assert arena.locate(torch.zeros(3)) is None, "there is no segment yet"
    inside, after = arena.allocate(600, torch.float32), arena.allocate(600, torch.float32)
    assert arena.locate(inside) != arena.locate(after)
    for elsewhere in (
        torch.zeros(600),
        inside.clone(),
        inside + 0,
        inside.view(20, 30).t(),
        inside[::2],
        inside[:1].expand(4),
        torch.eye(3).to_sparse(),
        torch.zeros(3, device="meta"),
        torch.zeros(0),
    ):
        assert arena.locate(elsewhere) is None
    assert Arena().locate(inside) is None, "it is another arena's"


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.sampled_from([torch.float32, torch.float64, torch.bool])), max_size=5),
    st.data(),
)
def test_any_stretch_of_any_segment_is_found_where_it_lies(kinds: list[Any], data: st.DataObject) -> None:
    arena = Arena()
    whole = [arena.allocate(numel, dtype) for numel, dtype in kinds]
    neighbour = Neighbour(os.getpid())
    for n, tensor in enumerate(whole):
        assert not tensor.any(), "they begin as zeros"
        tensor.copy_(torch.arange(len(tensor)) % 100 + n)
    for tensor in whole:
        start = data.draw(st.integers(0, len(tensor) - 1))
        part = tensor[start : data.draw(st.integers(start + 1, len(tensor)))]
        place = arena.locate(part)
        assert place is not None
        assert torch.equal(neighbour.attach(place, part.dtype, tuple(part.shape)), part)


def test_a_segment_goes_with_its_last_tensor_and_its_address_may_be_used_again() -> None:
    arena, before = Arena(), len(os.listdir("/proc/self/fd"))
    part = arena.allocate(5000, torch.float32)[10:20]
    assert arena.locate(part) is not None, "a part of it keeps it"
    del part
    assert len(os.listdir("/proc/self/fd")) == before
    for n in range(50):
        tensor = arena.allocate(4096, torch.uint8).fill_(n)
        place = arena.locate(tensor)
        assert place is not None
        assert Neighbour(os.getpid()).attach(place, torch.uint8, (1,)).tolist() == [n]
        del tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.bfloat16])
def test_nothing_is_allocated_for_nothing(dtype: torch.dtype) -> None:
    arena = Arena()
    empty = arena.allocate(0, dtype)
    assert (empty.dtype, empty.numel(), arena.locate(empty)) == (dtype, 0, None)


# Channels.


def answers(pipe: Connection, listen: str, with_arena: bool) -> None:
    """Answers calls with their body, doubled; asks in its turn when told to."""
    arena = Arena() if with_arena else None
    channel = Channel(1, secret=SECRET, listen=listen, deadline_s=START_S, arena=arena)
    pipe.send(channel.address)
    while (message := channel.recv()).kind != DEPARTED:
        if message.kind == "ask me":
            ask_back(channel)
        elif message.kind == "in place" and message.landing is not None:
            for theirs, place in zip(message.body, message.landing, strict=True):
                torch.mul(theirs, 2, out=place)
            channel.reply(message, {"landed": True}, message.landing)
        elif message.kind == "shape":
            numbers = torch.arange(math.prod(message.meta["shape"]), dtype=frames.DTYPES[message.meta["dtype"]])
            channel.reply(message, {}, [numbers.view(message.meta["shape"])])
        else:
            doubled = [t * 2 for t in message.body]
            channel.reply(message, {"landed": message.landing is not None}, doubled)
    channel.close()


def ask_back(channel: Channel) -> None:
    body, into = (channel.arena.allocate(LARGE, torch.float32) if channel.arena else torch.zeros(LARGE) for _ in "ab")
    body.fill_(1.5)
    moved = channel.traffic.sent, channel.traffic.received
    channel.wait([channel.call(0, "treble", {}, [body], [into])])
    sent, received = channel.traffic.sent - moved[0], channel.traffic.received - moved[1]
    channel.send(0, "asked", {"all": into.tolist() == [4.5] * LARGE, "sent": sent, "received": received})


@pytest.fixture
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Channel]:
    """Rank 0, with an arena; by Unix socket unless the test says otherwise."""
    family = getattr(request, "param", "unix")
    listen = "tcp:127.0.0.1:0" if family == "tcp" else f"unix:{tmp_path}/0"
    channel = Channel(0, secret=SECRET, listen=listen, deadline_s=START_S, arena=Arena())
    yield channel
    channel.close()


@pytest.fixture
def meet(start: Start, here: Channel, tmp_path: Path) -> Callable[..., int]:
    """Starts rank 1 and calls it until it is known whether memory is shared; its process."""

    def one(with_arena: bool = True) -> int:
        unix = here.address.startswith("unix:")
        pid, pipe = start(answers, f"unix:{tmp_path}/1" if unix else "tcp:127.0.0.1:0", with_arena)
        here.introduce({1: hear(pipe)})
        into, until = in_arena(here, torch.zeros(4)), time.monotonic() + START_S
        while unix and not ask(here, "double", [torch.ones(4)], [into]).meta["landed"]:
            assert time.monotonic() < until, "they never come to share memory"
        if not unix:
            ask(here, "double", [torch.ones(4)], [into])
        return pid

    return one


def in_arena(channel: Channel, tensor: Tensor) -> Tensor:
    assert channel.arena is not None
    kept = channel.arena.allocate(tensor.numel(), tensor.dtype).view(tensor.shape)
    return kept.copy_(tensor)


def ask(channel: Channel, kind: str, body: list[Tensor], into: list[Tensor] | None) -> Message:
    return channel.wait([channel.call(1, kind, {}, body, into)])[0]


class Moved:
    """What went over the wire meanwhile, in bytes: of tensors, and in all."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._before = channel, self._now(channel)

    @staticmethod
    def _now(channel: Channel) -> tuple[int, ...]:
        wire, traffic = channel.wire, channel.traffic
        return traffic.sent, traffic.received, wire.sent, wire.received

    def __call__(self) -> tuple[int, ...]:
        # A writer counts when its write is done, which the answer may outrun: look until nothing changes any more.
        seen, deadline = self._now(self._channel), time.monotonic() + 5
        while time.monotonic() < deadline:
            time.sleep(0.05)
            before, seen = seen, self._now(self._channel)
            if seen == before:
                break
        return tuple(now - before for now, before in zip(seen, self._before, strict=True))


@pytest.mark.parametrize("kind", ["double", "in place"])
@pytest.mark.parametrize("with_arena", [True, False])
def test_between_neighbours_no_tensor_goes_over_the_wire(
    here: Channel, meet: Callable[..., int], kind: str, with_arena: bool
) -> None:
    """Whether or not the other side has an arena of its own."""
    meet(with_arena)
    body = [in_arena(here, torch.arange(LARGE) * 1.0), in_arena(here, torch.tensor([7, -2]))]
    into = [in_arena(here, torch.zeros(LARGE)), in_arena(here, torch.tensor([0, 0]))]
    moved = Moved(here)
    for n in range(3):
        body[0] += n
        answer = ask(here, kind, body, into)
        assert answer.meta["landed"]
        assert all(got is mine for got, mine in zip(answer.body, into, strict=True))
        assert torch.equal(into[0], body[0] * 2)
        assert into[1].tolist() == [14, -4]
    tensors_sent, tensors_received, sent, received = moved()
    assert (tensors_sent, tensors_received) == (0, 0)
    assert max(sent, received) < 4096


@pytest.mark.parametrize("here", ["tcp"], indirect=True)
def test_where_no_memory_is_shared_bytes_are_sent(here: Channel, meet: Callable[..., int]) -> None:
    meet()
    body, into = in_arena(here, torch.arange(LARGE) * 1.0), in_arena(here, torch.zeros(LARGE))
    moved = Moved(here)
    assert not ask(here, "double", [body], [into]).meta["landed"]
    assert torch.equal(into, body * 2)
    assert moved()[:2] == (4 * LARGE, 4 * LARGE)


@pytest.mark.parametrize("body_inside", [True, False])
@pytest.mark.parametrize("into_inside", ["all", "some", "none", "not asked for"])
def test_only_what_lies_inside_is_spared_the_way(
    here: Channel, meet: Callable[..., int], body_inside: bool, into_inside: str
) -> None:
    meet()
    first, second = torch.arange(LARGE) * 1.0, torch.arange(300) * 3.0
    body = [in_arena(here, first) if body_inside else first, second]
    into: list[Tensor] | None = [torch.zeros(LARGE), torch.zeros(300)]
    if into_inside == "not asked for":
        into = None
    elif into_inside != "none":
        into = [in_arena(here, t) if n == 0 or into_inside == "all" else t for n, t in enumerate(into or ())]
    moved = Moved(here)
    answer = ask(here, "double", body, into)
    assert torch.equal(answer.body[0], first * 2) and torch.equal(answer.body[1], second * 2)
    assert answer.meta["landed"] == (into_inside == "all")
    sent, received = moved()[:2]
    assert sent == 4 * 300 + (0 if body_inside else 4 * LARGE)
    assert received == (0 if into_inside == "all" else 4 * (LARGE + 300))


@pytest.mark.parametrize("here", ["tcp", "unix"], indirect=True)
def test_a_reply_may_differ_in_shape_from_where_it_lands(here: Channel, meet: Callable[..., int]) -> None:
    meet()
    into = in_arena(here, torch.zeros(6))
    here.wait([here.call(1, "shape", {"shape": [2, 3], "dtype": "float32"}, [], [into])])
    assert into.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("here", ["tcp", "unix"], indirect=True)
@pytest.mark.parametrize(("shape", "dtype"), [([1], "float32"), ([6], "float64")])
def test_a_reply_that_does_not_fit_ends_the_connection(
    here: Channel, meet: Callable[..., int], shape: list[int], dtype: str
) -> None:
    meet()
    call = here.call(1, "shape", {"shape": shape, "dtype": dtype}, [], [in_arena(here, torch.zeros(6))])
    with pytest.raises(Lost, match="was offered for it"):
        here.wait([call])


def test_it_works_in_both_directions(here: Channel, meet: Callable[..., int]) -> None:
    """The one that was called finds the caller's memory, whoever dialled."""
    meet()
    until, shared = time.monotonic() + START_S, False
    while not shared:
        assert time.monotonic() < until, "they never come to share memory"
        here.send(1, "ask me", {})
        message = here.recv()
        assert message.body[0].tolist() == [1.5] * LARGE
        shared = message.landing is not None
        here.reply(message, {}, [message.body[0] * 3])
        facts = here.recv().meta
        assert facts["all"]
        assert (facts["sent"], facts["received"]) == ((0, 0) if shared else (4 * LARGE, 4 * LARGE))


def test_a_caller_that_is_killed_leaves_its_call_readable(here: Channel, meet: Callable[..., int]) -> None:
    pid = meet()
    here.send(1, "ask me", {})
    message = here.recv()
    os.kill(pid, signal.SIGKILL)
    assert here.recv().kind == DEPARTED
    assert message.body[0].tolist() == [1.5] * LARGE
    with pytest.raises(Lost):
        here.reply(message, {}, [message.body[0] * 3])
