"""Endpoints that listen at a Unix socket and at a TCP port: ranks of one host take the one, all others the other."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.comm.real.arena import Arena
from podium.comm.real.channel import Channel
from podium.comm.real.sockets import BothWays, address_from
from podium.comm.real.tls import Tls, TlsStream
from podium.errors import ConfigError
from podium.testing import Hosts, make_hosts
from tests.comm.real.test_channel import (  # noqa: F401  # part of the channel's contract; pytest collects it from here
    SECRET,
    Open,
    knock,
    podium_threads,
    serve,
    test_a_crowd_that_says_nothing_keeps_nobody_out,
    test_a_reply_lands_in_the_very_tensors_that_were_given,
    test_a_wrong_secret_is_refused_while_the_right_one_works,
    test_all_pairs_connect_when_all_ranks_dial_at_once,
    test_messages_of_every_size_keep_their_order,
    test_peers_that_call_each_other_at_once_share_one_connection,
    test_what_was_sent_before_closing_is_received_before_the_departure,
    two,
)

__all__ = ["make_hosts"]  # the fixture
LARGE = 1_000_000
"""Elements of a tensor, of four bytes each."""


@pytest.fixture(params=["one host", "two hosts"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Makes a new address of both ways."""
    numbers = itertools.count()

    def make() -> str:
        n = next(numbers)
        return f"host:{'same' if request.param == 'one host' else n};unix:{tmp_path}/{n};tcp:127.0.0.1:0"

    return make


@pytest.fixture
def open_channel(place: Callable[[], str]) -> Iterator[Open]:
    """Opens channels and closes them at the end, after which no thread of theirs may be left."""
    opened: list[Channel] = []

    def open_one(rank: int, **options: Any) -> Channel:
        options = {"secret": SECRET, "listen": place(), "deadline_s": 20.0, "arena": Arena()} | options
        opened.append(Channel(rank, **options))
        return opened[-1]

    yield open_one
    for channel in opened:
        channel.close()
    assert podium_threads() == []


@pytest.mark.parametrize(
    "address",
    [
        "host:",
        "host:a",
        "host:a;unix:/tmp/x",
        "host:a;tcp:127.0.0.1:1;unix:/tmp/x",
        "host:a;unix:/tmp/x;tcp:127.0.0.1:1;unix:/tmp/y",
        "host:;unix:/tmp/x;tcp:127.0.0.1:1",
        "host:a b;unix:/tmp/x;tcp:127.0.0.1:1",
        f"host:{'a' * 65};unix:/tmp/x;tcp:127.0.0.1:1",
    ],
)
def test_addresses_of_another_form_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="must be host:ID;unix:/path;tcp:host:port"):
        BothWays.of(address)


def test_an_address_is_resolved_by_the_host_of_the_one_who_dials() -> None:
    address = "host:a;unix:/tmp/x;tcp:10.0.0.1:4000"
    assert address_from("a", address) == "unix:/tmp/x"
    assert address_from("b", address) == address_from("", address) == "tcp:10.0.0.1:4000"
    assert [address_from("a", plain) for plain in ("unix:/y", "tcp:10.0.0.2:1")] == ["unix:/y", "tcp:10.0.0.2:1"]
    assert str(BothWays.of(address)) == address


def test_what_goes_to_a_rank_of_the_same_host_is_shared_and_what_goes_to_another_is_sent(tmp_path: Path) -> None:
    hosts, arenas = ["here", "here", "there"], [Arena() for _ in range(3)]
    ends = [
        Channel(rank, secret=SECRET, listen=f"host:{host};unix:{tmp_path}/{rank};tcp:127.0.0.1:0", arena=arenas[rank])
        for rank, host in enumerate(hosts)
    ]
    servers = [serve(end) for end in ends[1:]]
    try:
        ends[0].connect_all({rank: end.address for rank, end in enumerate(ends) if rank})
        families = {rank: ends[0]._links[rank].sock.family for rank in (1, 2)}
        assert families == {1: socket.AF_UNIX, 2: socket.AF_INET}
        sent = {rank: bytes_to_ask(ends[0], rank, arenas[0]) for rank in (1, 2)}
        assert sent[1] < 10_000 and sent[2] > 4 * LARGE
        assert [ends[0].maps(rank) for rank in (1, 2)] == [True, False]
    finally:
        ends[0].close()  # whose departure ends the servers; a channel that is closed under a server is an error there
        for server in servers:
            server.join()
        for end in ends[1:]:
            end.close()


def bytes_to_ask(channel: Channel, to: int, arena: Arena) -> int:
    """Bytes that a call with a large tensor writes to the socket, once both ends have agreed on how."""
    body = arena.allocate(LARGE, torch.float32).fill_(1.0)
    for _ in range(2):  # the peer's word that it can map our memory comes by the first answer
        before = channel.wire.sent
        (answer,) = channel.wait([channel.call(to, "echo", {}, [body])])
        assert torch.equal(answer.body[0], body)
    return channel.wire.sent - before


