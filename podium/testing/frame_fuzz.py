"""`podium bench fuzz`: feeds damaged and hostile frames to the frame reader and the handshake.

Each frame of `podium.testing.frame_mutations` is accepted or refused; a refusal is a `FrameError` (in the handshake:
`Refused`, or the end of the connection). Anything else counts as a crash, and so does

- accepting a frame although bits of its prologue or header were flipped,
- accepting a frame whose content differs from its header, or exceeds the limits,
- refusing a good frame,
- allocating memory for a body whose description is then refused, detected by the sink, by a limit on the process's
  memory, and for some frames by measuring it.

Most frames are read from memory, in pieces of any size; some through a pair of sockets. Everything follows from the
seed. Not tested here: how the channel treats a good frame that should not have been sent.
"""

from __future__ import annotations

import random
import resource
import socket
import time
import traceback
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from podium.comm.real import frames
from podium.comm.real.frames import MAGIC, VERSION, Frame, FrameError, Refused
from podium.errors import ConfigError
from podium.testing.frame_mutations import Maker, Stream

REASONS = {
    "magic": "must begin with",
    "version": "must be version",
    "header too long": "header bytes",
    "body too long": "body bytes",
    "checksum": "CRC-32",
    "not JSON": "not JSON",
    "fields": "must be an object of",
    "type of a field": "must be of type",
    "number out of range": "must fit",
    "sum of tensors": "must add up",
    "too many tensors": " tensors",
    "landing": "landing must lie",
    "description": "must be described as",
    "dtype": "dtype must be",
    "shape": "a shape must",
    "tensor too large": "bytes of one tensor",
    "place": "a place must",
    "place not shared": "not shared with us",
    "place not there": "not where the sender",
    "bool": "a bool must",
    "no memory": "no memory",
    "cut short": "ended inside a frame",
}
"""The reason that a refusal is counted under, found by a part of its message."""
_AFTER_DESCRIPTION = ("cut short", "bool", "no memory")
"""Reasons that may be found after a body was allocated; all others must be found before."""

_SOCKETS = 0.025  # share of the streams that goes through real sockets
_FITS = 64 << 10  # bytes that fit into a socket's buffer before anything is read
_HANDSHAKES = 20  # streams between two handshakes
_MEASURED = 100  # memory is measured for one stream in this many
_SAMPLES = 5
_CEILING = 1 << 30


class Tally:
    """Counts of outcomes so far."""

    def __init__(self) -> None:
        self.accepted, self.refused = 0, Counter[str]()
        self.by_kind: dict[str, Counter[str]] = {}
        self.handshakes = Counter[str]()
        self.crashes, self.samples = 0, list[dict[str, Any]]()
        self.python_bytes = self.body_bytes = self.bytes = 0
        self.digest = 0

    @property
    def frames(self) -> int:
        return self.accepted + self.refused.total() + self.crashes

    def note(self, kind: str, outcome: str) -> None:
        self.by_kind.setdefault(kind, Counter())["accepted" if outcome == "accepted" else "refused"] += 1
        if outcome == "accepted":
            self.accepted += 1
        else:
            self.refused[outcome] += 1
        self.digest = zlib.crc32(outcome.encode(), self.digest)

    def crash(self, kind: str, error: BaseException, raw: bytes) -> None:
        self.crashes += 1
        self.digest = zlib.crc32(b"crash", self.digest)
        if len(self.samples) < _SAMPLES:
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {str(error)[:200]}"
            self.samples.append({"kind": kind, "error": what, "at": f"{where.name}:{where.lineno}", "raw": raw.hex()})


