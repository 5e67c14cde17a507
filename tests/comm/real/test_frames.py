"""The wire format: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from podium.comm.real.frames import (
    DTYPES,
    MAGIC,
    PROLOGUE,
    VERSION,
    Frame,
    FrameError,
    Header,
    Limits,
    byte_view,
    encode_frame,
    read_frame,
    write_frame,
)

SMALL = Limits(header_bytes=2048, tensors=8, body_bytes=4096)


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        left.settimeout(10)
        right.settimeout(10)
        yield left, right


def receive(raw: bytes, limits: Limits = SMALL, sink: Any = None) -> Frame | None:
    """Read one frame from these bytes, after which the stream ends."""
    with pair() as (left, right):
        left.sendall(raw)
        left.shutdown(socket.SHUT_WR)
        return read_frame(right, limits, sink)


def raw_frame(header: Any, body: bytes = b"", /, **prologue: Any) -> bytes:
    """A frame by hand, so that it can lie."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    fields = {"magic": MAGIC, "version": VERSION, "header": len(text), "body": len(body), "crc": zlib.crc32(text)}
    return PROLOGUE.pack(*(fields | prologue).values()) + text + body


def header_with(**changes: Any) -> dict[str, Any]:
    return {"kind": "k", "source": 0, "call": 0, "meta": {}, "tensors": []} | changes


def travel(tensors: list[Tensor], limits: Limits | None = None) -> tuple[Tensor, ...]:
    with pair() as (left, right):
        sender = threading.Thread(target=write_frame, args=(left, "k", 3, 5, {"a": [1, None]}, tensors, limits))
        sender.start()
        frame = read_frame(right, limits)
        sender.join()
    assert frame is not None
    assert frame.header[:4] == ("k", 3, 5, {"a": [1, None]})
    return frame.body


def same(got: Tensor, sent: Tensor) -> bool:
    return got.dtype == sent.dtype and got.shape == sent.shape and torch.equal(got, sent)


SHAPES = st.one_of(st.just(()), st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple))


@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_every_dtype_and_shape_arrives_as_it_was_sent(tensors: list[tuple[str, tuple[int, ...]]]) -> None:
    sent = [(torch.rand(shape) * 100).to(DTYPES[name]) for name, shape in tensors]
    assert all(same(got, tensor) for got, tensor in zip(travel(sent), sent, strict=True))