def test_endpoints_of_plain_addresses_are_reached_as_before(tmp_path: Path) -> None:
    both = Channel(0, secret=SECRET, listen=f"host:a;unix:{tmp_path}/0;tcp:127.0.0.1:0")
    plain = [
        Channel(1, secret=SECRET, listen=f"unix:{tmp_path}/1"),
        Channel(2, secret=SECRET, listen="tcp:127.0.0.1:0"),
    ]
    servers = [serve(end) for end in plain]
    try:
        for end in plain:
            both.introduce({end.rank: end.address})
            assert both.wait([both.call(end.rank, "hello", {})])[0].source == end.rank
    finally:
        both.close()
        for server in servers:
            server.join()
        for end in plain:
            end.close()


def test_a_socket_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    listening = Channel(0, secret=SECRET, listen=f"host:a;unix:{tmp_path}/0;tcp:127.0.0.1:0")
    dialling = Channel(1, secret=SECRET, listen=f"host:a;unix:{tmp_path}/1;tcp:127.0.0.1:0")
    try:
        (tmp_path / "0").unlink()
        server = serve(listening)
        dialling.introduce({0: listening.address})
        assert dialling.wait([dialling.call(0, "hello", {})])[0].source == 0
        assert dialling._links[0].sock.family == socket.AF_UNIX
    finally:
        dialling.close()
        server.join()
        listening.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(find_spec("cryptography") is None, reason="needs cryptography (podium[tls])")
def test_only_what_leaves_the_host_goes_over_tls(tmp_path: Path) -> None:
    from podium.cli.certs import make_certificates

    made = make_certificates(tmp_path / "keys")
    tls = Tls(made["tls_cert"], made["tls_key"], made["tls_ca"])
    ends = [
        Channel(rank, secret=SECRET, listen=f"host:{host};unix:{tmp_path}/{rank};tcp:127.0.0.1:0", tls=tls)
        for rank, host in enumerate(["here", "here", "there"])
    ]
    try:
        ends[0].connect_all({rank: end.address for rank, end in enumerate(ends) if rank})
        assert [isinstance(ends[0]._links[rank].sock, TlsStream) for rank in (1, 2)] == [False, True]
    finally:
        for end in ends:
            end.close()


# On hosts that share nothing.

SCRIPT = str(Path(__file__).with_name("rank_on_host.py"))


def start_ranks(hosts: Hosts, per_host: int) -> list[subprocess.Popen[str]]:
    places = [host for host in hosts for _ in range(per_host)]
    words = [json.dumps([n, len(places), host.name, host.address, hosts[0].address]) for n, host in enumerate(places)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return [host.start(sys.executable, SCRIPT, word, **pipes) for host, word in zip(places, words, strict=True)]


def ask(ranks: list[subprocess.Popen[str]], what: str, *details: Any) -> None:
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(json.dumps([what, *details]) + "\n")
        rank.stdin.flush()


def answers(ranks: list[subprocess.Popen[str]]) -> list[Any]:
    lines = [rank.stdout.readline() for rank in ranks if rank.stdout is not None]
    return [json.loads(line) for line in lines]


@pytest.mark.root
def test_members_of_a_host_share_memory_and_hosts_exchange_sums_in_rank_order(make_hosts: Callable[..., Hosts]) -> None:
    ranks = start_ranks(make_hosts(2), per_host=2)
    ask(ranks, "hosts")
    assert answers(ranks) == [[[0, 1], [2, 3]]] * 4
    want = torch.zeros(LARGE)
    for rank in range(4):
        want += torch.randn(LARGE, generator=torch.Generator().manual_seed(rank))
    ask(ranks, "sum", LARGE)
    found = answers(ranks)
    assert {row["bits"] for row in found} == {int(want.view(torch.int32).to(torch.int64).sum())}
    # Each host's two ranks together send the sum of their tensors once, and nothing more leaves the host.
    for host in (found[:2], found[2:]):
        assert 4 * LARGE < sum(row["sent"] for row in host) < 4.2 * LARGE


@pytest.mark.root
@pytest.mark.slow
def test_who_waits_for_a_lost_host_gives_up_at_once_when_told_and_goes_on(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2)
    ranks = start_ranks(hosts, per_host=2)
    here = ranks[:2]
    ask(here, "wait for a sum that the others never issue", 20 * LARGE)
    assert answers(here) == ["issued"] * 2
    hosts[1].lose()
    ask(here, "abandon")  # on another thread than the one that waits
    assert [answer["lost"] for answer in answers(here)] == [True] * 2
    ask(here, "regroup", 1, [0, 1])
    for row in answers(here):
        assert row["hosts"] == [[0, 1]]
        assert row["took_s"] < 5
    ask(here, "sum", LARGE)
    assert len({row["bits"] for row in answers(here)}) == 1
