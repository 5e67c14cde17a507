"""TLS between ranks: the channel keeps its promises over it, and who has no certificate of the run stays outside."""

from __future__ import annotations

import os
import random
import socket
import ssl
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.cli.certs import make_certificates
from podium.comm.base import DEPARTED, Message
from podium.comm.clocks import WallClock
from podium.comm.real.channel import Channel
from podium.comm.real.frames import ACCEPTED, Limits, Refused, encode_frame, prove, read_frame, write_frame
from podium.comm.real.tls import Guard, Tls, TlsStream, tls_of
from podium.config import RunConfig, build
from podium.errors import ConfigError, DeadlineExceeded, MissingExtra
from podium.launch.coordination.coordinator import Coordinator
from podium.launch.coordination.rules import COORDINATOR, Rules
from podium.launch.membership import Membership
from podium.records.recorder import Recorder
from tests.comm.real.test_channel import (  # noqa: F401  # the channel's contract, over TLS; pytest collects it from here
    LIES,
    SECRET,
    Open,
    knock,
    podium_threads,
    test_a_call_to_one_who_does_not_read_returns_and_fails_in_wait,
    test_a_crowd_that_says_nothing_keeps_nobody_out,
    test_a_full_inbox_stops_the_sender_and_loses_nothing,
    test_a_message_larger_than_the_inbox_gets_in_alone,
    test_a_rank_is_not_taken_for_another,
    test_a_reply_lands_in_the_very_tensors_that_were_given,
    test_a_reply_that_does_not_fit_ends_the_connection_with_a_reason,
    test_a_wait_past_its_deadline_says_for_whom_for_what_and_for_how_long,
    test_a_wrong_secret_is_refused_while_the_right_one_works,
    test_all_pairs_connect_when_all_ranks_dial_at_once,
    test_bytes_are_counted_on_both_sides,
    test_closing_wakes_whoever_receives,
    test_many_threads_may_call_at_once,
    test_messages_of_every_size_keep_their_order,
    test_peers_that_call_each_other_at_once_share_one_connection,
    test_sending_to_one_who_does_not_read_ends_at_the_deadline,
    test_the_departure_of_one_fails_a_wait_for_several_at_once,
    test_the_sink_decides_where_messages_land,
    test_what_was_sent_before_closing_is_received_before_the_departure,
    two,
)
from tests.launch.coordination.place import Launcher

pytestmark = pytest.mark.skipif(find_spec("cryptography") is None, reason="needs cryptography (podium[tls])")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    found = tls_of(build(RunConfig, make_certificates(tmp_path_factory.mktemp("run") / "keys"), who="run"))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """Good in themselves, but of another authority."""
    made = make_certificates(tmp_path_factory.mktemp("others"))
    return Tls(made["tls_cert"], made["tls_key"], made["tls_ca"])


@pytest.fixture
def open_channel(tls: Tls) -> Iterator[Open]:
    """Opens channels on TCP with TLS; closes them at the end, after which no thread of theirs may be left."""
    opened: list[Channel] = []

    def open_one(rank: int, **options: Any) -> Channel:
        options = {"secret": SECRET, "listen": "tcp:127.0.0.1:0", "deadline_s": 20.0, "tls": tls} | options
        opened.append(Channel(rank, **options))
        return opened[-1]

    yield open_one
    for channel in opened:
        channel.close()
    assert podium_threads() == []


@contextmanager
def pair(tls: Tls, deadline_s: float = 20.0) -> Iterator[tuple[TlsStream, TlsStream]]:
    """Both ends of one connection, hands shaken."""
    guard, until = Guard(tls, deadline_s), time.monotonic() + 20
    with ExitStack() as undo:
        listener = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
        left = guard.wrap(socket.create_connection(listener.getsockname()), listens=False)
        undo.callback(left.close)
        right = guard.wrap(listener.accept()[0], listens=True)
        undo.callback(right.close)
        thread = threading.Thread(target=left.shake_hands, args=(until,))
        thread.start()
        right.shake_hands(until)
        thread.join()
        yield left, right


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """All of them in threads of their own; their results, once all are through."""
    got: list[Any] = [None] * len(works)

    def run(n: int) -> None:
        got[n] = works[n]()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return got


# The connection itself.