def test_tensors_that_are_not_contiguous_arrive_in_their_logical_order() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    sent = [base.t(), base[:, ::2], base[1], torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    assert all(same(g, s) for g, s in zip(travel(sent), sent, strict=True))


def test_more_tensors_than_one_gathered_send_takes_all_arrive() -> None:
    sent = [torch.full((2,), i) for i in range(3000)]
    assert torch.equal(torch.cat(travel(sent)), torch.cat(sent))


def test_a_body_larger_than_the_socket_buffer_arrives_whole() -> None:
    sent = [torch.randint(0, 255, (5_000_001,), dtype=torch.uint8), torch.rand(1_000_003)]
    assert all(same(g, s) for g, s in zip(travel(sent), sent, strict=True))


def test_encoding_copies_no_contiguous_tensor() -> None:
    tensor = torch.nn.Parameter(torch.zeros(4))
    _, view = encode_frame("k", 0, 0, {}, [tensor])
    tensor.data.fill_(1.0)
    assert bytes(view) == bytes(byte_view(torch.ones(4)))


def test_what_the_sink_offers_is_what_is_filled() -> None:
    offered = [torch.zeros(6), torch.zeros(2, dtype=torch.bfloat16)]
    raw = b"".join(encode_frame("k", 0, 0, {}, [torch.ones(2, 3), torch.ones(2, dtype=torch.bfloat16)]))
    frame = receive(raw, sink=lambda header: offered)
    assert frame is not None
    assert all(a is b for a, b in zip(frame.body, offered, strict=True))
    assert torch.equal(offered[0], torch.ones(6)) and bool((offered[1] == 1).all())


@pytest.mark.parametrize(
    "offered",
    [
        [torch.zeros(5)],
        [torch.zeros(6, dtype=torch.int32)],
        [],
        [torch.zeros(6), torch.zeros(1)],
        [torch.zeros(12)[::2]],
    ],
    ids=["too short", "another dtype", "none", "too many", "with gaps"],
)
def test_an_offer_that_does_not_fit_is_refused(offered: list[Tensor]) -> None:
    raw = b"".join(encode_frame("k", 0, 0, {}, [torch.ones(6)]))
    with pytest.raises(FrameError):
        receive(raw, sink=lambda header: offered)
    assert all(bool((t == 0).all()) for t in offered)


def test_an_end_between_frames_is_no_error_and_inside_one_is() -> None:
    raw = b"".join(encode_frame("k", 0, 0, {}, [torch.ones(6)]))
    assert receive(b"") is None
    for cut in (1, PROLOGUE.size, PROLOGUE.size + 5, len(raw) - 1):
        with pytest.raises(FrameError, match="ended inside a frame"):
            receive(raw[:cut])


LIES = {
    "magic": (raw_frame(header_with(), magic=b"HTTP"), "must begin with"),
    "version": (raw_frame(header_with(), version=2), "version 1, got 2"),
    "long header": (raw_frame(header_with(), header=2**31), "at most 2048 header bytes, got 2147483648"),
    "long body": (raw_frame(header_with(), body=2**63), "at most 4096 body bytes"),
    "crc": (raw_frame(header_with(), crc=1), "CRC-32"),
    "not JSON": (raw_frame(b"{"), "not JSON"),
    "not UTF-8": (raw_frame(b'"\xff"'), "not JSON"),
    "nested": (raw_frame(b"[" * 2000), "not JSON"),
    "a list": (raw_frame([]), "must be an object"),
    "missing field": (raw_frame({"kind": "k"}), "must be an object"),
    "more fields": (raw_frame(header_with(extra=1)), "must be an object"),
    "kind": (raw_frame(header_with(kind=3)), "kind must be of type str"),
    "source": (raw_frame(header_with(source=True)), "source must be of type int"),
    "negative source": (raw_frame(header_with(source=-1)), "32 bits"),
    "huge call": (raw_frame(header_with(call=10**400)), "64"),
    "meta": (raw_frame(header_with(meta=[])), "meta must be of type dict"),
    "many tensors": (raw_frame(header_with(tensors=[["bool", [0]]] * 9)), "at most 8 tensors, got 9"),
    "no pair": (raw_frame(header_with(tensors=[["bool"]])), "described as"),
    "dtype": (raw_frame(header_with(tensors=[["complex64", [1]]]), b"x" * 8), "dtype must be one of"),
    "object": (raw_frame(header_with(tensors=[[["float32"], [1]]]), b"x" * 4), "dtype must be one of"),
    "negative": (raw_frame(header_with(tensors=[["float32", [-1]]])), "whole numbers of 0 or more"),
    "fraction": (raw_frame(header_with(tensors=[["float32", [1.0]]]), b"x" * 4), "whole numbers of 0 or more"),
    "many dims": (raw_frame(header_with(tensors=[["bool", [1] * 33]]), b"x"), "at most 32"),
    "overflow": (raw_frame(header_with(tensors=[["bool", [0, 2**62, 2**62]]])), "at most 4096"),
    "huge": (raw_frame(header_with(tensors=[["bool", [2**50]]]), b"x"), "at most 4096"),
    "body too short": (
        raw_frame(header_with(tensors=[["float32", [2]]]), b"x" * 4),
        "add up to the body's 4 bytes, got 8",
    ),
    "body too long": (raw_frame(header_with(), b"x"), "add up to the body's 1 bytes, got 0"),
    "sum": (raw_frame(header_with(tensors=[["bool", [4096]]] * 2), b"x" * 4096), "got 8192"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_named_before_anything_is_asked_or_allocated_for_it(lie: str) -> None:
    raw, what = LIES[lie]
    asked: list[Header] = []
    with pytest.raises(FrameError, match=what):
        receive(raw, sink=asked.append)
    assert not asked


def test_a_sender_refuses_what_the_receiver_would() -> None:
    with pytest.raises(FrameError, match="header bytes"):
        encode_frame("k", 0, 0, {"text": "x" * 3000}, limits=SMALL)
    with pytest.raises(FrameError, match="body bytes"):
        encode_frame("k", 0, 0, {}, [torch.zeros(5000)], SMALL)
    with pytest.raises(FrameError, match="tensors"):
        encode_frame("k", 0, 0, {}, [torch.zeros(1)] * 9, SMALL)
    with pytest.raises(FrameError, match="complex64"):
        encode_frame("k", 0, 0, {}, [torch.zeros(1, dtype=torch.complex64)])
    with pytest.raises(FrameError, match="on the CPU"):
        encode_frame("k", 0, 0, {}, [torch.zeros(1, device="meta")])
    with pytest.raises(FrameError, match="dense"):
        encode_frame("k", 0, 0, {}, [torch.eye(2).to_sparse()])
    with pytest.raises(FrameError, match="JSON types only"):
        encode_frame("k", 0, 0, {"t": torch.zeros(1)})


def read_all(raw: bytes) -> list[Frame]:
    """Every frame until the end or the first refusal; no body may be larger than the limit."""
    frames: list[Frame] = []

    def sink(header: Header) -> None:
        assert sum(spec.nbytes for spec in header.tensors) <= SMALL.body_bytes

    with pair() as (left, right):
        left.sendall(raw)
        left.shutdown(socket.SHUT_WR)
        try:
            while (frame := read_frame(right, SMALL, sink)) is not None:
                frames.append(frame)
        except FrameError:
            pass
    return frames


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused_and_harm_nothing(raw: bytes) -> None:
    assert read_all(raw) == []
    assert read_all(MAGIC + VERSION.to_bytes(2, "big") + raw) == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
shapes = st.lists(st.integers(-1, 2**70) | st.integers(0, 4) | json_values, max_size=4)
described = st.lists(st.tuples(st.sampled_from([*DTYPES, "object"]) | json_values, shapes), max_size=4)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(("kind", "source", "call", "meta"), json_values) | {"tensors": described}))
def test_any_json_in_a_header_is_taken_or_refused_but_never_crashes(header: dict[str, Any]) -> None:
    read_all(raw_frame(header, b"x" * 16))
    read_all(raw_frame(header | {"kind": "k", "source": 1, "call": 0, "meta": {}}, b"x" * 16))


VALID = b"".join(encode_frame("push", 2, 7, {"step": 3}, [torch.arange(5.0), torch.ones(1).char(), torch.zeros(0)]))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, len(VALID) * 8 - 1), min_size=1, max_size=4, unique=True))
def test_flipped_bits_are_refused_unless_they_lie_in_the_body(bits: list[int]) -> None:
    raw = bytearray(VALID)
    for bit in bits:
        raw[bit // 8] ^= 1 << bit % 8
    body_at = len(VALID) - 21
    first, *rest = read_all(bytes(raw) + VALID) or [None]
    if min(bits) // 8 < body_at:
        assert first is None
    else:
        assert first is not None and len(rest) == 1
        assert first.header == rest[0].header


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, len(VALID)), max_size=6))
def test_a_frame_in_pieces_is_the_same_frame(cuts: list[int]) -> None:
    with pair() as (left, right):
        places = [0, *sorted(cuts), len(VALID)]

        def drip() -> None:
            for begin, end in itertools.pairwise(places):
                left.sendall(VALID[begin:end])

        sender = threading.Thread(target=drip)
        sender.start()
        frame = read_frame(right, SMALL)
        sender.join()
    assert frame is not None and frame.wire_bytes == len(VALID)
    assert torch.equal(frame.body[0], torch.arange(5.0))
