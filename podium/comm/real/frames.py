"""The wire format: frames of JSON and raw tensor bytes, and the handshake that comes before the first of them.

    prologue   22 bytes, big-endian: magic, version, header length, body length, CRC-32 of the header
    header     JSON in UTF-8: kind, source, call, meta, tensors as [[dtype, shape], …], landing
    body       the tensors' bytes back to back, little-endian, as they lie in memory

Where both ends share memory, a tensor is [dtype, shape, [file, inode, offset]] and has no bytes in the body. The
landing of a call is the shared memory for its reply, described in the same way; in a reply it means that the reply was
written there.

A header may have the CRC-32 of the body, `sum`: where the run asks for it, the frame leaves the host, and there is no
TLS. TCP's own checksum has 16 bits, and lets about one damaged packet in 65,536 pass. The CRC is off by default because
of its cost: one core computes 3 GB/s, on each side, while a plain socket moves 2.

Nothing is unpickled, and nothing is allocated for a frame before its whole description has been checked.

The handshake proves that both sides hold the same secret without sending it: the listener sends 32 bytes, the dialler
32 of its own with an HMAC-SHA256 over both and both ranks, the listener answers with another. Over TCP these bytes are
points of a curve, and the HMAC's key comes from them and the secret (`agreement`): neither a stranger who listens or
dials nor an eavesdropper learns anything to try guesses on. Over a Unix socket, open to this user only, they are
nonces, and the key is the secret. The frames that follow are neither encrypted nor signed, except by TLS (`tls`).
"""

from __future__ import annotations

import hmac
import json
import math
import os
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from podium.comm.base import Meta
from podium.comm.real.agreement import SHARE_BYTES, Agreement
from podium.comm.real.arena import Place
from podium.comm.real.sockets import Stream
from podium.errors import CommError

MAGIC, VERSION = b"PODM", 1
MOVE, GIVE_UP, HERE, WRITTEN = ".move", ".give-up", ".here", ".written"
"""Kinds of frames that go to the schedule runner."""
OF_EXCHANGES = (MOVE, GIVE_UP, HERE, WRITTEN)
"""All other kinds go to the inbox."""
PROLOGUE = struct.Struct("!4sHIQI")
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    )
}
"""Dtypes that may be sent, by their names on the wire."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _as_json(value: Any) -> Any:
    """Encode numpy scalars as numbers."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is none")


_JSON = json.JSONEncoder(separators=(",", ":"), default=_as_json)
_FIELDS = {"kind", "source", "call", "meta", "tensors"}
_ALL_FIELDS = _FIELDS | {"landing", "sum"}
_MAX_DIMS = 32
_MAX_BUFFERS = 1024  # of one sendmsg: Linux's IOV_MAX


class FrameError(CommError):
    """A frame is not what the wire format allows, or does not fit where it should land."""


class Refused(CommError):
    """The other side of a new connection does not hold this run's secret, or is not the rank that was wanted."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on what a peer may make this endpoint allocate."""

    header_bytes: int = 64 << 10
    tensors: int = 4096
    body_bytes: int = 4 << 30
    inbox_messages: int = 1024
    """Messages that may wait to be received before a channel stops reading."""
    inbox_bytes: int = 1 << 30
    """The same in bytes; a single larger message is accepted when no other waits."""


class TensorSpec(NamedTuple):
    """A tensor announced by a header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    place: Place | None = None  # in the sender's memory; None: in the body

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Header(NamedTuple):
    """A frame's header. `call` is 0 for a message, n for a call, -n for the reply to call n."""

    kind: str
    source: int
    call: int
    meta: Meta
    tensors: tuple[TensorSpec, ...]
    body_bytes: int
    landing: tuple[TensorSpec, ...] | None = None
    body_sum: int | None = None  # CRC-32 of the body


class Frame(NamedTuple):
    header: Header
    body: tuple[Tensor, ...]
    wire_bytes: int  # all of it: prologue, header and body
    landing: tuple[Tensor, ...] | None = None


Sink = Callable[[Header], "Sequence[Tensor] | None"]
"""Returns the tensors that a body is received into; None: new ones are allocated."""
Attach = Callable[[Place, torch.dtype, "tuple[int, ...]"], Tensor]
"""Finds a tensor in the sender's memory; raises OSError or ValueError."""
Locate = Callable[[Tensor], "Place | None"]
"""Returns where in our own memory other processes find a tensor; None: nowhere."""