def test_large_tensors_go_both_ways_at_once(tls: Tls) -> None:
    sent = [torch.randint(0, 255, (20_000_003,), dtype=torch.uint8), torch.rand(5_000_001)]
    with pair(tls) as (left, right):
        got = at_once(
            lambda: write_frame(left, "there", 0, 0, {}, sent),
            lambda: write_frame(right, "back", 1, 0, {}, sent[::-1]),
            lambda: read_frame(left),
            lambda: read_frame(right),
        )
    back, there = got[2:]
    assert all(torch.equal(a, b) for a, b in zip(there.body, sent, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(back.body, sent[::-1], strict=True))


class Watched:
    """An SSLSocket that notes when two threads are inside of it at once, which OpenSSL does not allow."""

    def __init__(self, inner: ssl.SSLSocket) -> None:
        self.inner, self.inside, self.crowded = inner, threading.Lock(), False

    def read(self, nbytes: int, view: memoryview) -> int:
        return self._alone(lambda: self.inner.read(nbytes, view))

    def write(self, data: memoryview) -> int:
        return self._alone(lambda: self.inner.write(data))

    def _alone(self, work: Callable[[], Any]) -> int:
        self.crowded |= not (mine := self.inside.acquire(blocking=False))
        try:
            return int(work())
        finally:
            if mine:
                self.inside.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_storm_of_frames_of_all_sizes_both_ways_loses_nothing_and_no_two_threads_meet(tls: Tls) -> None:

    def talk(stream: TlsStream, source: int) -> None:
        draw = random.Random(source)
        for n in range(600):
            size = draw.choice((0, 1, 100, 5000, 5000, 40_000))
            write_frame(stream, "k", source, 0, {"n": n}, [torch.full((size,), n % 100, dtype=torch.uint8)] * 2)

    def listen(stream: TlsStream) -> bool:
        for n in range(600):
            frame = read_frame(stream)
            if (
                frame is None
                or frame.header.meta != {"n": n}
                or not all(bool((t == n % 100).all()) for t in frame.body)
            ):
                return False
        return True

    with pair(tls) as (left, right):
        watched = [Watched(stream._tls) for stream in (left, right)]
        left._tls, right._tls = watched  # type: ignore[assignment]  # does what one does
        got = at_once(lambda: talk(left, 0), lambda: talk(right, 1), lambda: listen(left), lambda: listen(right))
    assert got == [None, None, True, True]
    assert not any(w.crowded for w in watched)


def test_a_peer_that_takes_nothing_ends_a_send_at_the_deadline(tls: Tls) -> None:
    with pair(tls, deadline_s=0.3) as (left, _), pytest.raises(BlockingIOError):
        write_frame(left, "k", 0, 0, {}, [torch.zeros(20_000_000)])


def test_a_peer_that_takes_little_by_little_is_waited_for(tls: Tls) -> None:
    with pair(tls, deadline_s=0.5) as (left, right):
        sender = threading.Thread(target=write_frame, args=(left, "k", 0, 0, {}, [torch.zeros(3_000_000)]))
        sender.start()
        into, rest = memoryview(bytearray(1 << 20)), 12_000_000
        while rest > 0:
            rest -= right.recv_into(into, min(rest, 1 << 20), socket.MSG_WAITALL)
            time.sleep(0.05)
        sender.join(20)
        assert not sender.is_alive()


def test_what_drips_in_without_ever_being_a_record_does_not_outlast_a_timeout(tls: Tls) -> None:
    with pair(tls) as (left, right), socket.socket(fileno=os.dup(right._tls.fileno())) as raw:
        over = threading.Event()

        def drip() -> None:
            for byte in b"\x17\x03\x03\x40\x00" + bytes(1000):
                raw.send(bytes([byte]))
                if over.wait(0.01):
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        left.settimeout(0.1)
        with pytest.raises(TimeoutError):
            left.recv(10)
        over.set()
        thread.join(20)


def test_a_shut_connection_wakes_its_reader_and_a_closed_one_is_an_error(tls: Tls) -> None:
    with pair(tls) as (left, right):
        reader = threading.Thread(target=lambda: left.recv(10))
        reader.start()
        left.shutdown(socket.SHUT_RDWR)
        reader.join(20)
        assert not reader.is_alive()
        assert left.recv(10) == b"" and right.recv(10) == b""
        left.close()
        for use in (lambda: left.recv_into(memoryview(bytearray(1))), lambda: left.sendall(b"x")):
            with pytest.raises(OSError, match="is closed"):
                use()


def test_what_is_sent_cannot_be_read_on_the_way(tls: Tls, open_channel: Open) -> None:
    for options, readable in (({"tls": None}, True), ({}, False)):
        left, right = open_channel(0, **options), open_channel(1, **options)
        seen = bytearray()
        with tapped(right.address, seen) as address:
            left.introduce({1: address})
            left.send(1, "a kind that is easily found", {}, [torch.full((40,), 77, dtype=torch.uint8)])
            assert right.recv().kind == "a kind that is easily found"
            left.close()
            right.close()
        assert (b"a kind that is easily found" in seen) is readable
        assert (bytes([77]) * 40 in seen) is readable


@contextmanager
def tapped(address: str, seen: bytearray) -> Iterator[str]:
    """An address that leads to the given one, and notes all that goes there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def carry(source: socket.socket, to: socket.socket) -> None:
            while piece := source.recv(1 << 16):
                seen.extend(piece)
                to.sendall(piece)
            to.shutdown(socket.SHUT_WR)

        def run() -> None:
            outside, _ = listener.accept()
            with outside, knock(address) as inside:
                at_once(lambda: carry(outside, inside), lambda: carry(inside, outside))

        thread = threading.Thread(target=run)
        thread.start()
        yield f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        thread.join(20)


# Strangers.


def greet(channel: Channel, context: ssl.SSLContext) -> None:
    """As far as a client gets that has these certificates and the secret."""
    with context.wrap_socket(knock(channel.address)) as sock:
        prove(sock, 5, channel.rank, SECRET, time.monotonic() + 10)


def client_of(tls: Tls, *, shows: Tls | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(tls.ca)
    if shows is not None:
        context.load_cert_chain(shows.cert, shows.key)
    return context


def test_who_shows_no_certificate_or_anothers_is_refused_though_it_knows_the_secret(
    two: tuple[Channel, Channel],  # noqa: F811  # the fixture
    tls: Tls,
    others: Tls,
) -> None:
    left, right = two
    for shows, alert in ((None, "CERTIFICATE_REQUIRED"), (others, "UNKNOWN_CA")):
        with pytest.raises(ssl.SSLError, match=alert):
            greet(right, client_of(tls, shows=shows))
    greet(right, client_of(tls, shows=tls))
    assert right.recv() == Message(5, DEPARTED, {})
    left.send(1, "hello", {})
    assert right.recv().kind == "hello"


def test_an_older_version_is_not_spoken(two: tuple[Channel, Channel], tls: Tls) -> None:  # noqa: F811  # the fixture
    context = client_of(tls, shows=tls)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        greet(two[1], context)


def test_a_dialler_does_not_trust_a_listener_of_another_authority(open_channel: Open, others: Tls) -> None:
    left, right = open_channel(0), open_channel(1, tls=others)
    left.introduce({1: right.address})
    with pytest.raises(Refused, match=r"rank 0: no TLS with rank 1: CERTIFICATE_VERIFY_FAILED; .*tls_ca"):
        left.send(1, "hello", {})


def test_a_dialler_learns_that_its_certificate_is_of_another_authority(
    open_channel: Open, tls: Tls, others: Tls
) -> None:
    left, right = open_channel(0, tls=Tls(others.cert, others.key, tls.ca)), open_channel(1)
    left.introduce({1: right.address})
    with pytest.raises(Refused, match=r"rank 0: no TLS with rank 1: .*UNKNOWN_CA"):
        left.send(1, "hello", {})


def test_plain_and_encrypted_do_not_meet(open_channel: Open) -> None:
    plain, secure = open_channel(0, tls=None, deadline_s=0.5), open_channel(1)
    plain.introduce({1: secure.address})
    secure.introduce({0: plain.address})
    with pytest.raises(DeadlineExceeded, match="rank 0: no connection to rank 1 in time"):
        plain.send(1, "hello", {})
    with pytest.raises(Refused, match="rank 1: no TLS with rank 0: WRONG_VERSION_NUMBER"):
        secure.send(0, "hello", {})


def test_the_secret_is_still_asked_for_inside(open_channel: Open) -> None:
    left, right = open_channel(0, secret=b"another"), open_channel(1)
    left.introduce({1: right.address})
    with pytest.raises(Refused, match="its secret differs"):
        left.send(1, "hello", {})


@pytest.mark.parametrize("lie", LIES)
def test_a_malformed_frame_inside_costs_its_sender_the_connection(open_channel: Open, tls: Tls, lie: str) -> None:
    server = open_channel(0, limits=Limits(body_bytes=10_000))
    with client_of(tls, shows=tls).wrap_socket(knock(server.address)) as liar:
        assert prove(liar, 9, 0, SECRET, time.monotonic() + 10) == ACCEPTED
        liar.settimeout(10)
        liar.sendall(b"".join(encode_frame("honest", 9, 0, {})) + LIES[lie])
        assert server.recv() == Message(9, "honest", {})
        if lie == "half a frame":
            socket.socket.shutdown(liar, socket.SHUT_WR)
        departure = server.recv()
    assert (departure.source, departure.kind) == (9, DEPARTED) and departure.meta["error"]


def test_noise_behind_the_handshake_ends_the_connection_with_a_reason(open_channel: Open, tls: Tls) -> None:
    server = open_channel(0)
    sock = client_of(tls, shows=tls).wrap_socket(knock(server.address))
    assert prove(sock, 9, 0, SECRET, time.monotonic() + 10) == ACCEPTED
    with socket.socket(fileno=sock.detach()) as raw:
        raw.settimeout(10)
        raw.sendall(bytes(200))
        departure = server.recv()
    assert departure.kind == DEPARTED and "SSL" in departure.meta["error"]


def test_those_who_hang_up_at_once_leave_nothing_behind(two: tuple[Channel, Channel]) -> None:  # noqa: F811  # the fixture
    left, right = two
    left.send(1, "before", {})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        with knock(right.address) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
    left.send(1, "after", {})
    assert [right.recv().kind, right.recv().kind] == ["before", "after"]
    until = time.monotonic() + 10
    while (left_over := len(os.listdir("/proc/self/fd")) - before) and time.monotonic() < until:
        time.sleep(0.02)
    assert left_over == 0


def test_a_unix_socket_stays_plain(open_channel: Open, tmp_path: Path) -> None:
    left, right = open_channel(0, listen=f"unix:{tmp_path}/0"), open_channel(1, listen=f"unix:{tmp_path}/1", tls=None)
    left.introduce({1: right.address})
    left.send(1, "hello", {})
    assert right.recv().kind == "hello"


# The run.


def test_ranks_join_their_coordinator_over_tls(tls: Tls, tmp_path: Path) -> None:
    rules = Rules(workers=1, ranks=(0,), survives_loss=False, heartbeat_s=5.0, deadline_s=20.0, start_deadline_s=20.0)
    recorder = Recorder(-1, tmp_path / "records" / "launcher.jsonl")
    place = {"secret": SECRET, "listen": "tcp:127.0.0.1:0", "tls": tls}
    coordinator = Coordinator(rules, Launcher(), Channel(COORDINATOR, **place), recorder, WallClock())
    watch = threading.Thread(target=coordinator.run, daemon=True)
    watch.start()
    member = Membership(0, coordinator.address, heartbeat_s=5.0, deadline_s=20.0, start_deadline_s=20.0, **place)
    member.join([0], {}, 20.0)
    member.begun()
    member.done(None)
    watch.join(20)
    assert not watch.is_alive()
    member.close()
    coordinator.close()
    recorder.close()


def test_the_three_settings_come_together() -> None:
    with pytest.raises(ConfigError, match="tls_cert, tls_key and tls_ca must be given together, got a, None, None"):
        RunConfig(tls_cert="a")
    assert tls_of(RunConfig()) is None
    assert tls_of(RunConfig(tls_cert="a", tls_key="b", tls_ca="c")) == Tls("a", "b", "c")


def test_files_that_will_not_do_are_refused_with_a_reason(tls: Tls, others: Tls, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    key = load_pem_private_key(Path(tls.key).read_bytes(), None)
    locked.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word")))
    for bad, what in (
        (Tls("none.pem", tls.key, tls.ca), "tls_cert and tls_key: none.pem and .* No such file"),
        (Tls(tls.cert, others.key, tls.ca), "are no pair: KEY_VALUES_MISMATCH"),
        (Tls(tls.cert, tls.key, tls.key), "tls_ca: .* holds no certificate"),
        (Tls(tls.cert, str(locked), tls.ca), "must not be encrypted"),
    ):
        with pytest.raises(ConfigError, match=what):
            Channel(0, secret=SECRET, listen="tcp:127.0.0.1:0", tls=bad)
    assert podium_threads() == []


def test_certificates_are_made_once_and_their_keys_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_certificates(tmp_path / "keys", days=2)
    assert {name: Path(path).name for name, path in made.items()} == {
        "tls_cert": "node.pem",
        "tls_key": "node.key",
        "tls_ca": "ca.pem",
    }
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "keys").iterdir()}
    assert modes == {"ca.key": 0o600, "node.key": 0o600, "ca.pem": 0o644, "node.pem": 0o644}
    with pytest.raises(ConfigError, match=r"must hold no certificates yet, got node\.pem"):
        make_certificates(tmp_path / "keys")
    with pytest.raises(ConfigError, match="before the year 10000, got 10000000 days"):
        make_certificates(tmp_path / "late", days=10_000_000)
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)  # as if it were not installed
    with pytest.raises(MissingExtra, match=r"podium\[tls\]"):
        make_certificates(tmp_path / "more")
    assert not (tmp_path / "more").exists()