def bench_fuzz(
    peers: Sequence[str] = (),
    rounds: int | None = None,
    *,
    frames: int = 100_000,
    seconds: float = 60.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Feed frames until `frames` or `seconds` is reached; counts what was accepted, refused (and why), and crashed."""
    if peers or rounds is not None:
        raise ConfigError("bench fuzz: has no peers and no rounds; it takes frames, seconds and seed")
    if frames < 1 or not seconds > 0:
        raise ConfigError(f"bench fuzz: frames and seconds must be above 0, got {frames} and {seconds:g}")
    tally, began = Tally(), time.monotonic()
    with _ceiling():
        _feed(tally, random.Random(seed), frames, began + seconds)
    took = time.monotonic() - began
    return {
        "bench": "fuzz",
        "seed": seed,
        "frames": tally.frames,
        "seconds": took,
        "frames_per_s": tally.frames / took,
        "bytes": tally.bytes,
        "accepted": tally.accepted,
        "refused": tally.refused.total(),
        "refused_by_reason": dict(tally.refused.most_common()),
        "handshakes": dict(tally.handshakes),
        "crashes": tally.crashes,
        "crash_samples": tally.samples,
        "largest_allocation_for_a_bad_description": {
            "body_bytes": tally.body_bytes,
            "python_bytes": tally.python_bytes,
        },
        "by_kind": {name: dict(counts) for name, counts in sorted(tally.by_kind.items())},
        "digest": f"{tally.digest:08x}",
    }


def _feed(tally: Tally, draw: random.Random, frames_wanted: int, until: float) -> None:
    maker = Maker(draw)
    streams, measure = 0, Measure()
    while tally.frames < frames_wanted and time.monotonic() < until:
        stream = maker.stream()
        tally.bytes += len(stream.raw)
        with measure.switched_on() if streams % _MEASURED == 0 else nullcontext(), _connection(stream, draw) as wire:
            _read(stream, wire, tally, measure)
        streams += 1
        if streams % _HANDSHAKES == 0:
            _shake(draw, tally)


@contextmanager
def _connection(stream: Stream, draw: random.Random) -> Iterator[Any]:
    """The connection from which the stream is read: mostly memory, sometimes a socket."""
    if draw.random() > _SOCKETS or len(stream.raw) > _FITS:
        yield Wire(stream.raw, draw.choice((0, 0, 0, 1, 7, 22, 100)))
        return
    left, right = socket.socketpair()
    with left, right:
        left.settimeout(10.0)
        right.settimeout(10.0)
        left.sendall(stream.raw)
        left.shutdown(socket.SHUT_WR)
        yield right


def _read(stream: Stream, wire: Any, tally: Tally, measure: Measure) -> None:
    """Read until the end or the first refusal."""
    asked: list[int] = []
    expected = stream.good_before
    while True:
        del asked[:]
        name = "good" if expected > 0 else stream.name
        measure.begin()
        try:
            frame = frames.read_frame(
                wire, stream.limits, lambda header: asked.append(header.body_bytes), stream.attach
            )
            if frame is None:
                return
            _check(frame, stream, name)
            tally.note(name, "accepted")
        except FrameError as error:
            reason = _reason(error)
            if reason not in _AFTER_DESCRIPTION:
                tally.python_bytes = max(tally.python_bytes, measure.python_bytes)
                tally.body_bytes = max(tally.body_bytes, measure.tensor_bytes, *asked)
            try:
                _check_refusal(reason, name, asked)
            except AssertionError as wrong:
                return tally.crash(name, wrong, stream.raw)
            return tally.note(name, reason)
        except Exception as error:
            return tally.crash(name, error, stream.raw)
        expected -= 1
        if name != "good" and stream.name != "good":
            return  # nothing is read after a bad frame


def _check(frame: Frame, stream: Stream, name: str) -> None:
    """The content of an accepted frame must match its header."""
    header = frame.header
    assert not stream.damaged or name == "good", "a damaged frame was accepted"
    inline = [t for spec, t in zip(header.tensors, frame.body, strict=True) if spec.place is None]
    assert sum(t.nbytes for t in inline) == header.body_bytes <= stream.limits.body_bytes
    assert len(header.tensors) <= stream.limits.tensors and type(header.meta) is dict
    for spec, tensor in zip(header.tensors, frame.body, strict=True):
        assert tensor.dtype is spec.dtype and tuple(tensor.shape) == spec.shape
        assert tensor.dtype is not torch.bool or not tensor.numel() or int(tensor.view(torch.uint8).max()) <= 1


def _check_refusal(reason: str, name: str, asked: list[int]) -> None:
    assert name != "good" or reason == "no memory", f"a good frame was refused: {reason}"
    assert not asked or reason in _AFTER_DESCRIPTION, f"a body was allocated before {reason!r} was found"


def _reason(error: FrameError) -> str:
    text = str(error)
    return next((name for name, part in REASONS.items() if part in text), f"other: {text[:80]}")


class Measure(TorchFunctionMode):
    """Memory allocated for one frame, by Python and by torch; 0 while it is off, which is faster."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.tensor_bytes, self._before = False, 0, 0

    @contextmanager
    def switched_on(self) -> Iterator[None]:
        tracemalloc.start()
        self.on = True
        try:
            with self:
                yield
        finally:
            self.on = False
            tracemalloc.stop()

    def begin(self) -> None:
        self.tensor_bytes = 0
        if self.on:
            tracemalloc.reset_peak()
            self._before = tracemalloc.get_traced_memory()[0]

    @property
    def python_bytes(self) -> int:
        return tracemalloc.get_traced_memory()[1] - self._before if self.on else 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.empty:
            self.tensor_bytes += made.nbytes
        return made


@contextmanager
def _ceiling() -> Iterator[None]:
    """Let the process's memory grow by at most one GiB: allocating a body that must be refused would fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + _CEILING, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Wire:
    """A connection in memory whose other side has sent everything already."""

    family = socket.AF_UNIX

    def __init__(self, raw: bytes, short: int = 0) -> None:
        """The first few `recv` calls return at most `short` bytes, unless that is 0; later ones all that is asked."""
        self._raw, self._at, self._short, self._left = memoryview(raw), 0, short, 8 if short else 0

    def recv(self, nbytes: int, flags: int = 0, /) -> bytes:
        if self._left:
            nbytes, self._left = min(nbytes, self._short), self._left - 1
        piece = bytes(self._raw[self._at : self._at + nbytes])
        self._at += len(piece)
        return piece

    def recv_into(self, view: memoryview, nbytes: int = 0, flags: int = 0, /) -> int:
        piece = self.recv(nbytes or view.nbytes)
        view[: len(piece)] = piece
        return len(piece)

    def sendall(self, data: bytes, /) -> None:
        pass

    def settimeout(self, seconds: float | None, /) -> None:
        pass


# The handshake.

_SECRET = b"of this run"


def _shake(draw: random.Random, tally: Tally) -> None:
    """One side of a handshake reads noise: without proof of the secret it must refuse."""
    listens = draw.random() < 0.5
    raw = _handshake_noise(draw, listens)
    wire: Any = Wire(raw, draw.choice((0, 1, 50)))
    until = time.monotonic() + 10.0
    try:
        if listens:
            frames.challenge(wire, 0, _SECRET, until)
        else:
            frames.prove(wire, 1, 0, _SECRET, until)
    except Refused:
        tally.handshakes["refused"] += 1
    except ConnectionAbortedError:
        tally.handshakes["cut short"] += 1
    except Exception as error:
        tally.crash("handshake", error, raw)
    else:
        tally.crash("handshake", AssertionError("a peer without the secret was accepted"), raw)


def _handshake_noise(draw: random.Random, listens: bool) -> bytes:
    """A claim, or a greeting and a verdict: of the right size or not, and right except for the proof."""
    if listens:
        raw = draw.choice((0, 1, 2**32 - 1)).to_bytes(4, "big") + draw.choice((0, 5)).to_bytes(4, "big")
        raw += draw.randbytes(64)
    else:
        raw = draw.choice((MAGIC, MAGIC, b"HTTP")) + draw.choice((VERSION, VERSION, 0)).to_bytes(2, "big")
        raw += draw.randbytes(32) + bytes([draw.choice((1, 2, 3, 0, 255))]) + draw.randbytes(32)
    match draw.randrange(4):
        case 0:
            return raw[: draw.randrange(len(raw))]
        case 1:
            return draw.randbytes(draw.randrange(200))
    return raw