def byte_view(tensor: Tensor) -> memoryview:
    """The tensor's own memory as bytes, nothing copied; the tensor must be dense, contiguous and on the CPU."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise FrameError(
            f"a tensor on the wire must be dense, contiguous and on the CPU, got {tuple(tensor.shape)}, "
            f"stride {tensor.stride() if tensor.layout is torch.strided else tensor.layout}, on {tensor.device}"
        )
    if tensor.numel() == 0:
        return memoryview(b"")
    plain = tensor.detach()
    if plain.dtype is torch.bfloat16:  # numpy has none
        plain = plain.view(torch.int16)
    return plain.numpy().data.cast("B")


def encode_frame(
    kind: str,
    source: int,
    call: int,
    meta: Meta,
    tensors: Sequence[Tensor] = (),
    limits: Limits | None = None,
    locate: Locate | None = None,
    landing: Sequence[Tensor] | None = None,
    *,
    sums: bool = False,
) -> list[memoryview]:
    """The frame as buffers to be sent in order; those after the first are the tensors' own memory.

    A tensor that is not contiguous is copied. Raises already here for what the receiver's limits would refuse. With
    `locate`, tensors in shared memory are sent as their place; so is `landing`, if all of it lies there. `sums`: with
    the CRC-32 of the body.
    """
    limits = limits or Limits()
    dense = [t if t.layout is not torch.strided or t.is_contiguous() else t.contiguous() for t in tensors]
    places = [locate(t) if locate is not None else None for t in dense]
    described = [_describe(t, place) for t, place in zip(dense, places, strict=True)]
    fields = {"kind": kind, "source": source, "call": call, "meta": meta, "tensors": described}
    if landing is not None:
        landings = [locate(t) if locate is not None else None for t in landing]
        if all(place is not None for place in landings):
            fields["landing"] = [_describe(t, place) for t, place in zip(landing, landings, strict=True)]
    inline = [t for t, place in zip(dense, places, strict=True) if place is None]
    body = [view for view in map(byte_view, inline) if view.nbytes]
    if sums and body:
        fields["sum"] = _sum_of(body)
    try:
        header = _JSON.encode(fields).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"the meta of {kind!r} must hold JSON types only: {error}") from None
    body_bytes = sum(view.nbytes for view in body)
    _check_at_most("header bytes", len(header), limits.header_bytes)
    _check_at_most("tensors", len(dense), limits.tensors)
    _check_at_most("body bytes", body_bytes, limits.body_bytes)
    prologue = PROLOGUE.pack(MAGIC, VERSION, len(header), body_bytes, zlib.crc32(header))
    return [memoryview(prologue + header), *body]


def _sum_of(views: Iterable[memoryview]) -> int:
    """CRC-32 of these buffers, concatenated."""
    total = 0
    for view in views:
        total = zlib.crc32(view, total)
    return total


def _describe(tensor: Tensor, place: Place | None) -> list[Any]:
    return [_dtype_name(tensor.dtype), list(tensor.shape), *([] if place is None else [list(place)])]


def send_buffers(sock: Stream, buffers: Sequence[memoryview]) -> int:
    """Send all buffers, and return their number of bytes. Blocks; raises what the socket raises."""
    rest, first, total = list(buffers), 0, 0
    while first < len(rest):
        sent = sock.sendmsg(rest[first : first + _MAX_BUFFERS])
        total += sent
        while first < len(rest) and sent >= rest[first].nbytes:
            sent -= rest[first].nbytes
            first += 1
        if sent:
            rest[first] = rest[first][sent:]
    return total


def after(buffers: Sequence[memoryview], gone: int) -> list[memoryview]:
    """What is left of these buffers when `gone` bytes were sent."""
    rest = []
    for buffer in buffers:
        skipped = min(gone, buffer.nbytes)
        gone -= skipped
        if skipped < buffer.nbytes:
            rest.append(buffer[skipped:])
    return rest


def write_frame(
    sock: Stream,
    kind: str,
    source: int,
    call: int,
    meta: Meta,
    tensors: Sequence[Tensor] = (),
    limits: Limits | None = None,
) -> int:
    """Send one frame; returns the bytes that went over the wire."""
    return send_buffers(sock, encode_frame(kind, source, call, meta, tensors, limits))


def read_frame(
    sock: Stream,
    limits: Limits | None = None,
    sink: Sink | None = None,
    attach: Attach | None = None,
    idle: Callable[[], None] | None = None,
) -> Frame | None:
    """Receive one frame; None when the other side closed between two frames.

    `sink` is called with the checked header, before the body is read. The tensors that it returns must match in dtype
    and number of elements, may differ in shape, and become the frame's body. Tensors that lie in the sender's memory
    are found by `attach`. `idle` is called at each timeout of the socket while nothing comes, and raises when the peer
    is gone.
    """
    limits = limits or Limits()
    prologue = _receive(sock, PROLOGUE.size, "prologue", idle, may_end=True)
    if not prologue:
        return None
    header_bytes, body_bytes, crc = parse_prologue(prologue, limits)
    raw = _receive(sock, header_bytes, "header", idle)
    if zlib.crc32(raw) != crc:
        raise FrameError("the header's CRC-32 does not match: the frame was damaged on the way")
    header = parse_header(raw, body_bytes, limits)
    # Before the sink is called: a wrong place makes the whole frame invalid.
    placed = [None if spec.place is None else _attached(spec, attach) for spec in header.tensors]
    landing = None if header.landing is None else tuple(_attached(spec, attach) for spec in header.landing)
    offered = sink(header) if sink is not None else None
    inline = [spec for spec in header.tensors if spec.place is None]
    received = _fresh(inline, body_bytes) if offered is None else list(offered)
    views = _destinations(header.kind, inline, received)
    for view in views:
        _fill(sock, view, "body", idle)
    if header.body_sum is not None and _sum_of(views) != header.body_sum:
        raise FrameError("the body's CRC-32 does not match: the tensors were damaged on the way")
    for tensor in received:
        _check_bools(tensor)
    at = iter(received)
    body = tuple(next(at) if tensor is None else tensor for tensor in placed)
    return Frame(header, body, PROLOGUE.size + header_bytes + body_bytes, landing)


def parse_prologue(raw: bytes, limits: Limits) -> tuple[int, int, int]:
    """Header length, body length and the header's CRC-32; raises where a length exceeds its limit."""
    magic, version, header_bytes, body_bytes, crc = PROLOGUE.unpack(raw)
    if magic != MAGIC:
        raise FrameError(f"a frame must begin with {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise FrameError(f"the wire format must be version {VERSION}, got {version}")
    _check_at_most("header bytes", header_bytes, limits.header_bytes)
    _check_at_most("body bytes", body_bytes, limits.body_bytes)
    return header_bytes, body_bytes, crc


def parse_header(raw: bytes, body_bytes: int, limits: Limits) -> Header:
    """The header; raises where a field is invalid or the tensors do not add up to the body."""
    try:
        fields = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the header is not JSON in UTF-8: {error}") from None
    if not isinstance(fields, dict) or not _FIELDS <= fields.keys() <= _ALL_FIELDS:
        raise FrameError("the header must be an object of kind, source, call, meta, tensors, perhaps landing and sum")
    kind, source, call = _field(fields, "kind", str), _field(fields, "source", int), _field(fields, "call", int)
    meta, described = _field(fields, "meta", dict), _field(fields, "tensors", list)
    if not 0 <= source < 2**32 or not -(2**63) < call < 2**63:
        raise FrameError("the header's source must fit 32 bits and its call 64")
    _check_at_most("tensors", len(described), limits.tensors)
    tensors = tuple(_parse_spec(entry, limits) for entry in described)
    if (announced := sum(spec.nbytes for spec in tensors if spec.place is None)) != body_bytes:
        raise FrameError(f"the tensors must add up to the body's {body_bytes} bytes, got {announced}")
    body_sum = _field(fields, "sum", int) if "sum" in fields else None
    return Header(kind, source, call, meta, tensors, body_bytes, _parse_landing(fields, limits), body_sum)


def _parse_landing(fields: dict[str, Any], limits: Limits) -> tuple[TensorSpec, ...] | None:
    if "landing" not in fields:
        return None
    described = _field(fields, "landing", list)
    _check_at_most("tensors to land", len(described), limits.tensors)
    landing = tuple(_parse_spec(entry, limits) for entry in described)
    if any(spec.place is None for spec in landing):
        raise FrameError("a landing must lie in shared memory")
    return landing


def _parse_spec(entry: Any, limits: Limits) -> TensorSpec:
    if not isinstance(entry, list) or len(entry) not in (2, 3) or not isinstance(entry[1], list):
        raise FrameError("a tensor must be described as [dtype, shape] or [dtype, shape, place]")
    name, shape = entry[:2]
    if not isinstance(name, str) or name not in DTYPES:
        raise FrameError(f"a tensor's dtype must be one of {', '.join(DTYPES)}, got {str(name)[:40]!r}")
    if len(shape) > _MAX_DIMS or any(type(dim) is not int or dim < 0 for dim in shape):
        raise FrameError(f"a shape must be at most {_MAX_DIMS} whole numbers of 0 or more")
    # Empty dimensions count as 1: torch multiplies the others too, and must not overflow.
    _check_at_most("bytes of one tensor", math.prod(dim or 1 for dim in shape), limits.body_bytes)
    return TensorSpec(DTYPES[name], tuple(shape), _parse_place(entry[2]) if len(entry) == 3 else None)


def _parse_place(place: Any) -> Place:
    if not isinstance(place, list) or len(place) != 3 or any(type(n) is not int or not 0 <= n < 2**63 for n in place):
        raise FrameError("a place must be [file, inode, offset], whole numbers of 0 or more")
    return Place(*place)


def _field(fields: dict[str, Any], name: str, kind: type) -> Any:
    value = fields[name]
    if type(value) is not kind:
        raise FrameError(f"the header's {name} must be of type {kind.__name__}, got {type(value).__name__}")
    return value


def _check_at_most(what: str, number: int, limit: int) -> None:
    if number > limit:
        shown = str(number) if number < 2**64 else "more than 2**64"
        raise FrameError(f"a frame may have at most {limit} {what}, got {shown}")


def _dtype_name(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise FrameError(f"a tensor's dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    return _NAMES[dtype]


def _attached(spec: TensorSpec, attach: Attach | None) -> Tensor:
    """A tensor that lies in the sender's memory."""
    assert spec.place is not None
    if attach is None:
        raise FrameError("a tensor came as a place in memory that is not shared with us")
    try:
        return attach(spec.place, spec.dtype, spec.shape)
    except (OSError, ValueError, RuntimeError) as error:
        raise FrameError(f"a tensor is not where the sender says it is: {error}") from None


def _fresh(specs: Sequence[TensorSpec], body_bytes: int) -> list[Tensor]:
    try:
        return [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
    except (RuntimeError, MemoryError):  # the first is torch's
        raise FrameError(f"there is no memory for a body of {body_bytes} bytes") from None


def _check_bools(tensor: Tensor) -> None:
    """Torch's kernels assume that a bool is 0 or 1; another byte gives undefined results."""
    if tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise FrameError("a bool must be the byte 0 or 1")


def _destinations(kind: str, specs: Sequence[TensorSpec], offered: Sequence[Tensor]) -> list[memoryview]:
    """The memory of the tensors offered for a body, checked against the header."""
    if len(offered) != len(specs):
        raise FrameError(f"{kind!r} brings {len(specs)} tensors, but {len(offered)} were offered for them")
    for spec, tensor in zip(specs, offered, strict=True):
        if spec.dtype != tensor.dtype or math.prod(spec.shape) != tensor.numel():
            raise FrameError(
                f"{kind!r} brings {spec.dtype} of shape {spec.shape}, but {tensor.dtype} of shape "
                f"{tuple(tensor.shape)} was offered for it"
            )
    return [byte_view(tensor) for tensor in offered]


def _receive(
    sock: Stream, nbytes: int, what: str, idle: Callable[[], None] | None = None, *, may_end: bool = False
) -> bytes:
    """Exactly this many bytes; with `may_end`, none if the stream ended before the first."""
    while True:
        try:
            received = sock.recv(nbytes, socket.MSG_WAITALL)
            break
        except BlockingIOError as error:  # by SO_RCVTIMEO
            _ask(idle, error)
    if len(received) == nbytes or (may_end and not received):
        return received
    rest = bytearray(nbytes - len(received))
    _fill(sock, memoryview(rest), what, idle)
    return received + rest


def _fill(sock: Stream, view: memoryview, what: str, idle: Callable[[], None] | None = None) -> None:
    """Receive until the view is full."""
    total = view.nbytes
    while view.nbytes:
        # WAITALL leaves the loop to the kernel: a body of 100 MB costs one call, not hundreds.
        try:
            got = sock.recv_into(view, 0, socket.MSG_WAITALL)
        except BlockingIOError as error:  # by SO_RCVTIMEO
            _ask(idle, error)
            continue
        if got == 0:
            raise FrameError(f"the connection ended inside a frame: its {what} lacks {view.nbytes} of {total} bytes")
        view = view[got:]


def _ask(idle: Callable[[], None] | None, error: BlockingIOError) -> None:
    """Call `idle`, which raises when the peer is gone; without `idle`, a timeout is an error."""
    if idle is None:
        raise error
    idle()


# The handshake.

ACCEPTED, BUSY, REFUSED = 1, 2, 3
"""The listener's verdicts: accepted; a connection of this pair exists or is being made; wrong secret or rank."""
_HELLO, _CLAIM, _VERDICT = struct.Struct("!4sH32s"), struct.Struct("!II32s32s"), struct.Struct("!B32s")


class Proven(NamedTuple):
    """A dialler that has proved the secret, and what the listener signs its verdict with."""

    peer: int
    key: bytes
    transcript: bytes


def challenge(sock: Stream, rank: int, secret: bytes, until: float) -> Proven:
    """The listener's side, until the dialler has proved the secret.

    `until` is on the monotonic clock. Raises `Refused`, or OSError when the dialler is silent, slow or gone.
    """
    half = _Half(sock, secret)
    sock.settimeout(max(until - time.monotonic(), 0.001))
    sock.sendall(_HELLO.pack(MAGIC, VERSION, half.sent))
    peer, wanted, theirs, proof = _CLAIM.unpack(_receive_by(sock, _CLAIM.size, until))
    transcript = struct.pack("!II", peer, wanted) + half.sent + theirs
    key = half.key(theirs)
    proved = key is not None and hmac.compare_digest(proof, _sign(key, b"dialler", transcript))
    if key is None or not proved or wanted != rank or peer == rank:
        sock.sendall(_VERDICT.pack(REFUSED, bytes(32)))
        raise Refused(f"rank {rank}: refused a connection that says it is rank {peer} looking for rank {wanted}")
    return Proven(peer, key, transcript)


def give_verdict(sock: Stream, proven: Proven, verdict: int) -> None:
    """Send the listener's verdict; its signature proves that the listener holds the secret too."""
    sock.sendall(_VERDICT.pack(verdict, _sign(proven.key, b"listener%d" % verdict, proven.transcript)))


def prove(sock: Stream, rank: int, peer: int, secret: bytes, until: float) -> int:
    """The dialler's side: ACCEPTED or BUSY. Raises `Refused`, or OSError when the listener is silent or gone."""
    half = _Half(sock, secret)
    magic, version, theirs = _HELLO.unpack(_receive_by(sock, _HELLO.size, until))
    if (magic, version) != (MAGIC, VERSION):
        raise Refused(f"rank {rank}: rank {peer} must speak {MAGIC!r} {VERSION}, got {magic!r} {version}")
    key = half.key(theirs)
    if key is None:
        raise Refused(f"rank {rank}: who answers for rank {peer} does not hold this run's secret")
    transcript = struct.pack("!II", rank, peer) + theirs + half.sent
    sock.sendall(_CLAIM.pack(rank, peer, half.sent, _sign(key, b"dialler", transcript)))
    verdict, proof = _VERDICT.unpack(_receive_by(sock, _VERDICT.size, until))
    if verdict == REFUSED:
        raise Refused(f"rank {rank}: rank {peer} refused the connection: its secret differs, or it is another rank")
    if not hmac.compare_digest(proof, _sign(key, b"listener%d" % verdict, transcript)):
        raise Refused(f"rank {rank}: who answers for rank {peer} does not hold this run's secret")
    return int(verdict)


class _Half:
    """One side's part of the handshake: the bytes that it sends, and the key computed from both sides' bytes."""

    def __init__(self, sock: Stream, secret: bytes) -> None:
        if not secret:
            raise Refused("a channel without a secret can connect to no peer")
        self._secret = secret
        self._agreement = None if sock.family == socket.AF_UNIX else Agreement(secret)
        self.sent = os.urandom(SHARE_BYTES) if self._agreement is None else self._agreement.share

    def key(self, theirs: bytes) -> bytes | None:
        """None where the other side sent an invalid point, so it does not hold the secret."""
        if self._agreement is None:
            return self._secret
        try:
            return self._agreement.key(theirs)
        except ValueError:
            return None


def _sign(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, role + b"\0" + transcript, "sha256")


def _receive_by(sock: Stream, nbytes: int, until: float) -> bytes:
    """Exactly this many bytes; raises TimeoutError past `until`, however slowly they come."""
    received = b""
    while len(received) < nbytes:
        sock.settimeout(max(until - time.monotonic(), 0.001))
        piece = sock.recv(nbytes - len(received))
        if not piece:
            raise ConnectionAbortedError("the connection ended during the handshake")
        received += piece
        if time.monotonic() > until and len(received) < nbytes:
            raise TimeoutError("the handshake took too long")
    return received
