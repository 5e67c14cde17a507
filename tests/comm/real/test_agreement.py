"""The handshake gives a stranger nothing to try guesses on, and what leaves the host has a checksum."""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from podium.comm.real.agreement import Agreement, multiply, to_curve
from podium.comm.real.channel import Channel
from podium.comm.real.frames import ACCEPTED, MAGIC, VERSION, FrameError, Refused, encode_frame, prove, read_frame
from podium.comm.real.link import Link
from podium.errors import CommError

WEAK = b"password12345678"
GUESSES = (b"", b"letmein", b"podium", WEAK, b"secret")


def test_the_ladder_is_that_of_rfc_7748() -> None:
    scalar = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    point = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    clamped = int.from_bytes(scalar, "little") & ~7 & (2**255 - 1) | 2**254
    product = multiply(clamped, int.from_bytes(point, "little") & (2**255 - 1))
    assert product.to_bytes(32, "little").hex() == "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"


def test_one_thousand_steps_of_rfc_7748_begin_as_it_says() -> None:
    nine = 9
    scalar = int.from_bytes((9).to_bytes(32, "little"), "little") & ~7 & (2**255 - 1) | 2**254
    first = multiply(scalar, nine).to_bytes(32, "little").hex()
    assert first == "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"


@pytest.mark.parametrize("number", [1, 2, 3, 12345, 2**200 + 7, 2**255 - 20])
def test_every_number_is_mapped_to_a_point_of_the_curve(number: int) -> None:
    p, a = 2**255 - 19, 486662
    u = to_curve(number)
    assert pow(u * (u * u + a * u + 1), (p - 1) // 2, p) == 1


def test_both_sides_come_to_one_key_and_another_secret_to_another() -> None:
    left, right, stranger = Agreement(WEAK), Agreement(WEAK), Agreement(b"another phrase of words")
    assert left.key(right.share) == right.key(left.share)
    assert stranger.key(left.share) != left.key(stranger.share)
    assert Agreement(WEAK).share != left.share


@pytest.mark.parametrize("point", [0, 1, 2**255 - 20, 2**255 - 19, 2**255 - 18])
def test_a_point_of_small_order_is_refused(point: int) -> None:
    with pytest.raises(ValueError, match="small order"):
        Agreement(WEAK).key(point.to_bytes(32, "little"))


def proofs(guess: bytes, listener: bytes, dialler: bytes, ranks: bytes) -> set[bytes]:
    """What would be sent if the key were the guess, by either side and in either order."""
    return {
        hmac.digest(guess, role + b"\0" + ranks + one + two, "sha256")
        for role in (b"dialler", b"listener1", b"listener2", b"listener")
        for one, two in ((listener, dialler), (dialler, listener))
    }


def test_who_listens_in_a_ranks_place_gets_nothing_to_try_guesses_on() -> None:
    got: list[bytes] = []
    nonce = to_curve(4).to_bytes(32, "little")
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def listen() -> None:
            sock, _ = stranger.accept()
            with sock:
                sock.sendall(MAGIC + VERSION.to_bytes(2, "big") + nonce)
                got.append(sock.recv(4096))
                sock.sendall(bytes([ACCEPTED]) + bytes(32))

        thread = threading.Thread(target=listen)
        thread.start()
        worker = Channel(1, secret=WEAK, listen="tcp:127.0.0.1:0", deadline_s=10)
        try:
            worker.introduce({0: f"tcp:127.0.0.1:{stranger.getsockname()[1]}"})
            with pytest.raises(Refused, match="does not hold this run's secret"):
                worker.send(0, "hello", {})
        finally:
            worker.close()
            thread.join()
    (claim,) = got
    ranks, own, proof = claim[:8], claim[8:40], claim[40:]
    assert ranks == struct.pack("!II", 1, 0)
    for guess in GUESSES:
        assert proof not in proofs(guess, nonce, own, ranks)


def test_who_overhears_a_handshake_gets_nothing_to_try_guesses_on() -> None:
    right = Channel(1, secret=WEAK, listen="tcp:127.0.0.1:0", deadline_s=10)
    left = Channel(0, secret=WEAK, listen="tcp:127.0.0.1:0", deadline_s=10)
    heard: dict[str, bytearray] = {"in": bytearray(), "out": bytearray()}
    try:
        with between(right.address, heard) as address:
            left.introduce({1: address})
            left.send(1, "hello", {})
            assert right.recv().kind == "hello"
            left.close()
            right.close()
    finally:
        left.close()
        right.close()
    hello, claim, verdict = heard["out"][:38], heard["in"][:72], heard["out"][38:71]
    for guess in GUESSES:
        known = proofs(guess, bytes(hello[6:]), bytes(claim[8:40]), bytes(claim[:8]))
        assert bytes(claim[40:]) not in known and bytes(verdict[1:]) not in known


def test_who_dials_gets_nothing_at_all() -> None:
    right = Channel(1, secret=WEAK, listen="tcp:127.0.0.1:0", deadline_s=10)
    try:
        with socket.create_connection(("127.0.0.1", int(right.address.rpartition(":")[2]))) as sock:
            sock.settimeout(10)
            with pytest.raises(Refused):
                prove(sock, 0, 1, b"a guess that is wrong", time.monotonic() + 10)
            assert sock.recv(100) == b""
    finally:
        right.close()


def test_a_channel_without_a_secret_lets_nobody_in() -> None:
    right = Channel(1, secret=b"", listen="tcp:127.0.0.1:0", deadline_s=2)
    left = Channel(0, secret=b"", listen="tcp:127.0.0.1:0", deadline_s=2)
    try:
        left.introduce({1: right.address})
        with pytest.raises(Refused, match="without a secret"):
            left.send(1, "hello", {})
        with socket.create_connection(("127.0.0.1", int(right.address.rpartition(":")[2]))) as sock:
            sock.settimeout(10)
            assert sock.recv(100) == b""
    finally:
        left.close()
        right.close()


# Checksums.


def over_a_wire(raw: bytes) -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(raw)
        one.shutdown(socket.SHUT_WR)
        read_frame(other)


def test_a_flipped_bit_in_a_body_with_a_checksum_is_refused() -> None:
    body = [torch.arange(100.0), torch.zeros(0), torch.ones(3, dtype=torch.int64)]
    raw = bytearray(b"".join(encode_frame("push", 1, 0, {}, body, sums=True)))
    over_a_wire(bytes(raw))
    nbytes = sum(tensor.nbytes for tensor in body)
    for place in (1, nbytes // 2, nbytes):
        damaged = bytearray(raw)
        damaged[-place] ^= 4
        with pytest.raises(FrameError, match="the body's CRC-32 does not match"):
            over_a_wire(bytes(damaged))


def test_a_frame_on_this_host_has_no_checksum() -> None:
    assert b'"sum"' not in b"".join(encode_frame("push", 1, 0, {}, [torch.ones(3)]))
    assert b'"sum"' not in b"".join(encode_frame("push", 1, 0, {}, [], sums=True))


def test_damage_on_the_way_ends_the_connection_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.comm.real.link.leaves_host", lambda _sock: True)
    right = Channel(1, secret=WEAK, listen="tcp:127.0.0.1:0", deadline_s=10, sums=True)
    left = Channel(0, secret=WEAK, listen="tcp:127.0.0.1:0", deadline_s=10, sums=True)
    try:
        with between(right.address, {"in": bytearray(), "out": bytearray()}, damage=b"\x4d" * 400) as address:
            left.introduce({1: address})
            body = torch.full((500,), 0x4D, dtype=torch.uint8)
            left.send(1, "push", {}, [body])
            message = right.recv()
            assert message.kind == "departed" and "CRC-32 does not match" in message.meta["error"]
            left.close()
            right.close()
    finally:
        left.close()
        right.close()


@pytest.mark.parametrize("address", ["unix", "tcp"])
def test_links_of_one_host_do_without_checksums(address: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("s")
    places = [f"unix:{folder}/{n}" if address == "unix" else "tcp:127.0.0.1:0" for n in range(2)]
    left, right = (Channel(n, secret=WEAK, listen=place, deadline_s=10, sums=True) for n, place in enumerate(places))
    try:
        left.introduce({1: right.address})
        link: Link = left._reach(1)
        assert not link.sums
    except CommError:
        pytest.fail("they must meet")
    finally:
        left.close()
        right.close()


@contextmanager
def between(address: str, heard: dict[str, bytearray], damage: bytes | None = None) -> Iterator[str]:
    """An address that leads to the given one; notes what goes there, and damages these bytes where they come by."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def carry(source: socket.socket, to: socket.socket, name: str) -> None:
            try:
                while piece := source.recv(1 << 16):
                    heard[name].extend(piece)
                    if damage is not None and damage in piece:
                        piece = piece.replace(damage, b"\x4c" + damage[1:], 1)
                    to.sendall(piece)
                to.shutdown(socket.SHUT_WR)
            except OSError:  # one side has hung up
                return

        def run() -> None:
            outside, _ = listener.accept()
            inside = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
            with outside, inside:
                other = threading.Thread(target=carry, args=(inside, outside, "out"))
                other.start()
                carry(outside, inside, "in")
                other.join(10)

        thread = threading.Thread(target=run)
        thread.start()
        yield f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        thread.join(20)
